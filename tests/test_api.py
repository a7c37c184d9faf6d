"""``import chakra_et as ce``: what it has, what its tables hold, and that it answers as the commands do."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import chakra_et as ce
from chakra_et.__main__ import main
from chakra_et.names import run_at
from chakra_et.report.times import WHOLE

ROOT = Path(__file__).resolve().parents[1]
CAPTURE = ROOT / "tests/fixtures/captures/torch-2.13"

# A change here is one that programs notice: it belongs into CHANGELOG.md.
FROZEN = """\
convert(traces: str | os.PathLike[str], output: str | os.PathLike[str] = "", **flags: Any) -> list[SetResult]
load(name: str | os.PathLike[str]) -> Job
predict(job: Job, **flags: Any) -> Prediction
Job.changes: tuple[Change | Rebuild, ...]
Job.collectives: Table
Job.critical_path: Table
Job.edges: Table
Job.kernel_classes: Table
Job.kernels: Table
Job.measured: ReportRun
Job.name: str
Job.nodes: Table
Job.notes: list[str]
Job.operators: Table
Job.prediction: Prediction
Job.ranks: list[int]
Job.run: Run
Job.save(prefix: str | os.PathLike[str]) -> list[Path]
Job.scale(*, dp: int | None = None, tp: int | None = None, pp: int | None = None, layers: int | str = "", \
batch: int | str = "", seq: int | str = "", mesh: str = "") -> Job
Job.shown: ReportRun
Job.steps: Table
Job.what_if(**flags: Any) -> Job
Job.with_network(topology: str | None = None, *, bandwidth: str | None = None, latency: str | None = None) \
-> Job
Table.arrow() -> Any
Table.pandas() -> Any
Table.rows() -> list[dict[str, Any]]
"""
COLUMNS = {
    "nodes": "rank id name kind row start_ns duration_ns wait_ns phase module parent comm_type comm_group "
    "on_critical_path stream num_ops tensor_size comm_size comm_src comm_dst comm_tag",
    "edges": "rank source target kind",
    "operators": "kind name count self_ns longest_ns device_ns per_second bytes_per_second work "
    "of_peak times_usual",
    "kernels": "kind name count self_ns longest_ns device_ns per_second bytes_per_second work "
    "of_peak times_usual",
    "kernel_classes": "kind count time_ns share per_second bytes_per_second of_peak times_usual",
    "collectives": "type bytes group ranks count transfer_ns algorithm bus usual_bus skew_ns "
    "longest_skew_ns last_rank",
    "steps": "rank name start_ns end_ns hidden_ns replayed_ns compute_ns memory_ns communication_ns wait_ns "
    "host_ns idle_ns forward_ns backward_ns optimizer_ns",
    "critical_path": "rank id name kind from_ns to_ns",
}


def signatures() -> str:
    from chakra_et import api

    lines = [
        f"{name}{inspect.signature(getattr(api, name))}"
        for name in ce.__all__
        if name in ("convert", "load", "predict")
    ]
    for kind in (ce.Job, ce.Table):
        members = dict(vars(kind)) | dict.fromkeys(vars(kind).get("__dataclass_fields__", ()))
        for name, member in sorted(members.items()):
            if name.startswith("_"):
                continue
            if member is None or name in vars(kind).get("__dataclass_fields__", ()):
                lines.append(f"{kind.__name__}.{name}: {kind.__annotations__[name]}")
            elif isinstance(member, (property, cached_property)):
                get = member.fget if isinstance(member, property) else member.func
                lines.append(f"{kind.__name__}.{name}: {inspect.signature(get).return_annotation}")
            else:
                shown = str(inspect.signature(member)).replace("(self, ", "(").replace("(self)", "()")
                lines.append(f"{kind.__name__}.{name}{shown}")
    return "\n".join(lines).replace("= ''", '= ""').replace("'", "") + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for path in CAPTURE.glob("tiny_2gpu_*"):
        shutil.copy(path, folder)
    (result,) = ce.convert(folder)
    assert not result.failed and result.prefix == folder / "tiny_2gpu"
    return folder


@pytest.fixture(scope="module")
def job(folder: Path) -> ce.Job:
    return ce.load(folder / "tiny_2gpu")


def test_what_programs_may_use_is_frozen() -> None:
    assert ce.__all__ == ["ChakraTracer", "Job", "Table", "TraceError", "convert", "load", "predict"]
    assert signatures() == FROZEN


REFERENCE = (ROOT / "docs/REFERENCE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", re.findall(r"^::: ([a-z_.]+)$", REFERENCE, re.MULTILINE))
def test_a_public_module_opens_with_an_example_that_runs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module(name)
    example = re.match(r".+\n\n((?:    .+\n|\n)+)", module.__doc__ or "")
    assert example and len(example[1].strip().splitlines()) >= 2, "no two lines of its use"
    if name in ("chakra_et.capture.tracer", "fasop.api"):
        return  # what trains, and what searches for a minute: by the tests of these packages
    shutil.copytree(folder, tmp_path / "outputs")
    for path in (tmp_path / "outputs").glob("tiny_2gpu*"):
        path.rename(path.with_name(path.name.replace("tiny_2gpu", "gpt2_2gpu_quick_trace")))
    monkeypatch.chdir(tmp_path)
    names = {"chakra_et": ce, "contextlib": contextlib, "json": json, "run_at": run_at}
    exec(textwrap.dedent(example[1]), vars(module) | names)


def test_the_import_is_quick_and_loads_nothing_else() -> None:
    code = (
        "import sys, chakra_et; print(sorted({'numpy', 'msgspec', 'torch', 'argparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_tool_chain_stands_without_the_planner() -> None:
    used = [
        path
        for path in (ROOT / "chakra_et").rglob("*.py")
        if re.search(r"(import|from) fasop", path.read_text())
    ]
    assert not used


def test_a_package_stays_one_where_it_is_called() -> None:
    from chakra_et.predict.predict import bounds

    assert callable(ce.predict) and callable(ce.convert) and callable(bounds)
    assert sys.modules["chakra_et.predict"] is ce.predict


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_the_tables(job: ce.Job, name: str) -> None:
    table = getattr(job, name)
    assert list(table.columns) == COLUMNS[name].split()
    assert len({len(column) for column in table.columns.values()}) == 1
    assert len(table) > 0 or name.startswith("kernel")  # a CPU run has none


def test_the_tables_agree_with_each_other_and_with_the_files(job: ce.Job, folder: Path) -> None:
    written = json.loads((folder / "tiny_2gpu_conversion.json").read_text())["ranks"]
    assert len(job.nodes) == sum(rank["nodes"] for rank in written.values())
    assert len(job.edges) == sum(rank["edges"] for rank in written.values())
    path = job.critical_path
    assert path["from_ns"][1:] == path["to_ns"][:-1]
    assert sum(job.nodes["on_critical_path"]) == len(set(zip(path["rank"], path["id"], strict=True)))
    for kind in set(job.collectives["type"]):
        rows = [row for row in job.collectives.rows() if row["type"] == kind]
        assert sum(row["count"] * row["ranks"] for row in rows) == job.nodes["comm_type"].count(kind)
    for step in job.steps.rows():
        parts = ("compute", "memory", "communication", "wait", "host", "idle")
        assert sum(step[f"{part}_ns"] for part in parts) == step["end_ns"] - step["start_ns"]
        assert step["name"] != WHOLE


def test_it_says_what_it_is(job: ce.Job) -> None:
    assert repr(job.scale(dp=4)).startswith("Job(tiny_2gpu: 4 ranks, ")
    assert repr(job.steps) == f"Table({len(job.steps)} rows: {', '.join(COLUMNS['steps'].split())})"


def test_frames(job: ce.Job) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    nodes = job.nodes
    arrow = pyarrow.table(nodes)
    assert arrow.num_rows == len(nodes) and arrow.column_names == list(nodes.columns)
    assert nodes.pandas()["duration_ns"].sum() == sum(nodes["duration_ns"])
    other = pandas.api.interchange.from_dataframe(job.operators)
    assert other["self_ns"].tolist() == job.operators["self_ns"]


def test_polars(job: ce.Job) -> None:
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(job.nodes)["duration_ns"].sum() == sum(job.nodes["duration_ns"])


def test_a_prediction_is_that_of_the_command(
    job: ce.Job, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dp", "4", "--bandwidth", "1Gbit/s", "--scale", "aten::mm=0.5"]
    assert main(["predict", str(folder / job.name), *flags, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    predicted = ce.predict(job.scale(dp=4).with_network(bandwidth="1Gbit/s"), scale=("aten::mm=0.5",))
    assert [rank.after_ns / 1e3 for rank in predicted.ranks] == [rank["after_us"] for rank in said["ranks"]]
    assert len(predicted.ranks) == 4 and predicted.after_ms != predicted.before_ms


def test_a_changed_job_shows_what_is_predicted(job: ce.Job, tmp_path: Path) -> None:
    faster = job.what_if(scale=("aten::addmm=0.25",))
    assert job.changes == () and job.shown is job.measured
    before, after = (
        sum(row["self_ns"] for row in each.operators.rows() if row["name"] == "aten::addmm")
        for each in (job, faster)
    )
    assert after == pytest.approx(before / 4, rel=0.05)
    saved = faster.save(tmp_path / "faster")
    assert [path.name for path in saved] == ["faster.0.et", "faster.1.et"]
    again = ce.load(tmp_path / "faster")
    assert again.nodes["duration_ns"] == faster.nodes["duration_ns"]
    with pytest.raises(ce.TraceError, match="is there already"):
        faster.save(tmp_path / "faster")


def test_another_topology_fits_the_scaled_job(job: ce.Job) -> None:
    network = "4 ranks, 10 Gbit/s, 30 us"
    assert ce.predict(job.scale(dp=4).with_network(network)).after_ms > 0
    with pytest.raises(ce.TraceError, match="they must agree"):
        ce.predict(job.with_network(network))


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"dp": 0}, "use 1 to"), ({"dpp": 3}, "dpp"), ({"bandwidth": "100"}, "unit"), ({"scale": ("x",)}, "x")],
)
def test_unusable_changes_are_one_sentence(job: ce.Job, flags: dict, words: str) -> None:
    with pytest.raises(ce.TraceError, match=words):
        job.what_if(**flags)
    with pytest.raises(ce.TraceError):
        ce.load(ROOT / "nowhere")


def test_traces_are_loaded_without_a_file_being_written(tmp_path: Path) -> None:
    for path in CAPTURE.glob("tiny_1gpu_*"):
        shutil.copy(path, tmp_path)
    before = sorted(tmp_path.iterdir())
    assert np.array(ce.load(tmp_path).nodes["duration_ns"]).sum() > 0
    assert sorted(tmp_path.iterdir()) == before
