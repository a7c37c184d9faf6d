#!/usr/bin/env python3
"""Convert the runs that are not converted yet or whose last conversion failed.

    python convert_remaining.py --dir outputs

A run is skipped if all its .et files exist, are newer than its traces and were made with the same flags, and
its report has no error. For any other run, valid files are kept, the others are converted, and the run is
checked as a whole. Flags and exit status are those of convert_to_et.py.
"""

from __future__ import annotations

import sys

from chakra_et.convert import command

if __name__ == "__main__":
    sys.exit(command.main_remaining())
