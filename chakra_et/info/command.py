"""``chakra-et info FILE…``: the contents of .et files, as text or JSON.

    chakra-et info outputs/gpt2.0.et
    chakra-et info outputs/gpt2 --json

JSON: ``{"files": [{...}]}`` with, per file: ``file``; ``bytes``; ``nodes``; ``nodes_by_type`` and
``nodes_by_kind``; ``edges`` {``data``, ``ctrl``, ``by_kind``}; ``time`` {``start_micros``, ``end_micros``,
``span_micros``, ``longest_path_micros``}, the latter null if the dependencies have a cycle or a gap;
``critical_path_micros`` and ``busy_micros`` by kind as in ``replay.shares``, empty without start times;
``lanes`` [{``lane``, ``kind``, ``label``, ``nodes``, ``compute_micros``, ``communication_micros``}];
``collectives`` [{``group``, ``name``, ``ranks``, ``type``, ``count``, ``bytes``, ``micros``,
``wait_micros``}], the latter null unless all ranks were converted together; ``messages`` [{``direction``,
``peer``, ``count``, ``bytes``}]; ``notes``; ``metadata``. An unreadable file has ``file`` and ``error`` only.
Exit status: 0; 1 if a file cannot be read; 2 for unusable arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et.cli import parse
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.sets import find_rank_sets
from chakra_et.info.describe import describe
from chakra_et.info.text import text


@dataclass
class InfoConfig:
    """The command's arguments."""

    files: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": ".et files, or NAME for NAME.0.et, NAME.1.et, …"}
    )
    json: bool = field(default=False, metadata={"help": "print JSON"})

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("give at least one .et file, or the NAME of a run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = parse(InfoConfig, argv, description="Show the contents of .et files.")
    status, answers = 0, []
    for run in find_rank_sets(config.files, allow_missing=True):
        groups = run.comm_groups()
        for path in run.files.values():
            try:
                answer = {"file": str(path), "bytes": Path(path).stat().st_size}
                answer |= describe(et_file.read(path), groups)
                if not config.json:
                    print(text(answer))
            except TraceError as error:
                status, answer = 1, {"file": str(path), "error": str(error)}
                if not config.json:
                    print(f"error: {error}", file=sys.stderr)
            answers.append(answer)
    if config.json:
        print(json.dumps({"files": answers}, indent=2))
    return status
