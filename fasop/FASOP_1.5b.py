#!/usr/bin/env python3
"""Plan GPT-2 XL (1.5B) on one A100 and 15 A10 nodes of 4 GPUs.

python fasop/FASOP_1.5b.py [flags of python -m fasop plan]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fasop.__main__ import main

    sys.exit(main(["plan", "--model", "gpt2-xl", "--cluster", "seed-1.5b", *sys.argv[1:]]))
