#!/usr/bin/env python3
"""How well the graphs keep time: simulated against measured step times, and sizes and times of conversion.

    ./run_all_profiling.sh --cpu                        makes the captures in outputs/
    python benchmarks/fidelity_benchmark.py             measures them
    python benchmarks/fidelity_benchmark.py --update    and puts the tables into CONVERSION_SUMMARY.md

Each run in --dir is converted anew into a scratch folder and replayed: all ranks together, in both
semantics. The DLRM traces (real, 8 GPUs) are replayed rank by rank in device semantics. The exit status
is 1 if a target is missed: over our own runs a mean error of at most 2% and a worst one of 5%; for the DLRM
ranks 5%, and a longest dependency path no longer than what was measured.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import put
from chakra_et import cli
from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.replay import command as replay
from chakra_et.replay.report import measured_times
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.sets import Pair

OWN_MEAN, OWN_WORST, DLRM_WORST = 2.0, 5.0, 5.0


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
        sizes, fidelity, own_errors = own_runs(config)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    dlrm, dlrm_errors, paths = dlrm_ranks(Path(config.dlrm))
    mean = sum(own_errors) / len(own_errors)
    verdict = [
        f"own runs: mean error {mean:.3f}% (target {OWN_MEAN}%), worst {max(own_errors):.3f}% "
        f"(target {OWN_WORST}%)"
    ]
    missed = mean > OWN_MEAN or max(own_errors) > OWN_WORST
    if dlrm_errors:
        verdict.append(
            f"DLRM: worst error {max(dlrm_errors):.3f}% (target {DLRM_WORST}%), longest path at most "
            f"{max(paths):.4f} × measured (target 1.00)"
        )
        missed = missed or max(dlrm_errors) > DLRM_WORST or max(paths) > 1.0
    else:
        print(f"note: no DLRM traces in {config.dlrm}: that part is left out", file=sys.stderr)
    blocks = {"sizes": sizes, "fidelity": fidelity, "dlrm": dlrm, "verdict": verdict}
    for name, lines in blocks.items():
        print("\n".join(lines), end="\n\n")
        if config.update and lines:
            put(name, lines)
    return 1 if missed else 0


def own_runs(config: Config) -> tuple[list[str], list[str], list[float]]:
    """Convert and replay the runs; returns both tables and |error| in % of each rank and semantics."""
    sizes = [
        "| run | ranks | traces, MB | nodes | edges | .et, MB | conversion, s | step, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    fidelity = [
        "| run | rank | measured, ms | device, ms | error | astra, ms | error | start error, µs (p95) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    for found in trace_sets.find(Path(config.dir), config.name):
        with tempfile.TemporaryDirectory() as scratch:
            sizes.append(_converted_row(found, Path(scratch)))
            by_rank: dict[int, dict[str, dict]] = {}
            for semantics in ("device", "astra"):
                for row in replayed(Path(scratch) / found.name, semantics):
                    by_rank.setdefault(row["rank"], {})[semantics] = row
        for rank, rows in sorted(by_rank.items()):
            device, astra = rows["device"], rows["astra"]
            errors += [abs(row["error_percent"]) for row in rows.values()]
            start = device["start_error_us"]
            cells = [found.name, str(rank), _ms(device["measured_us"])]
            for row in (device, astra):
                cells += [_ms(row["simulated_us"]), f"{row['error_percent']:+.3f}%"]
            cells.append(f"{start['median']:.1f} ({start['p95']:.1f})")
            fidelity.append(_row(cells))
    return sizes, fidelity, errors


def _converted_row(found: trace_sets.TraceSet, scratch: Path) -> str:
    """Convert one run into ``scratch``; its row of the table of sizes."""
    begin = time.perf_counter()
    traces = trace_sets.TraceSet(scratch, found.name, found.pairs, found.problems, found.manifest)
    (result,) = convert_sets.convert_sets([traces], PairOptions())
    seconds = time.perf_counter() - begin
    if result.failed:
        raise TraceError(f"{found.folder / found.name}: its conversion failed; convert_to_et.py says why.")
    ranks = [result.ranks[rank] for rank in sorted(result.ranks)]
    megabytes = sum(p.stat().st_size for pair in found.pairs.values() for p in (pair.host, pair.device)) / 1e6
    steps = " ".join(f"{us / 1000:.0f}" for us in ranks[0].report.steps_us.values())
    nodes, edges = (sum(getattr(r.report, column) for r in ranks) for column in ("nodes", "edges"))
    size = sum(r.bytes for r in ranks) / 1e6
    cells = [found.name, len(ranks), f"{megabytes:.1f}", f"{nodes:,}", f"{edges:,}", f"{size:.1f}"]
    return _row([*map(str, cells), f"{seconds:.2f}", steps])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


def replayed(prefix: Path, semantics: str) -> list[dict]:
    """The replay's own JSON for one run."""
    config = replay.ReplayConfig(names=(str(prefix),), semantics=semantics)
    (job,) = replay.find_jobs(config)
    reports, _ = replay.run(job, config)
    return [rank.as_json() for rank in reports[semantics]]


def dlrm_ranks(folder: Path) -> tuple[list[str], list[float], list[float]]:
    """The real 8-GPU traces, each rank alone, in device semantics."""
    table = [
        "| rank | nodes | device work linked | measured, ms | device, ms | error | longest path / measured | "
        "device overhead, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors, paths = [], []
    for host in sorted(folder.glob("*_host.json*")):
        device = host.with_name(host.name.replace("_host.json", "_device.json"))
        if not device.exists():
            continue
        converted = convert_pair(Pair(-1, host, device))
        with tempfile.TemporaryDirectory() as scratch:
            rank = converted.report.rank
            et_file.write(Path(scratch) / f"dlrm.{rank}.et", converted.trace)
            (row,) = replayed(Path(scratch) / f"dlrm.{rank}.et", "device")
        _, end = measured_times(converted.trace)
        path = replay.longest_path(converted.trace) / end
        errors.append(abs(row["error_percent"]))
        paths.append(path)
        cells = [str(rank), f"{row['nodes']:,}", f"{converted.report.kernel_link_rate:.1%}"]
        cells += [_ms(row["measured_us"]), _ms(row["simulated_us"]), f"{row['error_percent']:+.3f}%"]
        cells += [f"{path:.4f}", f"{converted.report.time_ns['device-overhead'] / 1e6:.2f}"]
        table.append(_row(cells))
    return (table if errors else []), errors, paths


if __name__ == "__main__":
    sys.exit(main())
