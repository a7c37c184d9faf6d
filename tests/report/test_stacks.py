"""Call stacks on the page: slices as the device trace nests them, on the run's clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.report import stacks
from chakra_et.report.columns import SLICE
from chakra_et.report.run import NODE_KINDS
from tests.export.test_recorded import converted, depth_of, slice_, trace
from tests.report.page_data import page_data
from tests.shared import shared_path

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync", "Trace")


def shown(page: Path) -> dict[str, np.ndarray]:
    """Row, start, end (µs), name and kind of each slice, and ``rows``: (kind, label) of the page's rows."""
    content, columns = page_data(page)
    tables = content["timeline"]
    chosen = (columns["flags"] & SLICE) > 0
    start = columns["start"][chosen].astype(int) * tables["unit_ns"] // 1000
    return {
        "row": columns["row"][chosen].astype(int),
        "start": start,
        "end": start + columns["length"][chosen].astype(int) * tables["unit_ns"] // 1000,
        "name": np.array([tables["names"][at] for at in columns["name"][chosen]]),
        "kind": np.array([NODE_KINDS[at] for at in columns["kind"][chosen]]),
        "rows": np.array([(kind, label) for _, kind, label in tables["rows"]]),
    }


def test_frames_operators_and_calls_have_a_row_each(tmp_path: Path) -> None:
    name = converted(tmp_path, trace())
    assert main(["report", str(name)]) == 0
    found = shown(tmp_path / "run_report.html")
    assert found["name"].tolist() == ["train.py(3): step", "aten::add", "cudaLaunchKernel"]
    assert found["kind"].tolist() == ["python", "operator", "runtime"]
    assert found["rows"][found["row"]].tolist() == [["stack", "calls of 1"], ["stack", ""], ["stack", ""]]
    # The frame begins before all nodes, so that it is cut at the run's beginning.
    assert found["start"].tolist() == [0, 0, 10] and found["end"].tolist() == [90, 50, 20]


def test_stacks_of_our_captures_lie_beside_the_nodes_of_their_steps(tmp_path: Path) -> None:
    """Slices of the step with the observer were shown, which the graph lacks, and all as slow as recorded."""
    fixtures = Path(__file__).resolve().parents[1] / "fixtures" / "gpu"
    assert main(["convert", "--dir", str(fixtures), "-o", str(tmp_path), "--name", "host-bound"]) == 0
    assert main(["report", str(tmp_path / "host-bound")]) == 0
    page = tmp_path / "host-bound_report.html"
    found, (content, _) = shown(page), page_data(page)
    steps = {f"ProfilerStep#{step[1]}": step[2:4] for step in content["steps"]}
    of_steps = [at for at, name in enumerate(found["name"]) if name.startswith("ProfilerStep#")]
    assert {found["name"][at] for at in of_steps} == {*steps} and len(steps) == 3
    for at in of_steps:
        begin, end = steps[found["name"][at]]
        assert found["start"][at] == pytest.approx(begin / 1000, abs=2) and found["end"][at] <= end / 1000 + 2


def test_the_owners_of_the_peak_of_memory_are_named(tmp_path: Path) -> None:
    """4 + 2 kB live in aten::add at the peak, 1 kB was there before; what comes later doesn't count."""

    def allocates(at: float, address: int, size: int, total: int) -> dict:
        arguments = {"Addr": address, "Bytes": size, "Total Allocated": total, "Total Reserved": 9000}
        place = {"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": at}
        return place | {"args": arguments | {"Device Type": 1, "Device Id": 0}}

    events = [
        allocates(12, 3, 500, 1500), allocates(14, 3, -500, 1000), allocates(15, 1, 4000, 5000),
        allocates(25, 2, 2000, 7000), allocates(50, 1, -4000, 3000), allocates(55, 4, 300, 3300),
    ]  # fmt: skip
    name = converted(tmp_path, [*trace(), *events])
    assert main(["report", str(name)]) == 0
    page = tmp_path / "run_report.html"
    assert page_data(page)[0]["memory_owners"] == [
        {"rank": 0, "owner": "aten::add", "bytes": 6000, "blocks": 2},
        {"rank": 0, "owner": "allocated before the recording", "bytes": 1000, "blocks": None},
    ]
    assert "<h2>memory owners</h2>" in page.read_text()


def test_a_trace_that_is_gone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name = converted(tmp_path, trace())
    (tmp_path / "run_rank0.json").unlink()
    capsys.readouterr()
    assert main(["report", str(name), "--json"]) == 0
    lacks = json.loads(capsys.readouterr().out)["lacks"]
    assert [text for text in lacks if text.startswith("no call stacks: the device trace of rank 0")]


def test_the_longest_are_kept_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [slice_(f"call {at}", 11 + at, 0.5, 1, "python_function") for at in range(40)]
    name = converted(tmp_path, [*trace(), *calls])
    monkeypatch.setattr(stacks, "MOST", 3)
    assert main(["report", str(name)]) == 0
    assert shown(tmp_path / "run_report.html")["name"].tolist() == [
        "train.py(3): step", "aten::add", "cudaLaunchKernel",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["b200_eager_rank0", "mi300_resnet_rank0", "pairs/h100_bert-small-uncased"])
def test_public_traces_keep_every_level(name: str, tmp_path: Path) -> None:
    path = shared_path("data/traces/public", f"{name}.json.gz") / f"{name}.json.gz"
    page = tmp_path / "page.html"
    assert main(["report", str(path), "-o", str(page)]) == 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    on_host = [each for each in events if each.get("cat") not in DEVICE]
    found = shown(page)
    depth = np.zeros(len(found["rows"]), dtype=int)
    for at, (kind, label) in enumerate(found["rows"].tolist()):
        depth[at] = 0 if kind != "stack" else 1 if label else depth[at - 1] + 1
    # Slices that reach beyond the one around them by rounded times are counted here alone.
    assert depth_of(on_host) <= depth.max() <= depth_of(on_host) + 2
    assert page.stat().st_size < 10e6
