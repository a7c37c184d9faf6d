"""Logging of the training processes, by LOGLEVEL. Imports no PyTorch, so that a bad level fails first."""

from __future__ import annotations

import logging
import os

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def read_level() -> str:
    """LOGLEVEL in capitals (default: INFO). Raises ValueError if it is unknown.

    Also sets the variable so: modules of torchrun read it too, and fail with a traceback on other spellings.
    """
    level = (os.environ.get("LOGLEVEL") or "INFO").upper()
    if level not in LEVELS:
        raise ValueError(f"LOGLEVEL={os.environ['LOGLEVEL']} is unknown; choose from {', '.join(LEVELS)}")
    if "LOGLEVEL" in os.environ:
        os.environ["LOGLEVEL"] = level
    return level


def setup_logging(rank: int) -> None:
    """Log to stderr at LOGLEVEL; ranks other than 0 log warnings only, unless it is DEBUG.

    Raises ValueError if LOGLEVEL is unknown.
    """
    level = logging.getLevelName(read_level())
    if rank and level > logging.DEBUG:
        level = max(level, logging.WARNING)
    form = f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S", force=True)
    for name in ("chakra_et", "utils", "gpt2", "bert", "__main__"):
        logging.getLogger(name).setLevel(level)
