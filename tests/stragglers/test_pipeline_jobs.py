"""Jobs from Parquet traces: made-up ones whose truth is known, and the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from chakra_et.stragglers.analyse import find_stragglers
from tests.shared import shared_path
from tests.stragglers.made_job import Key, Made, make_job

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra stragglers)")
PUBLISHED = "data/traces/straggler"


def _slow_worker(step: int, key: Key) -> float:
    return 1.8 if key[:2] == (1, 2) and key[2].endswith("-compute") else 1.0


def _long_last_stage(step: int, key: Key) -> float:
    return 1.5 if key[1] == 3 and key[2].endswith("-compute") else 1.0


def _uneven(step: int, key: Key) -> float:
    """Different for each operation and step, by a formula that has no pattern in common with the job."""
    return 1 + 0.4 * ((hash_of(key) * 31 + step * 17) % 97) / 97


def hash_of(key: Key) -> int:
    rank, stage, optype, number = key
    return rank * 7919 + stage * 104729 + number * 1299709 + sum(map(ord, optype))


LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "one microbatch less than stages": {"microbatches": 3},
    "interleaved": {"vpp": 2},
    "interleaved, three chunks": {"vpp": 3, "pp": 2, "microbatches": 4},
    "overlapped reductions": {"overlap": True},
    "overlapped and interleaved": {"overlap": True, "vpp": 2},
    "two stages": {"pp": 2},
    "data parallel": {"pp": 1, "dp": 4},
    "one data-parallel rank": {"dp": 1},
}


CASES = [(layout, _uneven) for layout in LAYOUTS]
CASES += [("1f1b", _slow_worker), ("1f1b", _long_last_stage), ("overlapped and interleaved", _slow_worker)]


@pytest.mark.parametrize(("layout", "factor"), CASES)
def test_made_up_jobs(tmp_path: Path, layout: str, factor: Callable[[int, Key], float]) -> None:
    made = make_job(**LAYOUTS[layout], factor=factor)
    trace, meta = made.write(tmp_path)
    found = find_stragglers(str(trace), str(meta), threshold=0.0)
    analysis, ideal = found.analysis, made.typical()
    expected = [made.step_time(work) for work in made.works]
    assert list(analysis.step_t_base) == [10, 17, 24]
    assert list(analysis.step_t_nodelay.values()) == pytest.approx(expected, rel=1e-9)
    assert list(analysis.step_t_base.values()) == pytest.approx(expected, rel=1e-4)
    assert list(analysis.step_t_noblk.values()) == pytest.approx([made.step_time(ideal)] * 3, rel=1e-9)
    assert analysis.blocking_slowdown == pytest.approx(fmean(expected) / made.step_time(ideal), rel=1e-9)
    assert analysis.blocking_decompose_by_stage == pytest.approx(
        {stage: made.slowdown(lambda key, x=stage: key[1] == x) for stage in range(made.pp)}, rel=1e-9
    )
    assert analysis.blocking_decompose_by_dp_rank == pytest.approx(
        {rank: made.slowdown(lambda key, x=rank: key[0] == x) for rank in range(made.dp)}, rel=1e-9
    )
    assert analysis.blocking_decompose_by_optype == pytest.approx(_by_optype(made), rel=1e-9)


def _by_optype(made: Made) -> dict[str, float]:
    merged = {
        f"{way}-{side}": f"{way}-pp-comm" for way in ("forward", "backward") for side in ("send", "recv")
    }
    names = {merged.get(key[2], key[2]) for key in made.operations}
    return {name: made.slowdown(lambda key, x=name: merged.get(key[2], key[2]) == x) for name in names}


def test_what_one_slow_worker_costs(tmp_path: Path) -> None:
    """Checked by hand: one microbatch after another on one stage, and the others wait in the reduction."""
    made = make_job(pp=1, dp=4, microbatches=5, factor=lambda step, key: 1.0 + (key[0] == 3))
    trace, meta = made.write(tmp_path)
    found = find_stragglers(str(trace), str(meta))
    # A doubled worker: compute, gc and optimizer of a group have the mean 1.25; communication has the median.
    communication = 0.030 + 0.004 + 0.012 + 0.040 + 0.005
    slow = 5 * 0.6 + 0.002 + 0.100 + communication + 0.004 + 0.030 + 0.012 + 0.040 + 0.005
    ideal = 5 * 0.375 + 0.00125 + 0.0625 + communication
    assert found.analysis.blocking_slowdown == pytest.approx(slow / ideal, rel=1e-6)
    assert found.worst_ranks == [3]
    assert found.worst_workers is not None and found.worst_workers.rem == pytest.approx(1.0, abs=1e-6)


def test_delays_are_the_launch_slowdown(tmp_path: Path) -> None:
    """The third forward begins 0.5 s after what it waited for has ended; all that follows is as late."""
    made = make_job(pp=1, dp=1, microbatches=4, steps=2)
    rows = made.rows()
    late = next(row["start_ts"] for row in rows if row["optype"] == "forward-compute" and row["seq_id"] == 2)
    moved = [row | {"start_ts": row["start_ts"] + (0.5 if row["start_ts"] >= late else 0)} for row in rows]
    trace, meta = made.write(tmp_path, rows=moved)
    analysis = find_stragglers(str(trace), str(meta)).analysis
    step_s = made.step_time(made.works[0])
    slowdown = (step_s + 0.5) / step_s
    assert analysis.launch_slowdown == pytest.approx(slowdown)
    assert analysis.blocking_slowdown == pytest.approx(1.0)
    assert analysis.blocking_decompose_by_optype is None
    by_type = analysis.launch_decompose_by_optype
    assert by_type is not None
    assert by_type.pop("forward-compute") == pytest.approx(slowdown)
    assert set(by_type.values()) == {1.0} and "first-op" in by_type


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_published_jobs(name: str) -> None:
    files = [
        f"trace-{name}.parquet",
        f"meta-{name}.yaml",
        *(f"{kind}-{name}.json" for kind in ("result", "ms", "mw")),
    ]
    folder = shared_path(PUBLISHED, *files)
    expected = json.loads((folder / f"result-{name}.json").read_text())
    found = find_stragglers(str(folder / files[0]), str(folder / files[1]))
    answer = json.loads(json.dumps(found.as_json()))
    for field, wanted in expected.items():
        _compare(field, answer[field], wanted)
    for kind in ("ms", "mw"):
        for field, wanted in json.loads((folder / f"{kind}-{name}.json").read_text()).items():
            _compare(field, answer[kind][field], wanted)


def _compare(name: str, found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), name
        for key in wanted:
            _compare(name, found[key], wanted[key])
    elif isinstance(wanted, float):
        is_time = name.startswith(("step_t", "t"))
        assert found == pytest.approx(wanted, **({"rel": 0.005} if is_time else {"abs": 0.01})), name
    else:
        assert found == wanted, name
