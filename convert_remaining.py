#!/usr/bin/env python3
"""Convert the runs of a folder that are not converted yet, or whose last conversion failed.

    python convert_remaining.py --dir outputs

A run is left alone when all its .et files are there, newer than its traces, and its report says that
nothing failed. Flags and exit status are those of convert_to_et.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import convert_to_et
from chakra_et import trace_sets
from chakra_et.convert_config import ConvertConfig, show
from chakra_et.convert_sets import is_converted
from chakra_et.errors import TraceError
from utils import cli


def main() -> int:
    config = cli.parse(ConvertConfig, description=__doc__.splitlines()[0])
    try:
        sets = trace_sets.find(Path(config.dir), config.name)
        remaining = [traces for traces in sets if not is_converted(traces)]
        print(f"{len(sets) - len(remaining)} of {len(sets)} runs are converted already.")
        return show(convert_to_et.run(config, remaining), config)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
