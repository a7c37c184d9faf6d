"""``chakra-et COMMAND …``, also as ``python -m chakra_et COMMAND …``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chakra_et import cli
from chakra_et.errors import TraceError

# Command → (module with ``main(argv) -> status``, one line of help).
COMMANDS = {
    "run": ("chakra_et.capture.run", "trace a training script without editing it"),
    "convert": ("chakra_et.convert.command", "convert host and device traces to .et files"),
    "repair": ("chakra_et.repair.command", "repair damaged host and device traces"),
    "validate": ("chakra_et.validate.command", "check .et files and rank sets against what simulators need"),
    "info": ("chakra_et.info.command", "show what .et files hold: nodes, edges, times, collectives"),
    "stragglers": ("chakra_et.stragglers.command", "find what slow ranks cost, and which they are"),
    "replay": ("chakra_et.replay.command", "replay .et files and compare with the measured times"),
    "scale": ("chakra_et.simulators.scale_command", "make a set of more or fewer data-parallel ranks"),
    "astra": ("chakra_et.simulators.astra", "write a folder that ASTRA-sim runs, and check its log"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return cli.dispatch("chakra-et", COMMANDS, argv, TraceError)


if __name__ == "__main__":
    sys.exit(main())
