"""``python -m fasop COMMAND …``: plan, measure, picture and launch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from fasop.errors import PlanError

# Command → (module with ``main(argv) -> status``, one line of help). Modules are imported when they run.
COMMANDS = {
    "plan": ("fasop.plan_command", "search for the best plans of a model on a cluster"),
    "profile": ("fasop.profile", "measure layer costs on this machine, or take them from .et traces"),
    "simulate": ("fasop.simulate", "show a plan's schedule as a picture and as .et files"),
    "export": ("fasop.export", "write a plan as the settings that launch it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for input that can't be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"error: no command {arguments[0]!r}: use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]) or 0
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has left (`… | head`); without this the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(["usage: python -m fasop COMMAND … (COMMAND --help tells more)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
