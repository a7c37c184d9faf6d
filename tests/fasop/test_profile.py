"""``profile``: costs measured on this CPU, and costs divided out of our own traces."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import planner_measured
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import Strings
from fasop.__main__ import main
from fasop.errors import PlanError
from fasop.inputs.costs import read_costs
from fasop.inputs.models import Model, find_model
from fasop.profiling.from_traces import attribute
from fasop.profiling.measure import Runs, measured

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "tests" / "fixtures" / "captures" / "torch-2.13"
MODELS = """
models:
  tiny: {hidden: 64, seq: 32, layers: 4, vocab: 1000, heads: 4, global_batch: 8}
  captured: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 2, global_batch: 8}
  wider: {hidden: 128, seq: 32, layers: 1, vocab: 1000, heads: 2, global_batch: 8}
  longer: {hidden: 64, seq: 64, layers: 1, vocab: 1000, heads: 2, global_batch: 8}
  deeper: {hidden: 64, seq: 32, layers: 2, vocab: 1000, heads: 2, global_batch: 8}
  fewer_heads: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 1, global_batch: 8}
  wide_heads: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 2, d_kv: 64, global_batch: 8}
  grouped: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 2, kv_heads: 1, global_batch: 8}
  gated: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 2, ffn: 128, gated: true, global_batch: 8}
  gated_wide: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 2, ffn: 256, gated: true, global_batch: 8}
  routed: {hidden: 64, seq: 32, layers: 1, vocab: 1000, heads: 2, experts: 8, global_batch: 8}
  two_halves: {hidden: 64, seq: 32, layers: 2, encoder_layers: 1, vocab: 1000, heads: 2, global_batch: 8}
  padded: {hidden: 64, seq: 32, layers: 1, vocab: 950, heads: 2, global_batch: 8}
  too_padded: {hidden: 64, seq: 32, layers: 1, vocab: 872, heads: 2, global_batch: 8}
  wordier: {hidden: 64, seq: 32, layers: 1, vocab: 30522, heads: 2, global_batch: 8}
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "models.yaml").write_text(MODELS)
    return str(tmp_path / "models.yaml")


def test_costs_of_this_cpu_can_be_planned_with(tmp_path: Path, models: str) -> None:
    pytest.importorskip("torch")
    file = str(tmp_path / "costs.json")
    arguments = ["profile", "--model", "tiny", "--models-file", models, "--device", "cpu", "--tp", "1", "2"]
    assert main([*arguments, "--mbs", "1", "2", "--repeat", "3", "--warmup", "1", "--output", file]) == 0
    costs = read_costs(file)
    assert [(entry.tp, entry.mbs) for entry in costs.entries] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for entry in costs.entries:
        assert len(entry.forward) == 6 and min(entry.forward) > 0 and min(entry.backward or ()) > 0
        assert entry.forward[1] == entry.forward[4], "all layers are alike"
        assert entry.update is not None and entry.update[0] > 0 and entry.update[1] == entry.update[4]
    (tmp_path / "cluster.yaml").write_text(
        "clusters: {here: {gpus_per_node: 2, gpus: {CPU: {nodes: 1, memory_gib: 4, price_per_hour: 1,"
        " inter_bandwidth: 1e9, intra_bandwidth: 1e10}}}}"
    )
    plan = ["plan", "--model", "tiny", "--models-file", models, "--cluster", str(tmp_path / "cluster.yaml")]
    assert main([*plan, "--costs", file]) == 0


def test_layers_with_few_heads_of_keys_and_a_gate_were_measured_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    shapes = set()

    class Linear(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self, rows: int, columns: int, **settings: object) -> None:
            shapes.add((rows, columns))
            super().__init__(rows, columns, **settings)

    monkeypatch.setattr(torch.nn, "Linear", Linear)
    model = Model("tiny", 64, 32, 1, 1000, 4, 8, kv_heads=2, ffn=96, gated=True)
    measured(model, (1, 2), (1,), Runs("cpu", "float32", 0, 1))
    assert shapes == {(64, 128), (64, 64), (64, 192), (96, 64), (64, 1000), *((64, 64), (32, 64), (64, 96)),
                      *((48, 64), (64, 500))}  # fmt: skip
    with pytest.raises(PlanError, match="layers with experts"):
        measured(replace(model, experts=4), (1,), (1,), Runs("cpu", "float32"))


