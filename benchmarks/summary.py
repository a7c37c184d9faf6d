"""Puts a benchmark's output into a document, between the markers of its name."""

from __future__ import annotations

from pathlib import Path

from chakra_et.files import write_text

SUMMARY = Path(__file__).resolve().parents[1] / "CONVERSION_SUMMARY.md"


def put(name: str, lines: list[str], document: Path = SUMMARY) -> None:
    """Replace the block ``<!-- name --> … <!-- /name -->``. Raises ``SystemExit`` where there is none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = document.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"error: {document.name} has no markers {begin} … {end}")
    head, rest = text.split(begin, 1)
    _, tail = rest.split(end, 1)
    write_text(document, f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}")
