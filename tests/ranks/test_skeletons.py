"""Skeletons give joint questions the answers that the whole ranks give, from fewer nodes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.gains import Faster
from chakra_et.diagnose.node_classes import COMMUNICATION, HOST, ON_DEVICE, node_classes
from chakra_et.diagnose.verdict import diagnose
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.sets import find_rank_sets
from chakra_et.predict.predict import predict
from chakra_et.ranks.contract import contract
from chakra_et.simulate.run import Run, make_run
from chakra_et.stragglers.analyse import find_stragglers
from chakra_et.transform.changes import Change
from chakra_et.transform.durations import Overlap, RankAs
from chakra_et.transform.network import Network
from tests.convert.test_together import Machine
from tests.shared import shared_path

CLOSE = 1e-3
FIXTURES = Path(__file__).parents[1] / "fixtures"
CLASSES = {"device": ON_DEVICE, "host": (HOST,), "network": (COMMUNICATION,)}


def converted(traces: Path, output: Path, *flags: str) -> str:
    """The NAME of the run, converted with skeletons."""
    assert main(["convert", str(traces), "-o", str(output), "--skeletons", "on", *flags]) == 0
    (name,) = {path.name.rsplit(".", 2)[0] for path in output.glob("*.[0-9]*.et")}
    return str(output / name)


@pytest.fixture(scope="module", params=["dlrm_8gpu", "gloo", "64 ranks"])
def name(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    if request.param == "dlrm_8gpu":
        return converted(shared_path("data") / "traces" / "dlrm_8gpu", folder)
    if request.param == "gloo":
        return converted(FIXTURES / "gloo_coalesced", folder, "--name", "both")
    noise = random.Random(1)
    work = [[noise.uniform(200, 900) * (1 + (rank == 5)) for _ in range(4)] for rank in range(64)]
    (folder / "traces").mkdir()
    return converted(Machine(work, [0.0] * 64).write(folder / "traces"), folder)


@pytest.fixture(scope="module")
def runs(name: str) -> tuple[Run, Run]:
    return load_run(name, skeletons="off"), load_run(name, skeletons="on")


def test_skeletons_are_smaller_and_start_communication_at_the_same_times(runs: tuple[Run, Run]) -> None:
    full, skeleton = runs
    assert len(skeleton.graph) < 0.8 * len(full.graph)
    starts = [run.start_ns[run.is_communication] for run in runs]
    assert len(starts[0]) and np.array_equal(*starts)
    assert full.end_ns.max() == skeleton.end_ns.max()
    spent = [np.bincount(run.kind, run.graph.own_ns, 8) for run in runs]
    assert np.array_equal(*spent), "the time of each kind stays"


@pytest.mark.parametrize("factor", [0.5, 0.7, 10.0])
@pytest.mark.parametrize("of", CLASSES)
def test_scaled_work_takes_what_it_takes_on_whole_ranks(
    of: str, factor: float, runs: tuple[Run, Run]
) -> None:
    after = []
    for run in runs:
        change = Faster(np.isin(node_classes(run), CLASSES[of]), factor)
        after.append([rank.after_ns for rank in predict(run, [change], explain=False).ranks])
    assert after[1] == pytest.approx(after[0], rel=CLOSE)


@pytest.mark.parametrize("change", [Network(bandwidth=1e8), Network(latency_ns=1e5), Overlap(), RankAs(1)])
def test_what_ifs_answer_as_on_whole_ranks(change: Change, runs: tuple[Run, Run]) -> None:
    answers = []
    for run in runs:
        try:
            found = predict(run, [change], explain=False)
            answers.append([rank.after_ns for rank in found.ranks])
        except TraceError:
            answers.append([])
    # Medians over the ranks are of segments, not of their operators.
    close = 0.03 if isinstance(change, RankAs) else CLOSE
    assert answers[1] == pytest.approx(answers[0], rel=close)


def test_stragglers_and_diagnosis_are_those_of_whole_ranks(name: str, runs: tuple[Run, Run]) -> None:
    full, skeleton = (find_stragglers(name, skeletons=each) for each in ("off", "on"))
    assert skeleton.blocking_slowdown == pytest.approx(full.blocking_slowdown, rel=CLOSE)
    assert skeleton.launch_slowdown == pytest.approx(full.launch_slowdown, rel=CLOSE)
    assert skeleton.job_meta == full.job_meta
    assert list(skeleton.worker_slowdown or {})[:1] == list(full.worker_slowdown or {})[:1]
    was, found = (diagnose(run) for run in runs)
    assert found.bound == was.bound
    if was.slow_rank_gain > 0.05:  # medians of segments aren't quite those of their operators
        assert found.slow_rank == was.slow_rank
        assert found.slow_rank_gain == pytest.approx(was.slow_rank_gain, abs=0.01)
    assert found.step_ms == pytest.approx(was.step_ms, rel=CLOSE)


def test_skeletons_answer_where_the_ranks_have_gone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "traces").mkdir()
    traces = Machine([[300.0] * 3, [500.0] * 3], [0.0] * 2).write(tmp_path / "traces")
    run = Path(converted(traces, tmp_path))
    listed = json.loads((tmp_path / f"{run.name}_conversion.json").read_text())["skeletons"]
    assert [entry["ranks"] for entry in listed] == [[0], [1]]
    for path in tmp_path.glob("*.et"):
        path.unlink()
    capsys.readouterr()
    assert main(["replay", str(run), "--semantics", "device"]) == 0
    assert "read from the skeletons of 2 ranks" in capsys.readouterr().out
    with pytest.raises(TraceError, match="neither a file nor"):
        find_rank_sets([str(run)])
    tmp_path.joinpath(f"{run.name}.1.skeleton.parquet").write_bytes(b"PAR1")
    with pytest.raises(TraceError, match="isn't the file that the conversion wrote"):
        load_run(str(run))
    with pytest.raises(TraceError, match="isn't the skeleton of a rank"):
        load_run(str(run), allow_missing=True)


def test_a_conversion_without_skeletons_removes_older_ones(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    traces = Machine([[300.0] * 3, [500.0] * 3], [0.0] * 2).write(tmp_path / "traces")
    converted(traces, tmp_path)
    assert main(["convert", str(traces), "-o", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize("library", ["pyarrow", "duckdb", "polars"])
def test_libraries_read_the_table(library: str, name: str) -> None:
    module = pytest.importorskip("pyarrow.parquet" if library == "pyarrow" else library)
    path = f"{name}.0.skeleton.parquet"
    expected = contract(et_file.read(f"{name}.0.et"))
    if library == "duckdb":
        query = f"SELECT count(*), sum(duration_micros) FROM '{path}'"
        count, micros = module.sql(query).fetchall()[0]
    else:
        table = module.read_table(path) if library == "pyarrow" else module.read_parquet(path)
        count, micros = len(table), sum(table["duration_micros"].to_pylist()) if library == "pyarrow" else (
            table["duration_micros"].sum()
        )  # fmt: skip
    assert (count, micros) == (len(expected), int(expected.duration_micros.sum()))


def test_a_rank_alone_keeps_its_longest_path(name: str) -> None:
    trace = et_file.read(f"{name}.0.et")
    full, skeleton = (make_run("", [each], [0]) for each in (trace, contract(trace)))
    assert full.end_ns.max() == skeleton.end_ns.max()
    assert [steps.names for steps in full.steps] == [steps.names for steps in skeleton.steps]
