"""The flags of the conversion scripts, how they end, and the table that they end with."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chakra_et import trace_sets
from chakra_et.convert import PairOptions
from chakra_et.convert_rank import Engine, RankResult
from chakra_et.convert_sets import RunOptions, SetResult, default_workers
from chakra_et.emit import CommTypes
from chakra_et.errors import TraceError
from chakra_et.gaps import HostGaps
from chakra_et.repair_types import RepairLimits

LIMITS = RepairLimits()


@dataclass
class ConvertConfig:
    """How a folder of traces is converted."""

    dir: str = field(default="outputs", metadata={"help": "folder with NAME_host.json, NAME_device.json …"})
    name: str = field(default="*", metadata={"help": "only runs whose NAME fits this glob"})
    ranks: str = field(
        default="",
        metadata={
            "help": "only these ranks: 0-7,12, or I/N for every N-th from I on; convert_remaining.py then "
            "finishes the run"
        },
    )
    engine: Engine = field(
        default="native",
        metadata={"help": "our converter, or MLCommons' chakra_trace_link and chakra_converter"},
    )
    workers: int = field(default=0, metadata={"help": "processes, 0: one for each core"})
    timeout: float = field(default=0.0, metadata={"help": "seconds for one rank, 0: no limit"})
    step: str = field(default="all", metadata={"help": "all, or the number of one ProfilerStep"})
    host_gaps: HostGaps = field(
        default="node",
        metadata={"help": "time outside of operators: as nodes, in the next node, or left out"},
    )
    timestamps: bool = field(default=True, metadata={"help": "write start_time_micros"})
    comm_types: CommTypes = field(
        default="schema",
        metadata={"help": "collective types as in the schema, or only those that ASTRA-sim runs"},
    )
    keep_merged: bool = field(
        default=False, metadata={"help": "also write NAME_merged.json: both traces as one"}
    )
    report: bool = field(default=False, metadata={"help": "print what went in and came out of each rank"})
    allow_unlinked: bool = field(
        default=False,
        metadata={"help": "go on although host and device trace hardly match, or are of two processes"},
    )
    allow_missing_ranks: bool = field(
        default=False, metadata={"help": "go on although traces of some ranks are missing"}
    )
    allow_mixed: bool = field(
        default=False, metadata={"help": "go on with a damaged trace that mixes several processes' records"}
    )
    min_records: int = field(
        default=LIMITS.min_records,
        metadata={"help": "nodes or events that must be left of a damaged trace, or it is refused"},
    )
    max_bytes: int = field(default=8 << 30, metadata={"help": "size of a trace, unpacked"})
    max_ratio: int = field(
        default=LIMITS.max_ratio, metadata={"help": "unpacked size of a gzip trace over its size"}
    )

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"--workers {self.workers} makes no sense; give 1 or more, or 0 for one a core")
        if not self.timeout >= 0:
            raise ValueError(f"--timeout {self.timeout} makes no sense; give seconds, or 0 for no limit")
        if self.step != "all" and not (self.step.isascii() and self.step.isdigit()):
            raise ValueError(f"--step {self.step} makes no sense; give the number of a ProfilerStep, or all")
        try:
            trace_sets.rank_choice(self.ranks)
        except ValueError as error:
            raise ValueError(f"--ranks {error}") from None
        self._limits()

    def _limits(self) -> RepairLimits:
        return RepairLimits(
            min_records=self.min_records,
            max_bytes=self.max_bytes,
            max_ratio=self.max_ratio,
            allow_mixed=self.allow_mixed,
        )

    def pair_options(self) -> PairOptions:
        """What one rank's conversion needs to know."""
        return PairOptions(
            self.step,
            self.host_gaps,
            self.timestamps,
            self.comm_types,
            self.allow_unlinked,
            limits=self._limits(),
        )

    def run_options(self, pairs: int, keep: bool) -> RunOptions:
        """How the runs, ``pairs`` ranks in all, are converted; ``keep``: what is there and valid stays."""
        return RunOptions(
            self.engine,
            self.workers or default_workers(pairs),
            self.timeout,
            self.keep_merged,
            self.allow_missing_ranks,
            trace_sets.rank_choice(self.ranks) if self.ranks else None,
            keep,
        )

    @contextlib.contextmanager
    def progress_bar(self, total: int) -> Iterator[Callable[[], None]]:
        """A bar over ``total`` ranks; nothing where the output is not a terminal."""
        if not sys.stderr.isatty() or total < 2:
            yield lambda: None
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # its thread would be there when workers are forked
        with tqdm(total=total, unit="rank", desc="converting") as bar:
            yield lambda: bar.update() and None


