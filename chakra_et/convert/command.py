"""``chakra-et convert``: host and device traces to Chakra execution traces.

For each run NAME: NAME.0.et, NAME.1.et … (as simulators look for them), NAME.et (rank 0's bytes),
NAME_comm_groups.json and NAME_conversion.json (what went in, what came out, every loss). The exit status is 0
if every rank of every run was converted and its file is valid, 1 if not, 2 if nothing could be done.
"""

from __future__ import annotations

import os

# Nothing here multiplies matrices, and the threads for it cost a fifth of a small conversion's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from chakra_et import cli
from chakra_et.convert.config import ConvertConfig
from chakra_et.convert.rank import RankResult
from chakra_et.convert.runs import SetResult, convert_sets, is_converted
from chakra_et.errors import TraceError
from chakra_et.text import printable, table
from chakra_et.traces import sets as trace_sets


def main(argv: Sequence[str] | None = None) -> int:
    """Convert what the flags name, and return the exit status."""
    config = cli.parse(
        ConvertConfig, argv, description="Convert host and device traces to Chakra execution traces."
    )
    return command(lambda: show(convert(config, trace_sets.find(Path(config.dir), config.name)), config))


def main_remaining(argv: Sequence[str] | None = None) -> int:
    """The same for what is not converted yet, or whose last conversion failed."""
    config = cli.parse(
        ConvertConfig, argv, description="Convert what is not converted yet, or whose last conversion failed."
    )
    return command(lambda: _convert_remaining(config))


def _convert_remaining(config: ConvertConfig) -> int:
    sets = trace_sets.find(Path(config.dir), config.name)
    options, run = config.pair_options(), config.run_options(1, keep=True)
    remaining = [traces for traces in sets if not is_converted(traces, options, run)]
    print(f"{len(sets) - len(remaining)} of {len(sets)} runs are converted already.")
    return show(convert(config, remaining, keep=True), config)


def convert(config: ConvertConfig, sets: list[trace_sets.TraceSet], keep: bool = False) -> list[SetResult]:
    """Convert ``sets``; with ``keep`` files that are valid and newer than their traces stay."""
    pairs = sum(len(traces.pairs) for traces in sets)
    with config.progress_bar(pairs) as progress:
        return convert_sets(sets, config.pair_options(), config.run_options(pairs, keep), progress)


def command(work: Callable[[], int]) -> int:
    """Run a conversion command to its exit status; SIGTERM ends it as Ctrl-C does: workers end, unfinished
    files go."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    left = "interrupted; files that are there are whole, and convert_remaining.py makes the others."
    return cli.run(work, TraceError, left)


def show(results: list[SetResult], config: ConvertConfig) -> int:
    """Print what became of each rank; returns the exit status."""
    rows = [("file", "nodes", "edges", "KB", "linked", "left out", "steps ms", "result")]
    sentences, reports = [], []
    for result in results:
        traces = result.traces
        for rank, outcome in sorted(result.ranks.items()):
            file = printable(traces.et_file(rank).name)
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
            reports += [f"{printable(traces.name)} {outcome.report.text()}"]
        sentences += [f"error: {text}" for text in result.problems]
        sentences += [f"note: {text}" for text in result.notes]
    for line in table(rows):
        print(line)
    if config.report and config.engine == "native":
        for report in reports:
            print("\n".join(printable(line) for line in report.splitlines()))
    sys.stdout.flush()
    for sentence in sentences:
        _say(sentence)
    _print_totals(results, config)
    return 1 if any(result.failed for result in results) else 0


def _print_totals(results: list[SetResult], config: ConvertConfig) -> None:
    good = [outcome for result in results for outcome in result.good.values()]
    kept = sum(outcome.kept for outcome in good)
    failed = sum(result.failed for result in results)
    line = f"{len(good) - kept} files written to {printable(config.dir)}"
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
    print(printable(sentence), file=sys.stderr)
