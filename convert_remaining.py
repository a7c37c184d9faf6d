#!/usr/bin/env python3
"""Convert what is not converted yet, or whose last conversion failed.

    python convert_remaining.py --dir outputs

A run is left alone when all its .et files are there, newer than its traces and made with the same flags,
and its report says that nothing failed. Of any other run the valid files stay, the others are made, and the
run is checked as a whole. Flags and exit status are those of convert_to_et.py.
"""

from __future__ import annotations

import sys

from chakra_et.convert.command import main_remaining

if __name__ == "__main__":
    sys.exit(main_remaining())
