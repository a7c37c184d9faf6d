#!/usr/bin/env python3
"""Plan GPT-2 XL: time against cost on 80 clusters of A100 and A10.

python fasop/FASOP_pareto.py [flags of python -m fasop plan]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fasop.__main__ import main

    given = ["--model", "gpt2-xl", "--cluster", "paper-pareto", "--objective", "pareto"]
    sys.exit(main(["plan", *given, *sys.argv[1:]]))
