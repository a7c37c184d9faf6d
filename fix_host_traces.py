#!/usr/bin/env python3
"""Repair host and device traces: several objects in one file, truncation, bad JSON, damaged gzip.

    python fix_host_traces.py                          all traces under outputs/
    python fix_host_traces.py --dir runs               all traces under runs/
    python fix_host_traces.py outputs/a_host.json      these files

The original of a changed file is kept as NAME.backup; an intact file is not touched. Exit status: 0 if every
file is intact or repaired, 1 if one could not be repaired.
"""

from __future__ import annotations

import sys

from chakra_et.repair.command import main

if __name__ == "__main__":
    sys.exit(main())
