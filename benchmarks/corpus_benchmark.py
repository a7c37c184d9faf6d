#!/usr/bin/env python3
"""Converts every trace of some folders and shows what became of each: a change of the converter shows as a
diff.

    python benchmarks/corpus_benchmark.py                         the public traces in ../shared
    python benchmarks/corpus_benchmark.py DIR… --details          those in DIR and below, with every count
    python benchmarks/corpus_benchmark.py --json > corpus.json
    python benchmarks/corpus_benchmark.py --kept tests/corpus/kept.json            compare with kept results
    python benchmarks/corpus_benchmark.py --kept tests/corpus/kept.json --update   and put the new ones there

One row per rank: events and nodes; communication nodes, and how many of them are guessed (kind, size, peer or
group inferred, or the kernel missing); warnings; the part of the critical path that is overhead, in all and
on the device; CPU time per event. ``--json`` also has the errors of both replays, ranks of one run jointly.
The exit status is 1 if a trace does not convert, or differs from its kept result.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et import cli
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import RankResult
from chakra_et.convert.runs import RunOptions, SetResult, convert_sets
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.sets import find_rank_sets
from chakra_et.files import write_text
from chakra_et.findings import sentence
from chakra_et.simulate import command as replay
from chakra_et.text import printable, table
from chakra_et.traces import sets as trace_sets

# Warnings about communication that was not recorded whole.
GUESSED = (
    "missing-communication", "communication-size", "communication-kind", "communication-inferred",
    "communication-peer", "group-default", "group-by-stream", "group-by-thread",
)  # fmt: skip
SEMANTICS: tuple[Literal["device", "astra"], ...] = ("device", "astra")
# Kept results have these fields; times of the machine that measures are left out.
KEPT = (
    "events", "nodes", "nodes_by_kind", "edges_by_kind", "communication", "guessed", "losses", "warnings",
    "overhead_percent", "device_overhead_percent", "error_percent", "result",
)  # fmt: skip

Row = dict[str, Any]


@dataclass
class Config:
    """What is converted, and how the results are shown."""

    dirs: tuple[str, ...] = field(
        default=("../shared/data/traces/public",),
        metadata={"positional": True, "help": "folders of traces, with all folders below them"},
    )
    details: bool = field(default=False, metadata={"help": "print every count of each trace"})
    json: bool = field(default=False, metadata={"help": "print JSON: trace → its counts"})
    kept: str | None = field(default=None, metadata={"help": "JSON file of earlier results to compare with"})
    update: bool = field(default=False, metadata={"help": "write the results into the file of --kept"})

    def __post_init__(self) -> None:
        if self.update and not self.kept:
            raise ValueError("--update needs --kept FILE, the file to write")


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    return cli.run(lambda: benchmark(config), TraceError)


def benchmark(config: Config) -> int:
    rows: dict[str, Row] = {}
    for folder in map(Path, config.dirs):
        rows |= corpus(folder)
    if not rows:
        raise TraceError(f"{', '.join(config.dirs)}: no traces in these folders: give one with --help's DIR")
    if config.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(table(summary(rows))))
        for name, row in rows.items() if config.details else ():
            print("\n".join(["", printable(name), *details(row)]))
    failed = any(row["result"] != "ok" for row in rows.values())
    if not config.kept:
        return int(failed)
    kept = {name: {key: row[key] for key in KEPT if key in row} for name, row in rows.items()}
    path = Path(config.kept)
    if config.update:
        write_text(path, json.dumps(kept, indent=1, sort_keys=True) + "\n")
        return int(failed)
    changes = differences(read_kept(path), kept)
    print("\n".join(changes), file=sys.stderr)
    print(f"{len(changes)} differences from {path}", file=sys.stderr)
    return int(failed or bool(changes))


def corpus(top: Path) -> dict[str, Row]:
    """Trace → counts, for all traces in ``top`` and below. Names are paths from ``top``, with ``.RANK``."""
    if not top.is_dir():
        raise TraceError(f"{top}: no such folder: give one that holds traces")
    rows: dict[str, Row] = {}
    for folder in [top, *sorted(path for path in top.rglob("*") if path.is_dir())]:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = trace_sets.find(folder, output=Path(scratch))
            except TraceError:
                continue  # a folder without traces
            for traces in sorted(found, key=lambda each: each.name):
                begin = time.process_time()
                run = RunOptions(workers=0, allow_missing_ranks=True)
                (result,) = convert_sets([traces], PairOptions(), run)
                seconds = time.process_time() - begin
                prefix = (folder.relative_to(top) / traces.name).as_posix()
                rows |= {f"{prefix}.{rank}": row for rank, row in run_rows(result, seconds).items()}
    return rows


def run_rows(result: SetResult, seconds: float) -> dict[int, Row]:
    """Rank → counts, for one run that was converted in ``seconds`` of CPU time."""
    events = sum(good.report.events_in for good in result.good.values())
    errors = replay_errors(str(result.traces.folder / result.traces.name)) if result.good else {}
    rows: dict[int, Row] = {}
    for rank, outcome in sorted(result.ranks.items()):
        if isinstance(outcome, RankResult):
            trace = et_file.read(result.traces.et_file(rank))
            rows[rank] = rank_row(outcome, trace, errors.get(rank, {}), seconds / max(events, 1))
            rows[rank]["result"] = "; ".join(outcome.problems + result.problems) or "ok"
        else:
            rows[rank] = {"result": str(outcome)}
    return rows


def rank_row(outcome: RankResult, trace: ExecutionTrace, errors: dict[str, Any], per_event_s: float) -> Row:
    report = outcome.report
    path = report.critical_path_us
    total = sum(path.values())
    share = (lambda micros: round(100 * micros / total, 2)) if total else (lambda micros: None)
    return {
        "events": report.events_in,
        "nodes": report.nodes,
        "nodes_by_kind": _positive(report.nodes_by_kind),
        "edges_by_kind": _positive(report.edges_by_kind),
        "communication": communication(trace),
        "guessed": sum(count for key, count in report.warnings.items() if key.partition(":")[0] in GUESSED),
        "losses": report.losses,
        "warnings": report.warnings,
        "overhead_percent": share(path.get("host-overhead", 0) + path.get("device-overhead", 0)),
        "device_overhead_percent": share(path.get("device-overhead", 0)),
        "error_percent": errors,
        "cpu_us_per_event": per_event_s * 1e6,
    }


def communication(trace: ExecutionTrace) -> dict[str, dict[str, int]]:
    """Type → how many nodes, and their bytes."""
    kind, size = trace.column("comm_type", -1), trace.column("comm_size")
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for row in (trace.types >= NodeType.COMM_SEND).nonzero()[0].tolist():
        name = NodeType(int(trace.types[row])).name
        if name == NodeType.COMM_COLL.name:
            known = int(kind[row]) in set(CollectiveType)
            name = CollectiveType(int(kind[row])).name if known else "unknown"
        count[name.lower()] += 1
        total[name.lower()] += int(size[row])
    return {name: {"count": count[name], "bytes": total[name]} for name in sorted(count)}


def replay_errors(name: str) -> dict[int, dict[str, float | None]]:
    """Rank → semantics → percent; None where nothing was measured. Ranks without an entry can't be
    replayed."""
    errors: dict[int, dict[str, float | None]] = {}
    for semantics in SEMANTICS:
        config = replay.ReplayConfig(names=(name,), semantics=semantics)
        try:
            for job in find_rank_sets(config.names):
                reports, _ = replay.run(job, config)
                for each in reports[semantics]:
                    percent = each["error_percent"]
                    errors.setdefault(each["rank"], {})[semantics] = (
                        None if percent is None else round(percent, 2)
                    )
        except TraceError as error:
            print(f"note: {printable(str(error))}", file=sys.stderr)
    return errors


def summary(rows: dict[str, Row]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        (
            "trace", "events", "nodes", "comm.", "guessed", "warnings", "overhead", "device", "µs per event",
            "result",
        )
    ]  # fmt: skip
    for name, row in rows.items():
        if "nodes" not in row:
            lines.append((printable(name), *[""] * 8, printable(row["result"])))
            continue
        lines.append(
            (
                printable(name),
                f"{row['events']:,}",
                f"{row['nodes']:,}",
                str(sum(each["count"] for each in row["communication"].values())),
                str(row["guessed"]),
                str(sum(row["warnings"].values())),
                _percent(row["overhead_percent"]),
                _percent(row["device_overhead_percent"]),
                f"{row['cpu_us_per_event']:.0f}",
                printable(row["result"]),
            )
        )
    return lines


def details(row: Row) -> list[str]:
    """Every count of one trace."""
    lines = []
    for key in ("nodes_by_kind", "edges_by_kind"):
        if row.get(key):
            lines.append(
                f"  {key.replace('_', ' ')}: " + ", ".join(f"{k} {n:,}" for k, n in row[key].items())
            )
    for name, each in row.get("communication", {}).items():
        lines.append(f"  {name}: {each['count']:,} nodes, {each['bytes']:,} bytes")
    for kind in ("losses", "warnings"):
        lines += [
            f"  {kind}: {count:,} × {printable(sentence(key))}" for key, count in row.get(kind, {}).items()
        ]
    return lines


def read_kept(path: Path) -> dict[str, Row]:
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: can't be read ({error}): make it with --update") from None
    if not isinstance(kept, dict):
        raise TraceError(f"{path}: holds no results: make it with --update")
    return kept


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """One line for each figure that differs, such as ``a.0 nodes: 12 → 14``."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after})
        return [
            line for key in keys for line in differences(before.get(key), after.get(key), f"{name} {key}")
        ]
    return [] if before == after else [printable(f"{name.strip()}: {_short(before)} → {_short(after)}")]


def _short(value: Any) -> str:
    return "nothing" if value is None else "several figures" if isinstance(value, dict) else str(value)


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {key: count for key, count in counts.items() if count}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}%"


if __name__ == "__main__":
    sys.exit(main())
