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

from chakra_et import cli
from chakra_et.convert.config import ConvertConfig
from chakra_et.convert.rank import RankResult, is_cut
from chakra_et.convert.runs import SetResult, convert_sets, is_converted
from chakra_et.errors import TraceError
from chakra_et.findings import sentence
from chakra_et.graph.pairing import list_ranks
from chakra_et.names import SIDES
from chakra_et.text import printable, table
from chakra_et.traces import sets as trace_sets


def main(argv: Sequence[str] | None = None) -> int:
    """Convert what the flags name, and return the exit status."""
    config = cli.parse(
        ConvertConfig, argv, description="Convert host and device traces to Chakra execution traces."
    )
    return command(lambda: show(convert(config, config.sets()), config))


def main_remaining(argv: Sequence[str] | None = None) -> int:
    """The same for what is not converted yet, or whose last conversion failed."""
    config = cli.parse(
        ConvertConfig, argv, description="Convert what is not converted yet, or whose last conversion failed."
    )
    return command(lambda: _convert_remaining(config))


def _convert_remaining(config: ConvertConfig) -> int:
    sets = config.sets()
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
    rows = [("file", "nodes", "edges", "KB", "linked", "left out", "overhead", "steps ms", "result")]
    sentences, reports = [], []
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
        sentences += _warnings(result)
        sentences += _overhead(result, config.max_overhead)
        sentences += [f"error: {text}" for text in result.problems]
        sentences += [f"note: {text}" for text in result.notes]
    for line in table(rows):
        print(line)
    if config.report and config.engine == "native":
        for report in reports:
            print("\n".join(printable(line) for line in report.splitlines()))
    sys.stdout.flush()
    for line in sentences:
        _say(line)
    _print_totals(results, config)
    return 1 if any(result.failed for result in results) else 0


def _print_totals(results: list[SetResult], config: ConvertConfig) -> None:
    good = [outcome for result in results for outcome in result.good.values()]
    kept = sum(outcome.kept for outcome in good)
    failed = sum(result.failed for result in results)
    line = f"{len(good) - kept} files written to {printable(_where(results, config))}"
    line += f", {kept} kept" if kept else ""
    print(f"{line}; {failed} of {len(results)} runs with errors.")
    if config.ranks:
        print("these are parts of runs: convert_remaining.py checks and completes them when all are there.")


def _where(results: list[SetResult], config: ConvertConfig) -> str:
    folders = sorted({str(result.traces.folder) for result in results})
    return ", ".join(folders) or config.output or config.dir


def _warnings(result: SetResult) -> list[str]:
    """One sentence for each warning of a run, with its count over all ranks."""
    of_key: dict[str, dict[int, int]] = {}
    for rank, outcome in result.good.items():
        for key, count in outcome.report.warnings.items():
            of_key.setdefault(key, {})[rank] = count
    return [
        f"warning: {_named(result, list(counts))}: {sentence(key)}: {sum(counts.values())}"
        for key, counts in sorted(of_key.items())
    ]


def _overhead(result: SetResult, most: float) -> list[str]:
    """A warning where much of a critical path is unexplained, with the worst rank's figures."""
    shares = {rank: outcome.report.overhead_share for rank, outcome in result.good.items()}
    beyond = {rank: share for rank, share in shares.items() if share is not None and share * 100 > most}
    if not beyond:
        return []
    worst = max(beyond, key=lambda rank: beyond[rank])
    path = result.good[worst].report.critical_path_us
    host, device = (path[f"{side}-overhead"] / sum(path.values()) for side in ("host", "device"))
    return [
        f"warning: {_named(result, list(beyond))}: {'up to ' * (len(beyond) > 1)}{beyond[worst]:.0%} of the "
        f"critical path is overhead that no event explains ({host:.0%} on the host, mostly Python between "
        f"operators; {device:.0%} on the device)"
    ]


def _named(result: SetResult, ranks: list[int]) -> str:
    """The file of one rank, or the run and the ranks in question."""
    traces = result.traces
    if len(ranks) == 1:
        return str(traces.et_file(ranks[0]))
    some = "all ranks" if len(ranks) == len(result.ranks) else f"ranks {list_ranks(ranks)}"
    return f"{traces.folder / traces.name}, {some}"


def _state(outcome: RankResult) -> str:
    if outcome.problems:
        return "invalid"
    cut = any(is_cut(outcome.report, side) for side in SIDES)
    words = ["kept" if outcome.kept else "cut" if cut else "ok"]
    found = outcome.report.repairs.items()
    repairs = sum(count for key, count in found if key.startswith(("host-repair", "device-repair")))
    words += [f"{repairs} repairs" if repairs > 1 else "1 repair"] if repairs else []
    return ", ".join(words)


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


def _say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)
