#!/usr/bin/env python3
"""Draw what every rank of a run did when; see megatron_lm/results/picture.py.

python megatron_lm/_05_report_visualization.py JOBID [--iterations 9-10] [--plan PLAN.json]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv[1:1] = ["picture"]
    runpy.run_path(str(Path(__file__).resolve().parent), run_name="__main__")
