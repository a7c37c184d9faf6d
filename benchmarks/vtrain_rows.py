#!/usr/bin/env python3
"""How the rows of vTrain's runs on one node hang together: as times of layers that were added up.

    python benchmarks/vtrain_rows.py [--truth DIR]

Prints how far step times are from a straight line in the number of layers; the seconds per layer of a
pipeline over those that the run without stages gives by the pipeline's formula; and the milliseconds that one
more boundary between stages costs for each sequence of hidden size 2,048, from two to four stages.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from chakra_et import cli


@dataclass
class Config:
    truth: Path = field(
        default=ROOT.parent / "shared" / "data" / "truth", metadata={"help": "folder of vtrain_single.csv"}
    )


def main() -> int:
    config = cli.parse(Config, description="How vTrain's rows hang together.")
    steps: dict[tuple[int, ...], list[tuple[int, float]]] = defaultdict(list)
    with (config.truth / "vtrain_single.csv").open() as handle:
        for row in csv.DictReader(handle):
            layout = tuple(int(row[name]) for name in ("hidden", "tp", "dp", "pp", "mbs", "gbs"))
            steps[layout].append((int(row["layers"]), float(row["step_ms"])))
    lines, off = {}, []
    for layout, pairs in steps.items():
        layers, ms = np.array(pairs).T
        lines[layout] = np.polyfit(layers, ms, 1)
        if layout[2] == 1:
            off.append(np.abs(np.polyval(lines[layout], layers) - ms).max())
    print(
        f"{len(off)} lines in the number of layers, without data parallelism: at most {max(off):.5f} ms off"
    )
    ratios, boundaries = [], []
    for (hidden, tp, dp, pp, mbs, gbs), (slope, start) in lines.items():
        batches = gbs // mbs // dp
        # The same micro-batch without stages, by numbers of micro-batches: seconds per layer of each.
        alone = sorted(
            (key[5] // mbs // dp, line[0])
            for key, line in lines.items()
            if (key[0], key[1], key[2], key[3], key[4]) == (hidden, tp, dp, 1, mbs)
        )
        if pp > 1 and dp == 1 and len(alone) > 1:
            counts, slopes = np.array(alone).T
            each, once = np.polyfit(counts, slopes, 1)
            ratios.append(slope * pp / ((batches + pp - 1) * each + once))
        if pp == 4 and (two := lines.get((hidden, tp, dp, 2, mbs, gbs))) is not None:
            boundaries.append((start - two[1]) / 2 / mbs / (hidden / 2048))
    print(f"a layer of {len(ratios)} pipelines over the formula's: {min(ratios):.5f} to {max(ratios):.5f}")
    print(f"one more boundary ({len(boundaries)}): {min(boundaries):.5f} to {max(boundaries):.5f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
