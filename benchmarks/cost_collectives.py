#!/usr/bin/env python3
"""How true the times of NCCL's collectives are, judged by published runs of nccl-tests on one node.

    python benchmarks/cost_collectives.py                        (each GPU and size left out in turn)
    python benchmarks/cost_collectives.py --rows                 (by collective, number of GPUs and size, too)
    python benchmarks/cost_collectives.py --tables DIR           (fitted to the given table, judged on DIR's)
    python benchmarks/cost_collectives.py --write                (fits chakra_et/cost/networks.json)

The table is nccl.csv: op, gpu, nccl, num_gpus, bytes, latency_us; half precision, 2 to 8 GPUs of one node.
What a fit judges itself by is no evidence: "sizes left out" leaves out every third size three times, and
"not in the fit" all rows of a GPU. "Two measurements": the median time of all-reduces of up to 4 KiB and the
bus bandwidth of the largest, given for each number of GPUs. Between nodes nothing was measured.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks.cost_accuracy import UNLIKELY
from benchmarks.cost_tables import by_name
from chakra_et import cli
from chakra_et.cost import nccl, networks
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType
from chakra_et.files import write_text

GIVEN = ROOT.parent / "shared" / "data" / "truth"
OPERATIONS = {
    "all_reduce": CollectiveType.ALL_REDUCE,
    "all_gather": CollectiveType.ALL_GATHER,
    "reduce_scatter": CollectiveType.REDUCE_SCATTER,
    "alltoall": CollectiveType.ALL_TO_ALL,
}
COLUMNS = ("op", "gpu", "nccl", "num_gpus", "bytes", "latency_us")
PCIE = ("L4", "L40S", "T4", "RTX")
NVLS = ("H", "B", "GB", "GH")

Table = dict[tuple[str, int], dict[int, float]]
"""µs by operation and number of GPUs, then by bytes."""


@dataclass(frozen=True)
class Options:
    """The flags."""

    tables: Path | None = field(default=None, metadata={"help": "judge this folder's nccl.csv"})
    given: Path = field(default=GIVEN, metadata={"help": "the folder to fit to"})
    rows: bool = field(default=False, metadata={"help": "errors by collective, number of GPUs and size, too"})
    write: bool = field(default=False, metadata={"help": "write the fit into chakra_et/cost/networks.json"})


@dataclass(frozen=True)
class Errors:
    """One row of the result: signed relative errors, and the µs that were measured."""

    judged: str
    gpu: str
    errors: np.ndarray
    taken: np.ndarray
    cells: list[tuple[str, int, int]]

    def line(self) -> str:
        """Markdown: mean error, signed, weighted by time, median."""
        mean, signed = np.abs(self.errors).mean(), self.errors.mean()
        weighted = (np.abs(self.errors) * self.taken).sum() / self.taken.sum()
        figures = f"{mean:.1%} | {signed:+.1%} | {weighted:.1%} | {np.median(np.abs(self.errors)):.1%}"
        return f"| {self.judged} | {self.gpu} | {len(self.errors)} | {figures} |"


def read(folder: Path) -> dict[str, Table]:
    """The tables by GPU; of several versions of NCCL the newest. Raises ``TraceError``."""
    found: dict[str, dict[tuple[int, ...], Table]] = {}
    path, left = folder / "nccl.csv", 0
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: can't be read: {error}") from None
    if lacking := [name for name in COLUMNS if rows and name not in rows[0]]:
        raise TraceError(f"{path}: lacks {', '.join(lacking)}")
    for row in rows:
        try:
            count, size, taken = int(row["num_gpus"]), int(row["bytes"]), float(row["latency_us"])
        except (TypeError, ValueError):
            count, size, taken = 0, 0, 0.0
        if row["op"] not in OPERATIONS or not row["gpu"] or count < 2 or size < 1 or not 0 < taken < math.inf:
            left += 1
            continue
        version = tuple(int(part) for part in re.findall(r"\d+", row["nccl"] or ""))
        table = found.setdefault(row["gpu"], {}).setdefault(version, {})
        table.setdefault((row["op"], count), {})[size] = taken
    if left:
        print(
            f"{path}: {left} rows are left out: another collective than {', '.join(OPERATIONS)}, or no "
            "number of GPUs from 2, of bytes or of µs",
            file=sys.stderr,
        )
    if not found:
        raise TraceError(f"{path}: has no rows")
    return {gpu: versions[max(versions)] for gpu, versions in found.items()}


def fit(table: Table, name: str) -> dict[str, Any]:
    """What ``networks.json`` keeps of a table. More bytes don't take less time, but single cells scatter: a
    run of them that falls is replaced by its median."""
    sizes = sorted(set.intersection(*(set(each) for each in table.values())))
    entry: dict[str, Any] = {"link": "PCIe" if name.startswith(PCIE) else "NVLink"}
    entry["nvls"] = entry["link"] == "NVLink" and name.startswith(NVLS)
    entry["bytes"] = sizes
    for (operation, count), each in sorted(table.items()):
        rising = _rising(np.array([each[size] for size in sizes]))
        entry.setdefault(operation, {})[str(count)] = [round(float(value), 2) for value in rising]
    return entry


def _rising(values: np.ndarray) -> np.ndarray:
    """Pools neighbours that fall (isotonic regression by medians)."""
    blocks: list[list[float]] = []
    for value in values.tolist():
        blocks.append([value])
        while len(blocks) > 1 and np.median(blocks[-2]) > np.median(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return np.concatenate([np.full(len(block), np.median(block)) for block in blocks])


def errors(judged: str, gpu: str, node: nccl.NcclNode, table: Table) -> Errors:
    """How far ``node`` is from a table."""
    cells = [(op, count, size) for (op, count), each in sorted(table.items()) for size in sorted(each)]
    taken = np.array([table[op, count][size] for op, count, size in cells])
    said = np.array([float(node.time(OPERATIONS[op], size, count)) / 1000 for op, count, size in cells])
    return Errors(judged, gpu, said / taken - 1, taken, cells)


def left_out(gpu: str, table: Table) -> Errors:
    """Each third of the sizes from the other two thirds."""
    parts = []
    for first in range(3):
        kept, judged = ({}, {})  # type: tuple[Table, Table]
        for key, each in table.items():
            sizes = sorted(each)
            judged[key] = {size: each[size] for size in sizes[first::3]}
            kept[key] = {size: each[size] for size in sizes if size not in judged[key]}
        parts.append(errors("", gpu, nccl.measured_node(gpu, fit(kept, gpu)), judged))
    return _joined(f"sizes left out, {_link(gpu)}", gpu, parts)


def _joined(judged: str, gpu: str, parts: list[Errors]) -> Errors:
    """One row of several."""
    return Errors(
        judged,
        gpu,
        np.concatenate([part.errors for part in parts]),
        np.concatenate([part.taken for part in parts]),
        [cell for part in parts for cell in part.cells],
    )


def stranger(gpu: str, known: Mapping[str, nccl.NcclNode]) -> nccl.NcclNode:
    """The node from what the other measured ones and its link's bandwidth say. Of a GPU that isn't in
    ``networks.json`` only the curves mean anything."""
    of = spec(gpu)
    others = {name: node for name, node in known.items() if name != gpu}
    return nccl.unmeasured_node(gpu, _link(gpu), of.bandwidth if of else 1e9, others)


def two_measurements(node: nccl.NcclNode, table: Table) -> tuple[nccl.NcclNode, Table]:
    """``node`` with an all-reduce's latency and bus bandwidth for each number of GPUs in the table, and the
    table of those that have both."""
    latency, bus = {}, {}
    for (operation, count), each in table.items():
        small, most = [us for size, us in each.items() if size <= nccl.SMALL], max(each)
        if operation == "all_reduce" and small and most > nccl.SMALL:
            latency[count] = float(np.median(small)) * 1000
            bus[count] = nccl.bus_factor(CollectiveType.ALL_REDUCE, count) * most / each[most] * 1e6
    both = {key: each for key, each in table.items() if key[1] in latency}
    return replace(node, latency_ns=latency, bus=bus), both


def results(given: Mapping[str, Table], judged: Mapping[str, Table] | None = None) -> list[Errors]:
    """With ``judged`` the rows of its GPUs, fitted to ``given``; else each GPU of ``given`` left out."""
    named = {gpu: f"{gpu} {_link(gpu)}" for gpu in given}
    known = {gpu: nccl.measured_node(named[gpu], fit(table, gpu)) for gpu, table in given.items()}
    found = []
    if judged is None:
        found += [left_out(gpu, table) for gpu, table in given.items()]
    for name, table in (judged or given).items():
        of, link = spec(name), _link(name)
        gpu = of.name if of and of.name in known else name
        if judged is not None and of is None:
            print(f"{name} is unknown, and taken to have {link}: only two measurements help", file=sys.stderr)
        elif judged is not None and of and of.name != name:
            print(f"{name} is taken for {of.name}", file=sys.stderr)
        relative = of.measured.split()[0] if of and of.measured else ""
        if judged is not None and gpu in known:
            found.append(errors(f"in the fit, {link}", gpu, known[gpu], table))
            continue
        if judged is not None and link != "PCIe" and relative in known:
            found.append(errors("relative in the fit, NVLink", gpu, known[relative], table))
        node = stranger(gpu, known)
        if of is not None and link != "PCIe":
            found.append(errors(f"not in the fit, {link}", gpu, node, table))
        base = known[relative] if relative in known and relative != gpu and link != "PCIe" else node
        if (both := two_measurements(base, table))[1]:
            found.append(errors(f"two measurements, {link}", gpu, *both))
        else:
            print(f"{name} has no small and large all-reduce of as many GPUs: not judged", file=sys.stderr)
    return found


def spec(gpu: str) -> networks.LinkedGpu | None:
    """The GPU's link by a table's name, such as ``b200_sxm``."""
    found = by_name(gpu)
    try:
        return networks.gpu(found.name) if found else None
    except TraceError:
        return None


def _link(gpu: str) -> str:
    of = spec(gpu)
    return of.link if of else "PCIe" if gpu.startswith(PCIE) or "PCIE" in gpu.upper() else "NVLink"


def lines(found: list[Errors], rows: bool = False) -> Iterator[str]:
    """Markdown: each GPU, then all of a kind."""
    yield "| judged on | GPU | rows | mean error | signed | weighted by time | median |"
    yield "|---|---|---|---|---|---|---|"
    kinds = dict.fromkeys(each.judged for each in found)
    for kind in kinds:
        own = [each for each in found if each.judged == kind]
        yield from (each.line() for each in own)
        if len(own) > 1:
            yield _joined(kind, "all", own).line()
        if rows:
            yield from _by_cell(own)


def _by_cell(own: list[Errors]) -> Iterator[str]:
    cells = [cell for each in own for cell in each.cells]
    wrong = np.abs(np.concatenate([each.errors for each in own]))
    for key in dict.fromkeys((op, count) for op, count, _ in cells):
        of = [error for (op, count, _), error in zip(cells, wrong, strict=True) if (op, count) == key]
        yield f"| {own[0].judged} | {key[0]} among {key[1]} | {len(of)} | {np.mean(of):.1%} | | | |"
    for size in dict.fromkeys(size for _, _, size in cells):
        of = [error for (*_, each), error in zip(cells, wrong, strict=True) if each == size]
        yield f"| {own[0].judged} | {size} bytes | {len(of)} | {np.mean(of):.1%} | | | |"


def write(given: Mapping[str, Table]) -> None:
    """The fit into ``networks.json``, each node with its error on sizes left out."""
    loaded = json.loads(networks.FILE.read_text(encoding="utf-8"))
    loaded["measured"] = {}
    for gpu, table in given.items():
        entry = fit(table, gpu)
        entry["error"] = round(float(np.abs(left_out(gpu, table).errors).mean()), 4)
        entry["source"] = SOURCE
        loaded["measured"][f"{gpu} {entry['link']}"] = entry
    # One line per list of figures.
    text = json.dumps(loaded, indent=1)
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    write_text(networks.FILE, text + "\n")


SOURCE = (
    "nccl-tests on one node, half precision: ai-dynamo/aiconfigurator at 095f58a51 (Apache-2.0), "
    "aic-core/src/aiconfigurator_core/systems/data; fitted by benchmarks/cost_collectives.py"
)


def main() -> int:
    """Print the table."""
    options = cli.parse(Options, description="Judge the times of collectives.")
    return cli.run(lambda: judge(options), TraceError)


def judge(options: Options) -> int:
    """Write the fit, or print the table; 1 if a row was refused. Raises ``TraceError``."""
    given = read(options.given)
    if options.write:
        write(given)
        return 0
    found, right = results(given, read(options.tables) if options.tables else None), []
    for each in found:
        slower = float(np.median(1 / (1 + each.errors)))
        if 1 / UNLIKELY < slower < UNLIKELY:
            right.append(each)
            continue
        print(
            f"error: {each.judged}, {each.gpu}, {len(each.errors)} rows: half took {slower:.2g} times "
            "what the model says or worse: latency_us must be in µs: not judged",
            file=sys.stderr,
        )
    print("\n".join(lines(right, options.rows)))
    return 0 if len(right) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
