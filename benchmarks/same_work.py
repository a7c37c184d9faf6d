#!/usr/bin/env python3
"""How many lines of product Python do what the code did when issue 25 counted 55,900 of them.

    python benchmarks/same_work.py             # lines by issue
    python benchmarks/same_work.py --rows      # and by row

``same_work.csv`` lists what the product didn't do at commit efd4542 (2026-11-23, 55,934 lines, the layout
that issue 25 describes): whole files and definitions that serve nothing else, each with the issue that asks
for it and a regular expression that finds nothing in the product Python of that commit (of megatron_lm alone
for rows there), which is checked where the history is at hand. Code that does old and new work counts as
old, and so do models that replaced simpler ones: of kernels, collectives, memory. What the product did then
and no longer does isn't accounted for; it stands in CHANGELOG.md under Removed.
"""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import cli
from chakra_et.text import table

FOLDERS = ("chakra_et", "fasop", "megatron_lm", "utils", "gpt2", "bert", "scripts")
OLD = "efd4542"
GOAL = 44_000
"""Of issue 25, for the same work."""


@dataclass
class Config:
    rows: bool = field(default=False, metadata={"help": "show each row"})


@dataclass(frozen=True)
class Row:
    """``what``: a file, or FILE:DEFINITION or FILE:CLASS.METHOD; ``absent``: not found in the old code."""

    what: str
    issue: int
    does: str
    absent: str

    @property
    def folders(self) -> tuple[str, ...]:
        return ("megatron_lm",) if self.what.startswith("megatron_lm/") else FOLDERS


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    rows = read_rows()
    lines = counted(rows)
    if config.rows:
        print(
            *table([["lines", "issue", "what"], *([str(lines[r]), str(r.issue), r.what] for r in rows)]),
            sep="\n",
        )
    by_issue = Counter[int]()
    for row in rows:
        by_issue[row.issue] += lines[row]
    new, total = by_issue.total(), product_lines()
    print(*(f"issue {issue}: {count:,}" for issue, count in sorted(by_issue.items())), sep="\n")
    print(
        f"{total:,} lines of product Python, {new:,} of new work: {total - new:,} do what {OLD} did "
        f"(goal {GOAL:,})"
    )
    found = found_in_old(rows)
    print(*(f"{row.what}: {row.absent!r} is in {OLD}" for row in found), sep="\n", end="\n" if found else "")
    return 1 if found else 0


def read_rows() -> list[Row]:
    with (Path(__file__).parent / "same_work.csv").open(newline="", encoding="utf-8") as file:
        return [
            Row(row["what"], int(row["issue"]), row["does"], row["absent"]) for row in csv.DictReader(file)
        ]


def counted(rows: list[Row]) -> dict[Row, int]:
    """Lines of each row. Raises ``ValueError`` for a row that isn't there, or overlaps another."""
    lines: dict[Row, int] = {}
    taken: dict[str, set[int]] = {}
    for row in rows:
        name, _, definition = row.what.partition(":")
        first, last = span(ROOT / name, definition)
        own = set(range(first, last + 1))
        if own & taken.setdefault(name, set()):
            raise ValueError(f"{row.what} overlaps another row")
        taken[name] |= own
        lines[row] = len(own)
    return lines


def span(path: Path, definition: str) -> tuple[int, int]:
    """First and last line of a definition with its decorators, or of the file. Raises ``ValueError``."""
    if not path.is_file():
        raise ValueError(f"{path} isn't there")
    text = path.read_text("utf-8")
    first, last = 1, text.count("\n")
    body: list[ast.stmt] = ast.parse(text).body
    for name in filter(None, definition.split(".")):
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next((each for each in body if isinstance(each, kinds) and each.name == name), None)
        if node is None:
            raise ValueError(f"{path} has no {definition}")
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        last, body = node.end_lineno or node.lineno, node.body
    return first, last


def product_lines() -> int:
    """As issue 25 counts them: ``git ls-files FOLDERS | grep '\\.py$' | xargs cat | wc -l``."""
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = (ROOT / name for name in listed.stdout.splitlines() if name.endswith(".py"))
    return sum(path.read_bytes().count(b"\n") for path in files)


def found_in_old(rows: list[Row]) -> list[Row]:
    """The rows whose expression is in the old code; none where the history isn't at hand."""
    if subprocess.run(["git", "cat-file", "-e", OLD], cwd=ROOT, capture_output=True).returncode:
        return []
    searches = {(row.absent, row.folders): row for row in rows}
    command = ["git", "grep", "-qiE"]
    return [
        row
        for (absent, folders), row in searches.items()
        if subprocess.run(
            [*command, "-e", absent, OLD, "--", *(f"{folder}/*.py" for folder in folders)], cwd=ROOT
        ).returncode
        == 0
    ]


if __name__ == "__main__":
    sys.exit(main())
