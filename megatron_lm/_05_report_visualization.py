#!/usr/bin/env python3
"""Draw what every rank of a run did when; see megatron_lm/picture.py.

python megatron_lm/_05_report_visualization.py JOBID [--node n1 n2] [--iterations 9-10] [--plan PLAN.json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from megatron_lm.picture import main
except ModuleNotFoundError as error:
    sys.exit(f"_05_report_visualization.py: {error.name} is not installed: run it by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main())
