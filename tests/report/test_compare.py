"""``chakra-et compare``: times per step and rank, matched by name, with a change that was put in by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import find_run
from chakra_et.report.compare import compare_content, lines, match, side, speedup, strong_scaling
from chakra_et.report.run import load
from tests.report.made_run import write_run


def two_runs(folder: Path) -> list:
    write_run(folder, "before")
    # Both ranks' kernels now take 50 µs: 20 µs per rank less on average.
    write_run(folder, "after", slow=50)
    return [side(load(find_run([str(folder / name)]))) for name in ("before", "after")]


def test_what_changed_is_found(tmp_path: Path) -> None:
    sides = two_runs(tmp_path)
    first = match(sides, "entries")
    gemm = next(each for each in first if each.name == "gemm")
    assert gemm.self_ns == (70_000, 50_000)
    assert gemm.count == (1, 1)
    mm = next(each for each in first if each.name == "aten::mm")
    assert mm.self_ns == (20_000, 20_000)
    assert mm.device_ns == (70_000, 50_000)
    (module,) = match(sides, "modules")
    assert sum(after - before for before, after in (module.self_ns, module.device_ns)) == -20_000


def test_a_kernel_that_is_gone_has_no_time(tmp_path: Path) -> None:
    write_run(tmp_path, "a")
    write_run(tmp_path, "b", gemm_name="other_gemm")
    sides = [side(load(find_run([str(tmp_path / name)]))) for name in "ab"]
    rows = {each.name: each for each in match(sides, "entries")}
    assert rows["gemm"].self_ns == (70_000, None)
    assert rows["other_gemm"].self_ns == (None, 70_000)
    # Its class has a partner, and each list adds up.
    (product,) = [each for each in match(sides, "classes") if each.name == "matrix product"]
    assert product.self_ns == (70_000, 70_000)
    paths = {each.name: each.device_ns for each in match(sides, "calls")}
    assert paths["Net_0/Linear_0/aten::mm/gemm"] == (70_000, None)
    text = "\n".join(lines(sides, 1))
    assert re.search(r"1 other, only in b +- +70\.0 µs", text) or re.search(r"only in a +70\.0 µs", text)
    assert re.search(r"all +(\S+ \S+) +\1 +0", text), "the kernels of both take as long"


def test_scaling_efficiency(tmp_path: Path) -> None:
    sides = two_runs(tmp_path)
    assert speedup(sides, 1) == strong_scaling(sides, 1) == pytest.approx(160 / 120)
    files = write_run(tmp_path, "alone")
    files.et_file(1).unlink()
    sides = [side(load(find_run([str(tmp_path / name)]))) for name in ("alone", "before")]
    assert (speedup(sides, 1), strong_scaling(sides, 1)) == (1.0, 0.5)
    assert compare_content(sides)["runs"][1]["strong_scaling"] == 0.5


def test_the_table_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_runs(tmp_path)
    page = tmp_path / "page.html"
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert "gemm" in out
    assert "-20.0 µs" in out
    assert page.stat().st_size < 200_000


def test_ranks_of_a_run_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    names = [str(tmp_path / "made.0.et"), str(tmp_path / "made.1.et")]
    assert main(["compare", *names]) == 0
    assert "+40.0 µs" in capsys.readouterr().out
