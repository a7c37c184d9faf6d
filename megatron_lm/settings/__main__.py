"""Check the settings in the environment; ``_00_conf.sh`` runs this folder with ``python3``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lm.errors import SettingsError
from megatron_lm.settings import Settings


def main() -> int:
    try:
        Settings.from_environment()
    except SettingsError as error:
        print(f"_00_conf.sh: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
