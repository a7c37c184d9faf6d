"""``python -m chakra_et COMMAND …``: the tools for Chakra execution traces."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chakra_et.errors import TraceError
from utils import cli

# Command → (module with ``main(argv) -> status``, one line of help).
COMMANDS = {
    "validate": ("chakra_et.validate", "check .et files and rank sets against what the simulators need"),
    "info": ("chakra_et.info", "show what .et files hold: nodes, edges, times, collectives"),
    "replay": ("chakra_et.replay", "replay .et files and compare with the measured times"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return cli.dispatch("python -m chakra_et", COMMANDS, argv, TraceError)


if __name__ == "__main__":
    sys.exit(main())
