#!/usr/bin/env python3
"""Convert host and device traces to Chakra execution traces: ``chakra-et convert`` from a checkout.

    python convert_to_et.py --dir outputs                    every run in outputs/
    python convert_to_et.py --name 'gpt2_2gpu*' --workers 2  some of them
    python convert_to_et.py --ranks 3/16                     every 16th rank from rank 3 on

For each run NAME: NAME.0.et, NAME.1.et … (as simulators look for them), NAME.et (rank 0's bytes),
NAME_comm_groups.json and NAME_conversion.json (what went in, what came out, every loss). The exit status
is 0 if every rank of every run was converted and its file is valid, 1 if not, 2 if nothing could be done.
"""

from __future__ import annotations

import sys

from chakra_et.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
