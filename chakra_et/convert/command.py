"""``chakra-et convert``: convert host and device traces to Chakra execution traces.

    chakra-et convert traces/ -o et/
    chakra-et convert worker0.pt.trace.json.gz -o et/ --json

For each run NAME: NAME.0.et, NAME.1.et … (named as simulators expect), NAME.et (rank 0's file again),
NAME_comm_groups.json and NAME_conversion.json (events in, nodes out, every loss). Exit status: 0 if every
rank of every run was converted and its file is valid, 1 if not, 2 for unusable arguments or input.
"""

from __future__ import annotations

import os

# The conversion multiplies no matrices, and starting BLAS threads takes a fifth of a small conversion.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import inspect
import json
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from chakra_et import cli, files
from chakra_et.cli import cluster, option
from chakra_et.convert.communication_records import communication_job, is_record
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import Engine, RankResult, is_cut
from chakra_et.convert.runs import RunOptions, SetResult, convert_sets
from chakra_et.convert.untraced_ranks import add_untraced
from chakra_et.errors import TraceError
from chakra_et.et.sets import Skeletons
from chakra_et.findings import sentence
from chakra_et.jobs import default_workers
from chakra_et.names import SIDES, RunFiles
from chakra_et.simulate.measured_steps import steps_sentence
from chakra_et.text import list_ranks, plural, printable, progress_bar, table
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.discovery import TraceFile, look_at
from chakra_et.traces.records import MAX_BYTES
from chakra_et.traces.sets import TraceSet

Kind = TypeVar("Kind")
FOLDER = "outputs"
RARE = "for damaged or hostile files"
MOST_UNEXPLAINED = 0.1
"""Of a critical path; more is a warning."""


@dataclass
class ConvertConfig:
    """How a folder of traces is converted."""

    files: tuple[str, ...] = option("trace files, or one folder (default: --dir)", (), positional=True)
    dir: str = option("folder with the traces", FOLDER, metavar="FOLDER")
    output: str = option(
        "folder for the .et files (default: that of the traces)", "", short="-o", metavar="FOLDER"
    )
    name: str = option("convert only runs whose NAME matches this glob", "*", metavar="GLOB")
    ranks: str = option(
        "convert only these ranks: 0-7,12, or I/N for every Nth rank from I on; convert_remaining.py then "
        "finishes the run",
        "",
    )
    comm_kernels: str = option("JSON table of additional communication kernels, by name", "", metavar="FILE")
    engine: Engine = option("this converter, or MLCommons' chakra_trace_link and chakra_converter", "native")
    workers: int = option("number of processes, or of jobs in a queue; 0: one per core", 0, least=0)
    cluster: str = cluster()
    step: str = option("number of the one ProfilerStep to convert, or all", "all")
    timestamps: bool = option("write start_time_micros", True)
    skeletons: Skeletons = option(
        "write NAME.N.skeleton.parquet, a short form of each rank from which runs of thousands of ranks are "
        "replayed, predicted and reported; auto: for more than 64 ranks",
        "auto",
    )
    json: bool = option("print JSON: by run and rank the report, the file, and every error", False)
    allow_unlinked: bool = option(
        "continue if host and device trace hardly match or come from two processes", False, group=RARE
    )
    allow_truncated: bool = option(
        "continue if a trace was cut off or device work is missing", False, group=RARE
    )
    allow_missing_ranks: bool = option("continue if traces of some ranks are missing", False, group=RARE)
    max_bytes: int = option("refuse a larger trace (uncompressed size)", MAX_BYTES, group=RARE)

    def __post_init__(self) -> None:
        if self.step != "all" and not (self.step.isascii() and self.step.isdigit()):
            raise ValueError(f"--step must be the number of a ProfilerStep or all, not {self.step!r}")
        if not all((*self.files, self.dir)):
            raise ValueError("the name of a file or folder is empty: check the variable that it comes from")
        if self.files and self.dir != FOLDER:
            raise ValueError(f"--dir {self.dir} doesn't go with files or a folder: give one or the other")
        try:
            trace_sets.rank_choice(self.ranks)
        except ValueError as error:
            raise ValueError(f"--ranks {error}") from None

    def options(self, kind: Callable[..., Kind], **others: Any) -> Kind:
        """Options of another kind: the fields that have the same name here, and ``others``."""
        names = {name for name in inspect.signature(kind).parameters if hasattr(self, name)}
        return kind(**{name: getattr(self, name) for name in names} | others)

    def paths(self) -> list[Path]:
        """The files that are named, or in the folder."""
        given = [files.path_of(name) for name in self.files] or [files.path_of(self.dir)]
        folder = given[0] if len(given) == 1 and given[0].is_dir() else None
        return sorted(path for path in folder.iterdir() if path.is_file()) if folder else given

    def sets(self) -> list[TraceSet]:
        """The runs that the flags name. Raises ``TraceError`` if the files or folders hold no traces."""
        output = files.path_of(self.output) if self.output else None
        if output and not files.is_remote(output):
            output.mkdir(parents=True, exist_ok=True)
        paths = [files.path_of(name) for name in self.files] or [files.path_of(self.dir)]
        if not self.files or (len(paths) == 1 and paths[0].is_dir()):
            sets = trace_sets.find(paths[0], self.name, output)
        else:
            sets = trace_sets.of_files(paths, output)
        ranks = sorted({rank for traces in sets for rank in (*traces.pairs, *traces.incomplete)})
        # A share I/N of the ranks may be empty, as with more tasks than ranks.
        if "/" not in self.ranks and not any(map(trace_sets.rank_choice(self.ranks), ranks)):
            raise TraceError(
                f"--ranks {self.ranks}: nothing to convert, as the traces are of ranks {list_ranks(ranks)}."
            )
        return sets


