#!/usr/bin/env python3
"""Convert the ranks that are not converted yet or whose last conversion failed.

    python convert_remaining.py --dir outputs

Files that are valid, newer than their traces and made with the same flags are kept, the others are made, and
each run is checked as a whole. Flags and exit status are those of convert_to_et.py.
"""

from __future__ import annotations

import sys

from chakra_et.convert import command

if __name__ == "__main__":
    sys.exit(command.main(keep=True))
