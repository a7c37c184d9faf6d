#!/usr/bin/env python3
"""What a repair of a large damaged trace costs: CPU time and peak memory over size.

    python benchmarks/repair_benchmark.py --megabytes 100 1000 --update

Makes host traces of the given sizes out of the nodes of a small one, with a doubled comma, a NaN, an
unescaped quote and a broken-off end, and repairs each in a process of its own.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.convert_benchmark import best
from benchmarks.summary import put
from chakra_et import cli

SMALL = ROOT / "tests" / "fixtures" / "captures" / "torch-2.13" / "tiny_1gpu_host.json.gz"
DAMAGE = (
    b'{"id": 7, "name": "a", "ctrl_deps": 1},,\n',
    b'{"id": 8, "name": "b", "ctrl_deps": 1, "inputs": {"values": [NaN], "shapes": [], "types": []}},\n',
    b'{"id": 9, "name": "say "hi"", "ctrl_deps": 1},\n',
)


@dataclass
class Config:
    """What is measured."""

    megabytes: tuple[int, ...] = field(default=(100, 1000), metadata={"help": "sizes of the damaged traces"})
    update: bool = field(default=False, metadata={"help": "write the table into CONVERSION_SUMMARY.md"})

    def __post_init__(self) -> None:
        if not self.megabytes or min(self.megabytes) < 1:
            raise ValueError("--megabytes must be at least 1")


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    lines = ["| damaged trace, MB | CPU, s | MB / s of CPU | peak, MB |", "|---|---|---|---|"]
    for megabytes in config.megabytes:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "large_host.json"
            write_damaged(path, megabytes)
            cost = best([sys.executable, str(ROOT / "fix_host_traces.py"), str(path)], 1)
        figures = f"{cost.cpu:.1f} | {megabytes / cost.cpu:.0f} | {cost.megabytes:.0f}"
        lines.append(f"| {megabytes:,} | {figures} |")
    print("\n".join(lines))
    if config.update:
        put("repair", lines)
    return 0


def write_damaged(path: Path, megabytes: int) -> None:
    """A host trace of about that size, damaged in four places."""
    text = gzip.decompress(SMALL.read_bytes())
    head, _, rest = text.partition(b'"nodes": [')
    nodes = rest[: rest.rindex(b"}", 0, rest.rindex(b"]"))] + b"},\n"
    copies = max(4, megabytes * 1_000_000 // len(nodes))
    with open(path, "wb") as file:
        file.write(head + b'"nodes": [')
        for copy in range(copies):
            file.write(nodes)
            place = copy * 4 // copies
            if place and place != (copy - 1) * 4 // copies:
                file.write(DAMAGE[place - 1])
        file.write(nodes[: len(nodes) // 2])


if __name__ == "__main__":
    sys.exit(main())