def test_what_can_not_be_measured(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    base = ["profile", "--models-file", models, "--device", "cpu", "--model"]
    assert main([*base, "tiny", "--tp", "3"]) == 2
    assert "4 heads can't be shared by so many; 1, 2, 4 fit" in capsys.readouterr().err
    assert main(["profile", "--model", "t5", "--device", "cpu"]) == 2
    assert main([*base, "none"]) == 2
    assert main([*base, "tiny", "--from-et", "nowhere.et"]) == 2
    assert "nowhere.et" in capsys.readouterr().err
    for flags in (["--repeat", "0"], ["--precision", "int4"], ["--device", "tpu"]):
        with pytest.raises(SystemExit):
            main([*base, "tiny", *flags])


def test_plans_by_the_costs_of_an_h200_take_what_its_steps_took() -> None:
    """Measured by scripts/gpu_check.sh; another program's layers, of which the costs know nothing."""
    found = planner_measured.errors(ROOT / "benchmarks" / "data" / "h200")
    assert len(found) == 9
    for name, mbs, step, planned, gib, planned_gib in found:
        assert planned == pytest.approx(step, rel=0.025), (name, mbs)
        # The smallest model's logits leave holes in PyTorch's memory.
        assert planned_gib == pytest.approx(gib, rel=0.05 if name != "gpt2-345m" else 0.1), (name, mbs)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .et file of a capture of one rank."""
    tmp_path = tmp_path_factory.mktemp("capture")
    for path in CAPTURES.glob("tiny_1gpu*"):
        if path.suffix == ".gz":
            (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.name.endswith("manifest.json"):
            shutil.copy(path, tmp_path)
    command = [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    return tmp_path / "tiny_1gpu.0.et"


def test_costs_divided_out_of_a_trace_add_up(trace: Path, models: str, tmp_path: Path) -> None:
    model = find_model("captured", models)
    found = attribute(model, [trace], mbs=2)
    assert found.micro_batches == 1
    parts = sum(found.forward) + sum(found.backward) + found.unattributed
    assert parts == pytest.approx(found.total) and found.total > 0
    assert min(*found.forward, *found.backward) > 0 and found.unattributed < found.total / 2
    assert found.backward.layer > found.forward.layer / 2
    file = str(tmp_path / "costs.json")
    arguments = ["profile", "--model", "captured", "--models-file", models, "--from-et", str(trace)]
    arguments += ["--mbs", "2"]
    assert main([*arguments, "--gpu-name", "CPU", "--output", file]) == 0
    (entry,) = read_costs(file).entries
    assert entry.gpu == "CPU"
    assert sum(entry.forward) + sum(entry.backward or ()) == pytest.approx(found.total - found.unattributed)


def test_traces_without_times_or_of_another_converter_are_refused(
    trace: Path, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trace.parent, tmp_path / "untimed")
    (folder / trace.name).unlink()
    command = [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", str(folder), "--no-timestamps"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    base = ["profile", "--models-file", models, "--model", "captured", "--from-et"]
    assert main([*base, str(folder / trace.name)]) == 2
    assert "convert without --no-timestamps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, message",
    [
        ("wider", "its hidden is 64, the model's 128"),
        ("longer", "its seq is 32, the model's 64"),
        ("deeper", "its layers multiply by 49152 weights, those of the model by 98304 on each of 1"),
        ("wordier", "1000 rows on each of 1 tensor-parallel ranks"),
        ("wide_heads", "those of the model by 65536"),
        ("grouped", "those of the model by 45056"),
        ("gated", "those of the model by 40960"),
        ("gated_wide", "those of the model by 65536"),
        ("routed", "or of layers with experts, can't be taken"),
        ("two_halves", "costs of an encoder-decoder, or"),
        ("too_padded", "1000 rows on each of 1 tensor-parallel ranks, the model's vocabulary 872"),
        ("captured", "its micro-batches have 2 sequences: give --mbs 2"),
    ],
)
def test_a_trace_of_another_model_is_refused(
    name: str, message: str, trace: Path, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mbs = "1" if name == "captured" else "2"
    base = ["profile", "--models-file", models, "--model", name, "--mbs", mbs, "--from-et", str(trace)]
    assert main(base) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "what, message", [("aten::embedding", "no embedding in it"), ("aten::addmm", "layers")]
)
def test_a_part_of_a_pipeline_is_named(
    what: str, message: str, trace: Path, models: str, tmp_path: Path
) -> None:
    read = et_file.read(trace)
    names = [b"other" if read.names[row] == what else read.names[row].encode() for row in range(len(read))]
    part = replace(read, names=Strings(names, np.arange(len(read))))
    file = tmp_path / trace.name
    et_file.write(file, part)
    with pytest.raises(PlanError, match=message):
        attribute(find_model("captured", models), [file], 1, 2)


def test_a_padded_vocabulary_and_what_is_not_shown_are_noted(trace: Path, models: str) -> None:
    notes = attribute(find_model("padded", models), [trace], mbs=2).notes
    assert "50 rows of its embedding are taken as padding of the vocabulary." in notes
    assert any("Not checked" in note and "tied, causal, heads and kv_heads" in note for note in notes)


def test_ranks_of_several_runs_are_refused(trace: Path, models: str, tmp_path: Path) -> None:
    model, read = find_model("captured", models), et_file.read(trace)
    for name, rank, world in (("a", 0, 2), ("b", 1, 2), ("c", 1, 4)):
        metadata = read.metadata | {"rank": rank, "world_size": world}
        et_file.write(tmp_path / f"{name}.et", replace(read, metadata=metadata))
    a, b, c = (tmp_path / f"{name}.et" for name in "abc")
    assert not any("ranks are given" in note for note in attribute(model, [a, b], mbs=2).notes)
    assert "1 of the run's 2 ranks are given, and taken for all." in attribute(model, [b], mbs=2).notes
    with pytest.raises(PlanError, match="c.et: rank 1 of 4: give each rank of one run once"):
        attribute(model, [a, c], mbs=2)
    with pytest.raises(PlanError, match="b.et: rank 1 of 2: give each rank"):
        attribute(model, [b, b], mbs=2)


def test_a_changed_file_of_a_run_is_refused(trace: Path, models: str, tmp_path: Path) -> None:
    """Every command that reads runs refused it but this."""
    file = shutil.copytree(trace.parent, tmp_path / "run") / trace.name
    et_file.write(file, replace(et_file.read(file), metadata={"rank": 0, "world_size": 1}))
    with pytest.raises(TraceError, match="isn't the file that the conversion wrote"):
        attribute(find_model("captured", models), [file], mbs=2)


@pytest.mark.parametrize("flags", [["--tp", "1", "2"], ["--mbs", "2", "4"]])
def test_several_degrees_for_one_trace_are_refused(
    flags: list[str], models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", "--models-file", models, "--model", "captured", "--from-et", "a.et", *flags])
    assert stopped.value.code == 2 and "--from-et" in capsys.readouterr().err


@pytest.mark.parametrize("output, message", [("none/costs.json", "No such file"), (".", "is a folder")])
def test_an_output_that_can_not_be_written_is_refused_before_measuring(
    output: str,
    message: str,
    models: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fasop.commands.profile.measured", lambda *_: pytest.fail("measured first"))
    arguments = ["profile", "--models-file", models, "--model", "tiny", "--device", "cpu"]
    assert main([*arguments, "--output", str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["models.yaml"]
