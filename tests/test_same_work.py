"""The count of what is new since issue 25: its rows are there, and a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.same_work import counted, found_in_old, read_rows, span

ROWS = read_rows()


def test_all_rows_are_there_once() -> None:
    lines = counted(ROWS)
    assert len(lines) == len(ROWS) and min(lines.values()) > 0
    assert {row.issue for row in ROWS} <= set(range(26, 36))


def test_a_definition_counts_with_its_decorators(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import x\n\n\n@x.one\n@x.two\nclass Kind:\n    @x.three\n    def own(self):\n        return 1\n"
    )
    assert span(path, "") == (1, 9)
    assert span(path, "Kind") == (4, 9)
    assert span(path, "Kind.own") == (7, 9)


@pytest.mark.parametrize("what", ["chakra_et/gone.py", "chakra_et/api.py:gone", "chakra_et/api.py:Job"])
def test_a_row_that_is_gone_or_counts_twice_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"isn't there|has no gone|overlaps"):
        counted([*ROWS, replace(ROWS[0], what=what)])


def test_an_expression_that_the_old_code_has_is_found() -> None:
    known = replace(ROWS[0], absent="def main")
    if not found_in_old([known]):
        pytest.skip("the history isn't at hand")
    assert found_in_old(ROWS) == []
