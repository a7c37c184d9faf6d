"""The dependency graph for graph tools: GraphML (Gephi, yEd, NetworkX) and DOT (Graphviz)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any
from xml.sax.saxutils import escape

from chakra_et.errors import TraceError
from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS
from chakra_et.text import shortened

# Graphviz takes minutes for larger graphs, and nobody can read them.
MOST_DOT_NODES = 5000
LONGEST_LABEL = 48
COLOURS = {
    "operator": "#4a79c4", "runtime": "#8a6fc9", "kernel": "#2f9e6e", "copy": "#12919c",
    "transfer": "#e8841a",
}  # fmt: skip
OTHER_COLOUR = "#9aa5b4"
FIELDS = (
    ("name", "string"), ("kind", "string"), ("rank", "int"), ("id", "long"), ("row", "string"),
    ("start_ns", "long"), ("duration_ns", "long"),
)  # fmt: skip
# What XML 1.0 can't hold at all, even as a reference.
_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_graphml(window: Window, file: IO[bytes]) -> None:
    """Write nodes with their attributes, and edges with their kinds."""
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        *(f'<key id="{name}" for="node" attr.name="{name}" attr.type="{kind}"/>' for name, kind in FIELDS),
        '<key id="edge_kind" for="edge" attr.name="kind" attr.type="string"/>',
        '<graph edgedefault="directed">',
    ]
    file.write(("\n".join(lines) + "\n").encode())
    for at, values in enumerate(_values(window)):
        data = "".join(
            f'<data key="{name}">{_xml(value)}</data>'
            for (name, _), value in zip(FIELDS, values, strict=True)
        )
        file.write(f'<node id="n{at}">{data}</node>\n'.encode("utf-8", "replace"))
    for source, target, kind in _edges(window):
        data = f'<data key="edge_kind">{_xml(kind)}</data>'
        file.write(f'<edge source="n{source}" target="n{target}">{data}</edge>\n'.encode())
    file.write(b"</graph>\n</graphml>\n")


def write_dot(window: Window, file: IO[bytes]) -> None:
    """Write a graph with one cluster for each row. Raises ``TraceError`` for more than ``MOST_DOT_NODES``."""
    if len(window) > MOST_DOT_NODES:
        raise TraceError(
            f"{len(window):,} nodes are too many for a drawing (at most {MOST_DOT_NODES:,}): choose fewer by "
            "--step, --ranks or --around, or write graphml"
        )
    lines = [
        "digraph run {",
        "rankdir=LR;",
        'node [shape=box, style=filled, fontcolor=white, fontname="sans-serif"];',
    ]
    current = -1
    for at, (name, kind, _, number, _, _, duration) in enumerate(_values(window)):
        row = int(window.row[at])
        if row != current:
            lines += ["}"] if current >= 0 else []
            label = f"rank {window.rows[row].rank}, {window.rows[row].label}"
            lines += [f"subgraph cluster_{row} {{", f"label={_quoted(label)};"]
            current = row
        text = f"{shortened(name, LONGEST_LABEL)}\n{number}: {duration / 1000:g} µs"
        colour = COLOURS.get(kind, OTHER_COLOUR)
        lines.append(f"n{at} [label={_quoted(text)}, fillcolor={_quoted(colour)}];")
    lines.append("}")
    lines += [f"n{source} -> n{target} [tooltip={_quoted(kind)}];" for source, target, kind in _edges(window)]
    file.write(("\n".join([*lines, "}"]) + "\n").encode("utf-8", "replace"))


def _values(window: Window) -> Iterator[tuple[Any, ...]]:
    """The ``FIELDS`` of each node."""
    lasts = window.run.end_ns[window.node] - window.start_ns
    columns = (window.name, window.kind, window.rank, window.id, window.row, window.start_ns, lasts)
    for name, kind, rank, number, row, *times in zip(*(each.tolist() for each in columns), strict=True):
        yield window.names[name], NODE_KINDS[kind], rank, number, window.rows[row].label, *times


def _edges(window: Window) -> Iterator[tuple[int, int, str]]:
    yield from zip(window.source.tolist(), window.target.tolist(), window.edge_kind, strict=True)


def _xml(value: str | int) -> str:
    return escape(_FORBIDDEN.sub("�", str(value)))


def _quoted(text: str) -> str:
    """A DOT string: as in JSON, with line breaks as ``\\n`` and letters as they are."""
    return json.dumps(text, ensure_ascii=False)
