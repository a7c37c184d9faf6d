"""The description of an .et file as text for a terminal."""

from __future__ import annotations

from typing import Any

from chakra_et.text import shortened, table

LONGEST_TEXT = 60
BAR = 30


def text(answer: dict[str, Any]) -> str:
    """The lines for one file. ``answer``: its dict from ``info.describe``, with ``file`` and ``bytes``."""
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
    lines += [f"  {name:13}  {value}" for name, value in facts.items() if value]
    lines += _bars(answer["critical_path_micros"], answer["busy_micros"])
    lanes = [
        [str(lane["lane"]), lane["kind"], _short(lane["label"]), f"{lane['nodes']:,}",
         f"{lane['compute_micros'] / 1000:,.3f}", f"{lane['communication_micros'] / 1000:,.3f}"]
        for lane in answer["lanes"]
    ]  # fmt: skip
    header = ["lane", "kind", "label", "nodes", "compute ms", "communication ms"]
    lines += table([header, *lanes], right=(0, 3, 4, 5), indent="  ")
    collectives = [
        [each["group"] or "all", _short(each["name"]), _ranks(each["ranks"]), each["type"],
         f"{each['count']:,}", f"{each['bytes']:,}", *_transfer_and_wait(each)]
        for each in answer["collectives"]
    ]  # fmt: skip
    header = ["group", "name", "ranks", "collective", "count", "bytes", "ms", "transfer ms", "wait ms"]
    lines += table([header, *collectives], right=(0, 4, 5, 6, 7, 8), indent="  ")
    messages = [
        [each["direction"], str(each["peer"]), f"{each['count']:,}", f"{each['bytes']:,}"]
        for each in answer["messages"]
    ]
    header = ["message", "peer", "count", "bytes"]
    lines += table([header, *messages], right=(1, 2, 3), indent="  ")
    lines += [f"  note: {note}" for note in answer["notes"]]
    return "\n".join(lines) + "\n"


def _transfer_and_wait(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Total, transfer and wait in ms; "-" for the latter two unless all ranks were converted together."""
    total, wait = entry["micros"], entry["wait_micros"]
    parts = ("-", "-") if wait is None else (f"{(total - wait) / 1000:,.3f}", f"{wait / 1000:,.3f}")
    return (f"{total / 1000:,.3f}", *parts)


def _bars(path: dict[str, int], busy: dict[str, int]) -> list[str]:
    """Time by kind, along the critical path and of all nodes, with a bar for the share of the path."""
    whole = max(sum(path.values()), 1)
    rows = [
        [
            kind,
            f"{path[kind] / 1000:,.3f}",
            f"{path[kind] / whole:.1%}",
            _bar(path[kind] / whole),
            f"{all_of / 1000:,.3f}",
        ]
        for kind, all_of in busy.items()
        if all_of or path[kind]
    ]
    header = ["time by kind", "critical path ms", "share", "", "all nodes ms"]
    return table([header, *rows], right=(1, 2, 4), indent="  ")


def _bar(share: float) -> str:
    """``BAR`` letters for 1, in halves."""
    halves = round(2 * BAR * share)
    return "█" * (halves // 2) + "▌" * (halves % 2)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{_short(name)} {count:,}" for name, count in counts.items())


def _milliseconds(micros: int | None) -> str:
    return "" if micros is None else f"{micros / 1000:,.3f} ms"


def _short(value: Any) -> str:
    return shortened(str(value), LONGEST_TEXT)


def _ranks(ranks: list[int] | None) -> str:
    return "" if ranks is None else _short(",".join(map(str, ranks)))
