#!/usr/bin/env python3
"""Plan GPT-2 345M on one A100 and three A10 nodes of 4 GPUs.

python fasop/FASOP_345m.py [flags of python -m fasop plan]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fasop.__main__ import main

    sys.exit(main(["plan", "--model", "gpt2-345m", "--cluster", "seed-345m", *sys.argv[1:]]))
