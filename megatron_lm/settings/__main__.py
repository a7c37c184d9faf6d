"""Check the settings in the environment and print those that follow from them, as shell assignments.

``_00_conf.sh`` runs this folder with a plain Python and evaluates its output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lm.errors import RunError
from megatron_lm.settings import conf


def main() -> int:
    try:
        words = os.environ.get("UNPREFIXED", "").split()
        conf.refuse_misplaced(dict(word.split("=", 1) for word in words if "=" in word))
        settings = conf.from_environment(os.environ)
    except RunError as error:
        print(f"_00_conf.sh: {error}", file=sys.stderr)
        return 2
    print(conf.write_lines(conf.derived(settings)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
