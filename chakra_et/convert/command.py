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

import json
import signal
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from chakra_et import cli, files
from chakra_et.convert.config import ConvertConfig
from chakra_et.convert.rank import RankResult, is_cut
from chakra_et.convert.runs import SetResult, convert_sets, is_converted
from chakra_et.errors import TraceError
from chakra_et.findings import sentence
from chakra_et.names import SIDES
from chakra_et.simulate.measured_steps import steps_sentence
from chakra_et.text import list_ranks, printable, progress_bar, table
from chakra_et.traces import sets as trace_sets


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""

    def work() -> int:
        config = cli.parse(
            ConvertConfig, argv, description="Convert host and device traces to Chakra execution traces."
        )
        return show(convert(config, config.sets()), config)

    return command(work)


def main_remaining(argv: Sequence[str] | None = None) -> int:
    """Convert only runs that are not converted yet or whose last conversion failed."""

    def work() -> int:
        about = "Convert runs that are not converted yet or whose conversion failed."
        config = cli.parse(ConvertConfig, argv, description=about)
        sets = config.sets()
        options, run = config.pair_options(), config.run_options(keep=True)
        remaining = [traces for traces in sets if not is_converted(traces, options, run)]
        for folder in {traces.folder for traces in sets}:
            files.remove_abandoned(folder)
        if not config.json:
            print(f"{len(sets) - len(remaining)} of {len(sets)} runs are already converted.")
        return show(convert(config, remaining, keep=True), config)

    return command(work)


def convert(config: ConvertConfig, sets: list[trace_sets.TraceSet], keep: bool = False) -> list[SetResult]:
    """Convert ``sets``. With ``keep``, keep files that are valid and newer than their traces."""
    pairs = sum(len(traces.pairs) for traces in sets)
    with progress_bar(pairs, "converting") as progress:
        return convert_sets(sets, config.pair_options(), config.run_options(keep), progress)


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
    status = 1 if any(result.failed for result in results) else 0
    if config.json:
        print(json.dumps({"status": status, "runs": [as_json(result) for result in results]}))
        return status
    rows: list[tuple[str, ...]] = [
        ("file", "nodes", "edges", "KB", "linked", "left out", "overhead", "steps ms", "result")
    ]
    sentences: list[str] = []
    reports: list[str] = []
    for result in results:
        traces = result.traces
        for rank, outcome in sorted(result.ranks.items()):
            file = printable(traces.et_file(rank).name)
            if isinstance(outcome, TraceError):
                rows.append((file, "", "", "", "", "", "", "", "FAILED"))
                sentences.append(f"error: {outcome}")
                continue
            rows.append((file, *_figures(outcome, config), _state(outcome)))
            sentences += [f"error: {text}" for text in outcome.problems]
            reports += [f"{printable(traces.name)} {outcome.report.text()}"]
        ranks = [rank for rank in result.good.values() if rank.communication is not None]
        steps = [median(list(rank.report.steps_us.values()) or [0.0]) for rank in ranks]
        metadata = [rank.communication.metadata for rank in ranks if rank.communication is not None]
        sentences += [f"note: {text}" for text in steps_sentence(metadata, steps)]
        sentences += _warnings(result)
        sentences += _overhead(result, config.max_overhead)
        sentences += [f"error: {text}" for text in result.problems]
        sentences += [f"warning: {text}" for text in result.warnings]
        sentences += [f"note: {text}" for text in result.notes]
    for line in table(rows):
        print(line)
    if config.report and config.engine == "native":
        for report in reports:
            print("\n".join(printable(line) for line in report.splitlines()))
    sys.stdout.flush()
    for line in sentences:
        print(printable(line), file=sys.stderr)
    _print_totals(results, config)
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


def _print_totals(results: list[SetResult], config: ConvertConfig) -> None:
    converted = [outcome for result in results for outcome in result.good.values()]
    kept = sum(outcome.kept for outcome in converted)
    failed = sum(result.failed for result in results)
    line = f"{len(converted) - kept} files written to {printable(_where(results, config))}"
    line += f", {kept} kept" if kept else ""
    print(f"{line}; {failed} of {len(results)} runs with errors.")
    if config.ranks:
        print("only some ranks were converted: run convert_remaining.py once all ranks are there.")


def _where(results: list[SetResult], config: ConvertConfig) -> str:
    folders = sorted({str(result.traces.folder) for result in results})
    return ", ".join(folders) or config.output or config.dir


def _warnings(result: SetResult) -> list[str]:
    """One sentence per warning of a run, with its count over all ranks."""
    by_key: dict[str, dict[int, int]] = {}
    for rank, outcome in result.good.items():
        for key, count in outcome.report.warnings.items():
            by_key.setdefault(key, {})[rank] = count
    return [
        f"warning: {_named(result, list(counts))}: {sentence(key)}: {sum(counts.values())}"
        for key, counts in sorted(by_key.items())
    ]


def _overhead(result: SetResult, limit: float) -> list[str]:
    """A warning if more than ``limit`` percent of a critical path is overhead, for the worst rank."""
    shares = {rank: outcome.report.overhead_share for rank, outcome in result.good.items()}
    above = {rank: share for rank, share in shares.items() if share is not None and share * 100 > limit}
    if not above:
        return []
    worst = max(above, key=lambda rank: above[rank])
    path = result.good[worst].report.critical_path_us
    host, device = (path[f"{side}-overhead"] / sum(path.values()) for side in ("host", "device"))
    return [
        f"warning: {_named(result, list(above))}: {'up to ' * (len(above) > 1)}{above[worst]:.0%} of the "
        f"critical path is overhead that no event explains ({host:.0%} on the host, mostly Python between "
        f"operators; {device:.0%} on the device)"
    ]


def _named(result: SetResult, ranks: list[int]) -> str:
    """The file of one rank, or the run and the numbers of several."""
    traces = result.traces
    if len(ranks) == 1:
        return str(traces.et_file(ranks[0]))
    some = "all ranks" if len(ranks) == len(result.ranks) else f"ranks {list_ranks(ranks)}"
    return f"{traces.folder / traces.name}, {some}"


def _state(outcome: RankResult) -> str:
    if outcome.problems:
        return "invalid"
    cut = any(is_cut(outcome.report, side) for side in SIDES)
    state = "kept" if outcome.kept else "cut" if cut else "ok"
    counts = outcome.report.repairs.items()
    repairs = sum(count for key, count in counts if key.startswith(("host-repair", "device-repair")))
    return f"{state}, {repairs} repair{'s' * (repairs > 1)}" if repairs else state


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