def main(argv: Sequence[str] | None = None, keep: bool = False) -> int:
    """Run the command and return its exit status. ``keep``: keep valid files of an earlier conversion."""

    def work() -> int:
        about = "Convert host and device traces to Chakra execution traces."
        about = "Convert the ranks that aren't converted yet, or not with these flags." if keep else about
        config = cli.parse(ConvertConfig, argv, description=about)
        records = [path for path in config.paths() if is_record(path)]
        return _records(records, config) if records else show(convert(config, config.sets(), keep), config)

    return command(work)


def _records(paths: list[Path], config: ConvertConfig) -> int:
    """Convert files that hold communication alone, together with traces of some ranks where there are any.
    Without these the run has the name of the folder."""
    others = [path for path in config.paths() if path not in paths]
    if any(isinstance(look_at(path), TraceFile) for path in others):
        results = convert(replace(config, allow_missing_ranks=True), config.sets())
        if status := show(results, config):
            return status
        if len(results) > 1:
            several = f"the traces beside the records are of {len(results)} runs"
            raise TraceError(f"{paths[0].parent}: {several}: give those of one run")
        run: RunFiles = results[0].traces
        notes, ended = add_untraced(paths, run), "with the ranks that were filled"
    else:
        folder = paths[0].parent.resolve()
        run = RunFiles(Path(config.output or folder), folder.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        notes, ended = communication_job(paths, run), "communication only"
        if others:
            notes.append(f"files that are neither records nor traces, left out: {len(others)}")
    for note in notes:
        print(f"warning: {run.folder / run.name}: {printable(note)}", file=sys.stderr)
    print(f"{plural(len(run.et_files()), 'file')} written to {printable(str(run.folder))}: {ended}.")
    return 0


def convert(config: ConvertConfig, sets: list[TraceSet], keep: bool = False) -> list[SetResult]:
    """Convert ``sets``. With ``keep``, keep files that are valid and newer than their traces."""
    pairs = sum(len(traces.pairs) for traces in sets)
    ranks = trace_sets.rank_choice(config.ranks) if config.ranks else None
    workers = config.workers or default_workers()
    run = config.options(RunOptions, workers=workers, ranks=ranks, keep=keep)
    with progress_bar(pairs, "converting") as progress:
        return convert_sets(sets, config.options(PairOptions), run, progress)


def command(work: Callable[[], int]) -> int:
    """Run a conversion command and return its exit status. SIGTERM ends it as Ctrl-C does: workers are ended
    and incomplete files removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    interrupted = "interrupted; the files written are complete, and convert_remaining.py converts the rest."
    return cli.run(work, TraceError, interrupted)


def show(results: list[SetResult], config: ConvertConfig) -> int:
    """Print the result of each rank and return the exit status."""
    failed = sum(result.failed for result in results)
    status = 1 if failed else 0
    if config.json:
        print(json.dumps({"status": status, "runs": [as_json(result) for result in results]}))
        return status
    rows: list[tuple[str, ...]] = [
        ("file", "nodes", "edges", "KB", "linked", "left out", "overhead", "steps ms", "result")
    ]
    sentences: list[str] = []
    for result in results:
        for rank, outcome in sorted(result.ranks.items()):
            file = printable(result.traces.et_file(rank).name)
            if isinstance(outcome, TraceError):
                rows.append((file, "", "", "", "", "", "", "", "FAILED"))
                sentences.append(f"error: {outcome}")
                continue
            state = "kept" if outcome.kept else "ok"
            if not outcome.kept and any(is_cut(outcome.report, side) for side in SIDES):
                state = "cut"
            counts = outcome.report.repairs.items()
            repairs = sum(n for key, n in counts if key.startswith(("host-repair", "device-repair")))
            if repairs:
                state += f", {plural(repairs, 'repair')}"
            rows.append((file, *_figures(outcome, config), "invalid" if outcome.problems else state))
            sentences += [f"error: {text}" for text in outcome.problems]
        communication = result.communication
        steps = [fmean([*result.good[rank].report.steps_us.values()] or [0.0]) for rank in communication]
        metadata = [trace.metadata for trace in communication.values()]
        sentences += [f"note: {result.prefix}: {text}" for text in steps_sentence(metadata, steps)]
        sentences += _warnings(result)
        for kind, texts in (("error", result.problems), ("warning", result.warnings), ("note", result.notes)):
            sentences += [f"{kind}: {text}" for text in texts]
    for line in table(rows):
        print(line)
    sys.stdout.flush()
    for line in sentences:
        print(printable(line), file=sys.stderr)
    converted = [outcome for result in results for outcome in result.good.values()]
    kept = sum(outcome.kept for outcome in converted)
    where = printable(", ".join(sorted({str(result.traces.folder) for result in results})))
    also = f", {kept} kept" if kept else ""
    line = f"{plural(len(converted) - kept, 'file')} written to {where}{also}"
    print(f"{line}; {failed} of {plural(len(results), 'run')} with errors.")
    if config.ranks:
        print("only some ranks were converted: run convert_remaining.py once all ranks are there.")
    return status


def as_json(result: SetResult) -> dict[str, Any]:
    """One run: its sentences, and by rank the .et file and what NAME_conversion.json says, or the error."""
    ranks = {
        rank: {"error": str(outcome)}
        if isinstance(outcome, TraceError)
        else outcome.report.as_json()
        | {"file": str(result.traces.et_file(rank)), "bytes": outcome.bytes, "kept": outcome.kept}
        | {"problems": outcome.problems}
        for rank, outcome in sorted(result.ranks.items())
    }
    sentences = {"problems": result.problems, "warnings": result.warnings, "notes": result.notes}
    return {"name": result.traces.name, "folder": str(result.traces.folder), "ranks": ranks} | sentences


def _warnings(result: SetResult) -> list[str]:
    """One sentence per warning of a run, with its count over all ranks; and one if nothing explains more than
    a tenth of a critical path, for the worst rank."""
    by_key: dict[str, dict[int, int]] = defaultdict(dict)
    above: dict[int, float] = {}
    for rank, outcome in result.good.items():
        for key, count in outcome.report.warnings.items():
            by_key[key][rank] = count
        whole = sum(outcome.report.critical_path_us.values())
        if outcome.report.unexplained_us > MOST_UNEXPLAINED * whole:
            above[rank] = outcome.report.unexplained_us / whole
    found = [
        f"warning: {_named(result, list(counts))}: {sentence(key)}: {sum(counts.values())}"
        for key, counts in sorted(by_key.items())
    ]
    if above:
        most = f"{'up to ' * (len(above) > 1)}{max(above.values()):.0%}"
        found.append(
            f"warning: {_named(result, list(above))}: {most} of the critical path is time that nothing "
            "recorded explains: gaps on the device, and of 1 ms and more on the host"
        )
    return found


def _named(result: SetResult, ranks: list[int]) -> str:
    """The file of one rank, or the run and the numbers of several."""
    if len(ranks) == 1:
        return str(result.traces.et_file(ranks[0]))
    some = "all ranks" if len(ranks) == len(result.ranks) else f"ranks {list_ranks(ranks)}"
    return f"{result.prefix}, {some}"


def _figures(outcome: RankResult, config: ConvertConfig) -> tuple[str, ...]:
    size = f"{outcome.bytes / 1000:.0f}"
    if config.engine != "native":
        return ("", "", size, "", "", "", "")
    report = outcome.report
    steps = " ".join(f"{micros / 1000:.1f}" for micros in report.steps_us.values())
    left_out = str(sum(report.losses.values()))
    linked = f"{report.link_rate:.1%}" if "no-host-trace" not in report.findings else "-"
    overhead = "-" if report.overhead_share is None else f"{report.overhead_share:.1%}"
    return (f"{report.nodes:,}", f"{report.edges:,}", size, linked, left_out, overhead, steps)
