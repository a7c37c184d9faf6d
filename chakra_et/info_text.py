"""What ``info`` found in a file, as text for a terminal."""

from __future__ import annotations

from typing import Any

LONGEST_TEXT = 60


def text(answer: dict[str, Any]) -> str:
    """One file's description for people."""
    edges, times = answer["edges"], answer["time"]
    by_edge = edges["by_kind"] or {}
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
        "edge kinds": _counts(by_edge),
        "span": _milliseconds(times["span_micros"]),
        "longest path": _milliseconds(times["longest_path_micros"]),
    }
    lines += [f"  {name:12}  {value}" for name, value in facts.items() if value]
    lanes = [
        [lane["lane"], lane["kind"], _short(lane["label"]), f"{lane['nodes']:,}",
         f"{lane['compute_micros'] / 1000:,.3f}", f"{lane['communication_micros'] / 1000:,.3f}"]
        for lane in answer["lanes"]
    ]  # fmt: skip
    lines += _table(
        ["lane", "kind", "label", "nodes", "compute ms", "communication ms"], lanes, right=(0, 3, 4, 5)
    )
    collectives = [
        [each["group"] or "all", _short(each["name"]), _ranks(each["ranks"]), each["type"],
         f"{each['count']:,}", f"{each['bytes']:,}"]
        for each in answer["collectives"]
    ]  # fmt: skip
    lines += _table(["group", "name", "ranks", "collective", "count", "bytes"], collectives, right=(0, 4, 5))
    messages = [
        [each["direction"], each["peer"], f"{each['count']:,}", f"{each['bytes']:,}"]
        for each in answer["messages"]
    ]
    lines += _table(["message", "peer", "count", "bytes"], messages, right=(1, 2, 3))
    lines += [f"  note: {note}" for note in answer["notes"]]
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{_short(name)} {count:,}" for name, count in counts.items())


def _milliseconds(micros: int | None) -> str:
    return "" if micros is None else f"{micros / 1000:,.3f} ms"


def _short(value: Any) -> str:
    """Text of a file for a terminal: printable, on one line, not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(value))
    return shown if len(shown) <= LONGEST_TEXT else shown[: LONGEST_TEXT - 1] + "…"


def _ranks(ranks: list[int] | None) -> str:
    return "" if ranks is None else _short(",".join(map(str, ranks)))


def _table(head: list[str], rows: list[list[Any]], right: tuple[int, ...]) -> list[str]:
    """Aligned columns, none where there are no rows."""
    if not rows:
        return []
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
