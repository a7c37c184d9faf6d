"""``python -m chakra_et COMMAND …``: the tools for Chakra execution traces."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

from chakra_et.errors import TraceError

# Command → (module with ``main(argv) -> status``, one line of help). Modules are imported when they run.
COMMANDS = {
    "validate": ("chakra_et.validate", "check .et files and rank sets against what the simulators need"),
    "info": ("chakra_et.info", "show what .et files hold: nodes, edges, times, collectives"),
    "replay": ("chakra_et.replay", "replay .et files and compare with the measured times"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for arguments or files that can't be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"error: no command {arguments[0]!r}: use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a letter of a name or path is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]) or 0
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has left (`… | head`); without this the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(["usage: python -m chakra_et COMMAND … (COMMAND --help tells more)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
