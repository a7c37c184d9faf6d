"""What known messages mean, as the data in ``messages.tsv``, whose head explains the columns.

Patterns match what stays the same over versions: names of exceptions, result codes, Slurm's phrases.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lm.diagnosis.statements import Kind

# How well a statement shows where a failure began. WEAK: the process may have gone on. PEER: another process
# went away or did not answer.
PRIMARY, WEAK, PEER = range(3)
WEIGHTS = {"primary": PRIMARY, "weak": WEAK, "peer": PEER}
KINDS = {"any": tuple(Kind), "message": (Kind.TOOL, Kind.RECORD, Kind.EXCEPTION), "slurm": (Kind.SLURM,)}


class Rule(NamedTuple):
    """pattern: searched in "name: text" of statements of these kinds.

    sentence: with places for the pattern's groups.
    """

    weight: int
    kinds: tuple[Kind, ...]
    pattern: re.Pattern[str]
    sentence: str


def _rows(*kinds: str) -> Iterator[tuple[int, str, str, str]]:
    for line in Path(__file__).with_name("messages.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            weight, kind, pattern, sentence = line.split("\t")
            if kind in kinds:
                yield WEIGHTS[weight], kind, pattern, sentence


RULES = [
    Rule(weight, KINDS[kind], re.compile(pattern, re.IGNORECASE), sentence)
    for weight, kind, pattern, sentence in _rows(*KINDS)
]
# number → (weight, sentence)
OF_ERRNO = {getattr(errno, name): (weight, words) for weight, _, name, words in _rows("errno")}
OF_SIGNAL = {signal.Signals[name]: (weight, words) for weight, _, name, words in _rows("signal")}
# Slurm's state of a job, where no log explains it → sentence
OF_STATE = {name: words for _, _, name, words in _rows("state")}
