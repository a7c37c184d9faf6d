"""``python -m fasop COMMAND …``: plan, measure, picture and launch."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from chakra_et import cli
from chakra_et.errors import TraceError

# Command → (module with ``main(argv) -> status``, one line of help).
COMMANDS = {
    "plan": ("fasop.commands.plan", "search for the best plans of a model on a cluster"),
    "evaluate": ("fasop.commands.evaluate", "estimate a given plan, without a search"),
    "profile": ("fasop.commands.profile", "measure layer costs here, or take them from .et traces"),
    "simulate": ("fasop.commands.simulate", "show a plan's schedule as a picture and as .et files"),
    "export": ("megatron_lm.plan_settings", "write a plan as the settings that launch it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if list(words[:1]) != ["profile"]:
        # Starting NumPy's threads takes as long as a small search, and only matrix products use them.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # Searches make many objects that live on, and hardly any cycles: looking for those is in vain.
        gc.set_threshold(100_000)
        atexit.register(gc.freeze)  # nor at the end
    return cli.dispatch("python -m fasop", COMMANDS, argv, TraceError, needs="run")


if __name__ == "__main__":
    sys.exit(main())
