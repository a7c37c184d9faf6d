#!/usr/bin/env python3
"""Convert host and device traces to Chakra execution traces: ``chakra-et convert`` from a checkout.

    python convert_to_et.py --dir outputs                    every run in outputs/
    python convert_to_et.py --name 'gpt2_2gpu*' --workers 2  some of them
    python convert_to_et.py --ranks 3/16                     every 16th rank from rank 3 on

For each run NAME: NAME.0.et, NAME.1.et … (named as simulators expect), NAME.et (rank 0's file again),
NAME_comm_groups.json and NAME_conversion.json (events in, nodes out, every loss). Exit status: 0 if every
rank of every run was converted and its file is valid, 1 if not, 2 for unusable arguments or input.
"""

from __future__ import annotations

import sys

from chakra_et.convert import command

if __name__ == "__main__":
    sys.exit(command.main())