def command(work: Callable[[], int]) -> int:
    """Run a conversion command to its exit status; no bad input shows a traceback.

    SIGTERM ends it as Ctrl-C does: workers end, unfinished files go.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    # A terminal that lacks a letter of a name or path is no reason to stop.
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = work()
        sys.stdout.flush()
        return status
    except TraceError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; files that are there are whole, and convert_remaining.py makes the others.")
        return 130
    except BrokenPipeError:
        # Whoever read the output has left (`… | head`); without this the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _say(f"error: {error.filename or 'output'}: {error.strerror or error}.")
        return 2


def show(results: list[SetResult], config: ConvertConfig) -> int:
    """Print what became of each rank; returns the exit status."""
    rows = [("file", "nodes", "edges", "KB", "linked", "left out", "steps ms", "result")]
    sentences, reports = [], []
    for result in results:
        traces = result.traces
        for rank, outcome in sorted(result.ranks.items()):
            file = _printable(traces.et_file(rank).name)
            if isinstance(outcome, TraceError):
                rows.append((file, "", "", "", "", "", "", "FAILED"))
                sentences.append(f"error: {outcome}")
                continue
            rows.append((file, *_figures(outcome, config), _state(outcome)))
            sentences += [f"error: {text}" for text in outcome.problems]
            sentences += [
                f"warning: {traces.et_file(rank)}: {text}: {count}"
                for text, count in sorted(outcome.report.warnings.items())
            ]
            reports += [f"{_printable(traces.name)} {outcome.report.text()}"]
        sentences += [f"error: {text}" for text in result.problems]
        sentences += [f"note: {text}" for text in result.notes]
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if config.report and config.engine == "native":
        for report in reports:
            print("\n".join(_printable(line) for line in report.splitlines()))
    sys.stdout.flush()
    for sentence in sentences:
        _say(sentence)
    _print_totals(results, config)
    return 1 if any(result.failed for result in results) else 0


def _print_totals(results: list[SetResult], config: ConvertConfig) -> None:
    good = [outcome for result in results for outcome in result.good.values()]
    kept = sum(outcome.kept for outcome in good)
    failed = sum(result.failed for result in results)
    line = f"{len(good) - kept} files written to {_printable(config.dir)}"
    line += f", {kept} kept" if kept else ""
    print(f"{line}; {failed} of {len(results)} runs with errors.")
    if config.ranks:
        print("these are parts of runs: convert_remaining.py checks and completes them when all are there.")


def _state(outcome: RankResult) -> str:
    if outcome.problems:
        return "invalid"
    words = ["kept" if outcome.kept else "ok"]
    repairs = sum(count for text, count in outcome.report.repairs.items() if " trace, " in text)
    words += [f"{repairs} repairs" if repairs > 1 else "1 repair"] if repairs else []
    return ", ".join(words)


def _figures(outcome: RankResult, config: ConvertConfig) -> tuple[str, ...]:
    size = f"{outcome.bytes / 1000:.0f}"
    if config.engine != "native":
        return ("", "", size, "", "", "")
    report = outcome.report
    steps = " ".join(f"{micros / 1000:.1f}" for micros in report.steps_us.values())
    left_out = str(sum(report.losses.values()))
    return (f"{report.nodes:,}", f"{report.edges:,}", size, f"{report.link_rate:.1%}", left_out, steps)


def _say(sentence: str) -> None:
    print(_printable(sentence), file=sys.stderr)


def _printable(text: str) -> str:
    """Names may hold line ends, and codes that a terminal obeys."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )
