"""``chakra-et info FILE…``: the contents of .et files, as text or JSON.

    chakra-et info outputs/gpt2.0.et
    chakra-et info outputs/gpt2 --json

JSON: ``{"files": [{...}]}`` with, per file: ``file``; ``bytes``; ``nodes``; ``nodes_by_type`` and
``nodes_by_kind``; ``edges`` {``data``, ``ctrl``, ``by_kind``}; ``time`` {``start_micros``, ``end_micros``,
``span_micros``, ``longest_path_micros``}, the latter null if the dependencies have a cycle or a gap;
``lanes`` [{``lane``, ``kind``, ``label``, ``nodes``, ``compute_micros``, ``communication_micros``}];
``communication`` [{``group``, ``name``, ``ranks``, ``type``, ``peer``, ``count``, ``bytes``, ``micros``,
``wait_micros``}], the peer null for collectives, the wait unless all ranks were converted together;
``notes``; ``metadata``. An unreadable file has ``file`` and ``error`` only.
Exit status: 0; 1 if a file cannot be read; 2 for unusable arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chakra_et.cli import parse
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.sets import find_rank_sets
from chakra_et.info.describe import describe
from chakra_et.text import shortened, table

LONGEST_TEXT = 60


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
                    print(_text(answer))
            except TraceError as error:
                status, answer = 1, {"file": str(path), "error": str(error)}
                if not config.json:
                    print(f"error: {error}", file=sys.stderr)
            answers.append(answer)
    if config.json:
        print(json.dumps({"files": answers}, indent=2))
    return status


def _text(answer: dict[str, Any]) -> str:
    """The lines for one file. ``answer``: its dict from ``info.describe``, with ``file`` and ``bytes``."""
    edges, times = answer["edges"], answer["time"]
    lines = [
        f"{answer['file']}: {answer['nodes']:,} nodes, {edges['data'] + edges['ctrl']:,} edges, "
        f"{answer['bytes'] / 1e6:.1f} MB"
    ]
    metadata = {
        name: value for name, value in answer["metadata"].items() if not isinstance(value, (dict, list))
    }
    facts = {
        "metadata": ", ".join(f"{name} {_short(value)}" for name, value in metadata.items()),
        "types": _counts(answer["nodes_by_type"]),
        "kinds": _counts(answer["nodes_by_kind"]),
        "edges": _counts({"data": edges["data"], "ctrl": edges["ctrl"]}),
        "edge kinds": _counts(edges["by_kind"]),
        "span": _milliseconds(times["span_micros"]),
        "longest path": _milliseconds(times["longest_path_micros"]),
    }
    lines += [f"  {name:13}  {value}" for name, value in facts.items() if value]
    lanes = [
        [str(lane["lane"]), lane["kind"], _short(lane["label"]), f"{lane['nodes']:,}",
         f"{lane['compute_micros'] / 1000:,.3f}", f"{lane['communication_micros'] / 1000:,.3f}"]
        for lane in answer["lanes"]
    ]  # fmt: skip
    header = ["lane", "kind", "label", "nodes", "compute ms", "communication ms"]
    lines += table([header, *lanes], right=(0, 3, 4, 5), indent="  ")
    communication = [
        [each["group"] or "all", _short(each["name"]), _short(",".join(map(str, each["ranks"] or ()))),
         each["type"], "" if each["peer"] is None else str(each["peer"]), f"{each['count']:,}",
         f"{each['bytes']:,}", f"{each['micros'] / 1000:,.3f}",
         "-" if each["wait_micros"] is None else f"{each['wait_micros'] / 1000:,.3f}"]
        for each in answer["communication"]
    ]  # fmt: skip
    header = ["group", "name", "ranks", "communication", "peer", "count", "bytes", "ms", "waiting ms"]
    lines += table([header, *communication], right=(0, 4, 5, 6, 7, 8), indent="  ")
    lines += [f"  note: {note}" for note in answer["notes"]]
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{_short(name)} {count:,}" for name, count in counts.items())


def _milliseconds(micros: int | None) -> str:
    return "" if micros is None else f"{micros / 1000:,.3f} ms"


def _short(value: Any) -> str:
    return shortened(str(value), LONGEST_TEXT)
