#!/usr/bin/env python3
"""Convert what is not converted yet, or whose last conversion failed.

    python convert_remaining.py --dir outputs

A run is left alone when all its .et files are there, newer than its traces and made with the same flags,
and its report says that nothing failed. Of any other run the valid files stay, the others are made, and the
run is checked as a whole. Flags and exit status are those of convert_to_et.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import convert_to_et
from chakra_et import trace_sets
from chakra_et.convert_config import ConvertConfig, command, show
from chakra_et.convert_sets import is_converted
from utils import cli


def main() -> int:
    config = cli.parse(ConvertConfig, description=__doc__.splitlines()[0])
    return command(lambda: convert(config))


def convert(config: ConvertConfig) -> int:
    sets = trace_sets.find(Path(config.dir), config.name)
    options, run = config.pair_options(), config.run_options(1, keep=True)
    remaining = [traces for traces in sets if not is_converted(traces, options, run)]
    print(f"{len(sets) - len(remaining)} of {len(sets)} runs are converted already.")
    return show(convert_to_et.run(config, remaining, keep=True), config)


if __name__ == "__main__":
    sys.exit(main())
