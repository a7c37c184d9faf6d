"""The callbacks for Hugging Face's Trainer and PyTorch Lightning, and a loop of Accelerate, all real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trace_reading import load

from chakra_et.capture.check import inspect_pair

ROOT = Path(__file__).resolve().parents[2]


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), float(index)), "labels": torch.tensor(1.0)}


class Net(torch.nn.Module):
    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.layer, self.calls, self.fail_at = torch.nn.Linear(8, 1), 0, fail_at

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("the loss is not a number")
        return {"loss": ((self.layer(x).squeeze(-1) - labels) ** 2).mean()}


def hugging_face(folder: Path, accumulation: int = 1, fail_at: int = -1, max_steps: int = 6):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from chakra_et.capture.huggingface import ChakraCallback

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=max_steps,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = ChakraCallback(folder / "out", "hf", wait_steps=1, warmup_steps=1, active_steps=2)
    return transformers.Trainer(Net(fail_at), arguments, train_dataset=Data(), callbacks=[callback]), callback


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hugging_face_trainer_is_traced_by_optimizer_steps(accumulation, tmp_path):
    trainer, _ = hugging_face(tmp_path, accumulation)
    trainer.train()
    host = tmp_path / "out" / "hf_host.json"
    assert inspect_pair(host, tmp_path / "out" / "hf_device.json", 2).problems == []
    names = [node["name"] for node in load(host)["nodes"]]
    # The observer runs in one step only.
    assert names.count("Optimizer.step#AdamW.step") == 1
    assert names.count("aten::linear") == accumulation
    manifest = load(tmp_path / "out" / "hf_manifest.json")
    assert manifest["complete"] and manifest["ranks"][0]["steps"] == [2, 3]
    assert (manifest["run"]["model"], manifest["run"]["parameters"]) == ("Net", 9)
    assert manifest["run"]["config"]["gradient_accumulation_steps"] == accumulation


@pytest.mark.slow
def test_hugging_face_trainer_that_ends_early_or_fails(tmp_path):
    trainer, _ = hugging_face(tmp_path / "early", max_steps=3)
    trainer.train()
    manifest = load(tmp_path / "early" / "out" / "hf_manifest.json")
    assert manifest["reason"] == "rank 0: training ended after 1 of 2 active steps"

    # The Trainer tells a callback nothing of an exception: the trace is finished when the process ends.
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "from pathlib import Path; from test_callbacks import hugging_face\n"
        f"hugging_face(Path({str(tmp_path)!r}), fail_at=4)[0].train()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the loss is not a number" in done.stderr
    assert not load(tmp_path / "out" / "hf_manifest.json")["complete"]
    assert (
        inspect_pair(tmp_path / "out" / "hf_host.json", tmp_path / "out" / "hf_device.json", 2).problems == []
    )


def lightning_trainer(folder: Path, fail_at: int = -1, accumulation: int = 1):
    pl = pytest.importorskip("pytorch_lightning")
    from chakra_et.capture.lightning import ChakraCallback

    class Module(pl.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(fail_at)

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    trainer = pl.Trainer(
        max_steps=6,
        accumulate_grad_batches=accumulation,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ChakraCallback(folder, "pl", wait_steps=1, warmup_steps=1, active_steps=2)],
    )
    return trainer, Module(), torch.utils.data.DataLoader(Data(), batch_size=4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_lightning_is_traced_by_optimizer_steps(accumulation, tmp_path):
    trainer, module, data = lightning_trainer(tmp_path, accumulation=accumulation)
    trainer.fit(module, data)
    assert inspect_pair(tmp_path / "pl_host.json", tmp_path / "pl_device.json", 2).problems == []
    names = [node["name"] for node in load(tmp_path / "pl_host.json")["nodes"]]
    assert names.count("Optimizer.step#SGD.step") == 1
    assert names.count("aten::linear") == accumulation
    manifest = load(tmp_path / "pl_manifest.json")
    assert manifest["complete"]
    assert manifest["run"] == {"model": "Module", "parameters": 9, "config": {"width": 8}}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning_that_fails_keeps_its_trace_and_the_reason(tmp_path):
    trainer, module, data = lightning_trainer(tmp_path, fail_at=4)
    with pytest.raises(RuntimeError, match="not a number"):
        trainer.fit(module, data)
    manifest = load(tmp_path / "pl_manifest.json")
    assert "after 1 of 2 active steps (RuntimeError: the loss is not a number)" in manifest["reason"]
    assert inspect_pair(tmp_path / "pl_host.json", tmp_path / "pl_device.json", 2).problems == []


@pytest.mark.slow
def test_accelerate_needs_no_callback(tmp_path):
    pytest.importorskip("accelerate")
    code = """
import sys, torch
from accelerate import Accelerator
from chakra_et import ChakraTracer
sys.path.insert(0, sys.argv[1])
from test_callbacks import Data, Net
accelerator = Accelerator(cpu=True)
model = Net()
loader = torch.utils.data.DataLoader(Data(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
with ChakraTracer("out", "acc", 1, 1, 2) as tracer:
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        tracer.step()
torch.distributed.destroy_process_group()  # else gloo's threads may abort the exit
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = tmp_path / "train.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(Path(__file__).parent)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = load(tmp_path / "out" / "acc_manifest.json")
    assert manifest["complete"] and (manifest["world_size"], manifest["backend"]) == (2, "gloo")
