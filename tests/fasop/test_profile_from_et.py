"""``profile --from-et`` on real captures: passes of accumulated gradients, and models that it must accept."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import Attribute, Strings
from fasop.commands import profile
from fasop.errors import PlanError
from fasop.inputs.models import Model
from fasop.profiling.from_traces import Attributed, attribute

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
TINY = Model("tiny", hidden=64, seq=32, layers=2, vocab=1000, heads=4, global_batch=8)
GROUPED = replace(TINY, kv_heads=2, ffn=96, gated=True)
BERT = replace(TINY, causal=False)
MODELS = {"gpt2": TINY, "gpt2-accumulated": TINY, "bert": BERT, "llama": GROUPED}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures")
    for command in (
        ["tests/fasop/small_captures.py", str(folder)],
        ["convert_to_et.py", "--dir", str(folder)],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_model_that_was_captured_is_accepted(name: str, captures: Path) -> None:
    found = attribute(MODELS[name], [captures / f"{name}.0.et"], mbs=2)
    assert found.micro_batches == (4 if name == "gpt2-accumulated" else 1)
    assert min(found.forward.layer, found.backward.layer) > 0
    parts = (sum(found.forward) + sum(found.backward)) * found.micro_batches + found.unattributed
    assert parts == pytest.approx(found.total)
    assert any("no layer" in note for note in found.notes) == (name == "bert"), "the product before its head"


@pytest.mark.parametrize(
    "name, model, message",
    [
        ("llama", replace(GROUPED, kv_heads=4), "multiply by 61440 weights, those of the model by 69632"),
        ("llama", replace(GROUPED, gated=False), "those of the model by 49152"),
        ("llama", replace(GROUPED, experts=4), "or of layers with experts, can't be taken from traces"),
        ("gpt2-accumulated", replace(TINY, layers=1), "those of the model by 49152"),
    ],
)
def test_another_kind_of_layer_is_refused(name: str, model: Model, message: str, captures: Path) -> None:
    with pytest.raises(PlanError, match=message):
        attribute(model, [captures / f"{name}.0.et"], mbs=2)


def of_one_microsecond_each(path: Path, folder: Path) -> Attributed:
    """Counts of operators, which are free of a machine's noise."""
    trace = et_file.read(path)
    file = folder / path.name
    et_file.write(file, replace(trace, duration_micros=np.ones_like(trace.duration_micros)))
    return attribute(TINY, [file], mbs=2)


def test_accumulated_gradients_are_timed_per_micro_batch(captures: Path, tmp_path: Path) -> None:
    one, four = (
        of_one_microsecond_each(captures / f"{name}.0.et", tmp_path) for name in ("gpt2", "gpt2-accumulated")
    )
    assert four.forward.layer == pytest.approx(one.forward.layer, rel=0.01)
    assert four.forward.head == pytest.approx(one.forward.head, rel=0.01)
    assert four.backward.layer == pytest.approx(one.backward.layer, rel=0.1), (
        "three of four passes add gradients"
    )
    assert four.unattributed < 2 * one.unattributed, "one optimizer per step"


def test_layers_missing_from_a_later_pass_are_refused(captures: Path, tmp_path: Path) -> None:
    trace = et_file.read(captures / "gpt2-accumulated.0.et")
    assert trace.inputs is not None
    products = [
        at
        for at, row in enumerate(trace.inputs.rows.tolist())
        if trace.names[row] == "aten::addmm" and b"[64,256]" in trace.inputs.shapes[at]
    ]
    shapes = list(trace.inputs.shapes)
    shapes[products[-1]] = b"[]"
    et_file.write(tmp_path / "t.et", replace(trace, inputs=replace(trace.inputs, shapes=shapes)))
    with pytest.raises(PlanError, match="its layers multiply by 96256 weights"):
        attribute(TINY, [tmp_path / "t.et"], mbs=2)


def without_backward(path: Path, file: Path, passes: int) -> Path:
    """A copy of a trace without the first backward passes."""
    trace = et_file.read(path)
    assert trace.inputs is not None
    lookups = [
        trace.start_micros[row]
        for row, shapes in zip(trace.inputs.rows.tolist(), trace.inputs.shapes, strict=True)
        if trace.names[row] == "aten::embedding" and shapes.startswith(b"[[1000,64],[2,32]")
    ]
    end = [*lookups, np.inf][passes]
    phase = trace.attributes["phase"]
    kept = np.array([phase.values[at] != "backward" for at in range(len(phase.rows))])
    kept |= trace.start_micros[phase.rows] > end
    assert isinstance(phase.values, Strings)
    values = Strings(phase.values.table, phase.values.index[kept])
    attributes = trace.attributes | {"phase": Attribute(phase.kind, phase.rows[kept], values)}
    et_file.write(file, replace(trace, attributes=attributes))
    return file


@pytest.mark.parametrize(
    "passes, message",
    [
        (1, "looks tokens up 4 times, of which 3 are followed by a backward pass"),
        (8, "no backward pass found"),
    ],
)
def test_forward_passes_without_a_backward_pass_are_refused(
    passes: int, message: str, captures: Path, tmp_path: Path
) -> None:
    file = without_backward(captures / "gpt2-accumulated.0.et", tmp_path / "t.et", passes)
    with pytest.raises(PlanError, match=message):
        attribute(TINY, [file], mbs=2)


def test_the_example_of_the_help_is_the_quick_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = str(profile.__doc__)
    command = re.search(r"python -m fasop (profile [^\n]*quick.yaml.*?costs.json)", text.replace("\\\n", " "))
    assert command is not None
    (tmp_path / "quick.yaml").write_text(text[text.index("models:") :])
    arguments = shlex.split(command.group(1))[1:]
    taken: dict[str, object] = {}

    def from_traces(model: Model, paths: list[Path], name: str, tp: int, mbs: int) -> None:
        taken.update(model=model, mbs=mbs)
        raise PlanError("taken")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile, "from_traces", from_traces)
    with pytest.raises(PlanError, match="taken"):
        profile.main(arguments)
    config = transformers.GPT2Config()
    model = taken["model"]
    assert isinstance(model, Model)
    assert (model.hidden, model.layers, model.heads, model.vocab) == (
        *(config.n_embd, config.n_layer, config.n_head),
        config.vocab_size,
    )
    lines = re.findall(r"--batch-size (\d+) --max-seq-length (\d+)", (ROOT / "scripts/jobs.sh").read_text())
    assert (str(taken["mbs"]), str(model.seq)) in lines
