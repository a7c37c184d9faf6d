"""``chakra-et info FILE…``: the contents of .et files, as text or JSON.

    chakra-et info outputs/gpt2.0.et
    chakra-et info outputs/gpt2 --json

JSON: ``{"notes": [...], "files": [{...}]}`` with, per file: ``file``; ``bytes``; ``nodes``;
``nodes_by_type`` and ``nodes_by_kind``; ``edges`` {``data``, ``ctrl``, ``by_kind``}; ``time``
{``start_micros``, ``end_micros``, ``span_micros``, ``longest_path_micros``}, the latter null if the
dependencies have a cycle or a gap; ``notes``; ``metadata``. An unreadable file has only ``file``, ``error``.
Exit status: 0; 1 if a file cannot be read; 2 for unusable arguments.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.cli import option, parse, run_names
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import EDGE_NAMES, kinds_of_edges, texts
from chakra_et.et.sets import find_rank_sets
from chakra_et.simulate.measured_steps import about_steps, steps_of
from chakra_et.simulate.replays import longest_path
from chakra_et.text import shortened, size

LONGEST_TEXT = 60


@dataclass
class InfoConfig:
    files: tuple[str, ...] = run_names("the runs", "a folder or .et files")
    json: bool = option("print JSON", False)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(InfoConfig, argv, description="Show the contents of .et files.")
    status, answers, notes = 0, [], []
    for run in find_rank_sets(config.files, allow_missing=True):
        notes += run.notes
        for note in run.notes:
            print(f"warning: {note}", file=sys.stderr)
        for path in run.files.values():
            try:
                answer = {"file": str(path), "bytes": Path(path).stat().st_size}
                answer |= describe(et_file.read(path))
                if not config.json:
                    print(_text(answer))
            except TraceError as error:
                status, answer = 1, {"file": str(path), "error": str(error)}
                if not config.json:
                    print(f"error: {error}", file=sys.stderr)
            answers.append(answer)
    if config.json:
        print(json.dumps({"notes": notes, "files": answers}, indent=2))
    return status


def _text(answer: dict[str, Any]) -> str:
    """The lines for one file. ``answer``: its dict from ``describe``, with ``file`` and ``bytes``."""
    edges, times = answer["edges"], answer["time"]
    lines = [
        f"{answer['file']}: {answer['nodes']:,} nodes, {edges['data'] + edges['ctrl']:,} edges, "
        f"{size(answer['bytes'])}"
    ]
    facts = {
        "metadata": ", ".join(
            f"{name} {shortened(str(value), LONGEST_TEXT)}"
            for name, value in answer["metadata"].items()
            if value != "" and not isinstance(value, (dict, list))
        ),
        "types": _counts(answer["nodes_by_type"]),
        "kinds": _counts(answer["nodes_by_kind"]),
        "edges": _counts({"data": edges["data"], "ctrl": edges["ctrl"]}),
        "edge kinds": _counts(edges["by_kind"]),
        "span": _milliseconds(times["span_micros"]),
        "longest path": _milliseconds(times["longest_path_micros"]),
    }
    lines += [f"  {name:13}  {value}" for name, value in facts.items() if value]
    lines += [f"  note: {note}" for note in answer["notes"]]
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, Any]) -> str:
    return ", ".join(f"{shortened(name, LONGEST_TEXT)} {count:,}" for name, count in counts.items())


def _milliseconds(micros: int | None) -> str:
    return "" if micros is None else f"{micros / 1000:,.3f} ms"


def describe(trace: ExecutionTrace) -> dict[str, Any]:
    """The fields that the head of this module documents, except for ``file`` and ``bytes``."""
    # In float64: the times of a damaged file may overflow 64 bits.
    end = (trace.start_micros.astype(float) + trace.duration_micros).max() if len(trace) else 0
    start = trace.start_micros.min() if len(trace) else 0
    timed = bool(trace.start_micros.any())
    untimed = "the file has no start times: convert with --timestamps to get a time span"
    notes = [] if timed else [untimed]
    try:
        notes += about_steps([trace], [steps_of(trace)])
        longest = longest_path(trace) // 1000
    except TraceError as error:
        notes.append(f"no longest path: {error}")
        longest = None
    types = [NodeType(value).name if value in list(NodeType) else f"type {value}" for value in range(256)]
    edges = kinds_of_edges(trace)
    return {
        "nodes": len(trace),
        "nodes_by_type": _count(types, trace.types),
        "nodes_by_kind": _count(*texts(trace, "kind")),
        "edges": {
            "data": len(trace.data_deps.values),
            "ctrl": len(trace.ctrl_deps.values),
            "by_kind": _count(EDGE_NAMES, edges[edges < len(EDGE_NAMES) - 1]),
        },
        "time": {
            "start_micros": int(start),
            "end_micros": int(end),
            "span_micros": int(end) - int(start) if timed else None,
            "longest_path_micros": longest,
        },
        "notes": notes,
        "metadata": {name: _unpacked(value) for name, value in trace.metadata.items()},
    }


def _count(names: Sequence[str], values: np.ndarray) -> dict[str, int]:
    """How often each name occurs; ``values``: indices into ``names``, negative for none."""
    return {names[at]: int(count) for at, count in enumerate(np.bincount(values[values >= 0])) if count}


def _unpacked(value: Any) -> Any:
    """The value of a JSON list or object in a string, such as our converter's metadata has."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    return value
