#!/usr/bin/env python3
"""What the graphs explain of the measured time: shares of the critical path, and what replays give back.

    ./run_all_profiling.sh --cpu                        makes the captures in outputs/
    python benchmarks/fidelity_benchmark.py             measures them
    python benchmarks/fidelity_benchmark.py --update    and puts the tables into CONVERSION_SUMMARY.md

Each run in --dir, and the eight DLRM ranks in --dlrm, is converted anew into a scratch folder and replayed,
all ranks together, in both semantics. That a replay gives the measured time back is by construction: what
nothing explains is an overhead node. So the table shows how much of the critical path that is. The exit
status is 1 if the replay of a rank is off by more than 2% (device) or 5% (astra).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import put
from chakra_et import cli
from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions
from chakra_et.errors import TraceError
from chakra_et.et.sets import find_rank_sets
from chakra_et.simulate import command as replay
from chakra_et.traces import sets as trace_sets

WORST_PERCENT = {"device": 2.0, "astra": 5.0}
SIZES = "run", "ranks", "traces, MB", "nodes", "edges", ".et, MB", "conversion, s", "step, ms"
SHARES = ("run", "ranks", "operators, calls", "kernels, copies", "transfer", "wait", "overhead")
COLUMNS = (
    ("operator", "runtime"), ("kernel", "copy"), ("transfer",), ("wait",),
    ("host-overhead", "device-overhead"),
)  # fmt: skip


@dataclass
class Config:
    """What is measured."""

    dir: str = field(default="outputs", metadata={"help": "folder of our own captures"})
    name: str = field(default="*quick_trace", metadata={"help": "glob of the runs"})
    dlrm: str = field(
        default="../shared/data/traces/dlrm_8gpu", metadata={"help": "folder of the 8-GPU traces"}
    )
    update: bool = field(default=False, metadata={"help": "write the tables into CONVERSION_SUMMARY.md"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    try:
        found = trace_sets.find(Path(config.dir), config.name)
        if Path(config.dlrm).is_dir():
            found += trace_sets.find(Path(config.dlrm))
        else:
            print(f"note: no DLRM traces in {config.dlrm}: that row is left out", file=sys.stderr)
        rows = [measured(run) for run in found]
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    worst = {semantics: max(abs(error[semantics]) for _, _, error in rows) for semantics in WORST_PERCENT}
    verdict = [f"{worst[each]:.2f}% (limit {limit:g}%) in {each}" for each, limit in WORST_PERCENT.items()]
    blocks = {
        "sizes": [*_header(SIZES), *(size for size, _, _ in rows)],
        "fidelity": [*_header(SHARES), *(shares for _, shares, _ in rows)],
    }
    for name, lines in blocks.items():
        print("\n".join(lines), end="\n\n")
        if config.update:
            put(name, lines)
    print(f"worst replay error of a rank: {', '.join(verdict)}")
    return int(any(worst[each] > limit for each, limit in WORST_PERCENT.items()))


def measured(found: trace_sets.TraceSet) -> tuple[str, str, dict[str, float]]:
    """Convert and replay one run: its rows of both tables, and the largest error of a rank in %."""
    with tempfile.TemporaryDirectory() as scratch:
        size = _converted_row(found, Path(scratch))
        prefix = Path(scratch) / found.name
        ranks = {semantics: replayed(prefix, semantics) for semantics in WORST_PERCENT}
    paths = [rank["critical_path_us"] for rank in ranks["device"]]
    total = sum(sum(path.values()) for path in paths)
    cells = [found.name, str(len(paths))]
    for kinds in COLUMNS:
        cells.append(f"{sum(path[kind] for path in paths for kind in kinds) / total:.1%}")
    worst = {
        semantics: max((rank["error_percent"] for rank in rows), key=abs) for semantics, rows in ranks.items()
    }
    return size, _row(cells), worst


def _converted_row(found: trace_sets.TraceSet, scratch: Path) -> str:
    """Convert one run into ``scratch``; its row of the table of sizes."""
    begin = time.perf_counter()
    traces = trace_sets.TraceSet(scratch, found.name, found.pairs, found.problems, found.manifest)
    (result,) = convert_sets.convert_sets([traces], PairOptions())
    seconds = time.perf_counter() - begin
    if result.failed:
        raise TraceError(f"{found.folder / found.name}: its conversion failed; convert_to_et.py says why.")
    ranks = [result.ranks[rank] for rank in sorted(result.ranks)]
    megabytes = sum(p.stat().st_size for pair in found.pairs.values() for p in pair.files) / 1e6
    steps = " ".join(f"{us / 1000:.0f}" for us in ranks[0].report.steps_us.values())
    nodes, edges = (sum(getattr(r.report, column) for r in ranks) for column in ("nodes", "edges"))
    size = sum(r.bytes for r in ranks) / 1e6
    cells = [found.name, len(ranks), f"{megabytes:.1f}", f"{nodes:,}", f"{edges:,}", f"{size:.1f}"]
    return _row([*map(str, cells), f"{seconds:.2f}", steps])


def _header(columns: Sequence[str]) -> list[str]:
    return [_row(columns), "|---" * len(columns) + "|"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def replayed(prefix: Path, semantics: str) -> list[dict]:
    """The replay's own JSON for one run."""
    config = replay.ReplayConfig(names=(str(prefix),), semantics=semantics)
    (job,) = find_rank_sets(config.names)
    reports, _ = replay.run(job, config)
    return reports[semantics]


if __name__ == "__main__":
    sys.exit(main())
