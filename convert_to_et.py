#!/usr/bin/env python3
"""Convert host and device traces to Chakra execution traces.

    python convert_to_et.py --dir outputs                    every run in outputs/
    python convert_to_et.py --name 'gpt2_2gpu*' --workers 2  some of them
    python convert_to_et.py --ranks 3/16                     every 16th rank from rank 3 on

For each run NAME: NAME.0.et, NAME.1.et … (as simulators look for them), NAME.et (rank 0's bytes),
NAME_comm_groups.json and NAME_conversion.json (what went in, what came out, every loss). The exit status
is 0 if every rank of every run was converted and its file is valid, 1 if not, 2 if nothing could be done.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Nothing here multiplies matrices, and the threads for it cost a fifth of a small conversion's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from chakra_et import convert_sets, trace_sets
from chakra_et.convert_config import ConvertConfig, command, show
from utils import cli


def main() -> int:
    config = cli.parse(ConvertConfig, description=__doc__.splitlines()[0])
    return command(lambda: show(run(config, trace_sets.find(Path(config.dir), config.name)), config))


def run(
    config: ConvertConfig, sets: list[trace_sets.TraceSet], keep: bool = False
) -> list[convert_sets.SetResult]:
    """Convert ``sets``; with ``keep`` files that are valid and newer than their traces stay."""
    pairs = sum(len(traces.pairs) for traces in sets)
    with config.progress_bar(pairs) as progress:
        return convert_sets.convert_sets(
            sets, config.pair_options(), config.run_options(pairs, keep), progress
        )


if __name__ == "__main__":
    sys.exit(main())
