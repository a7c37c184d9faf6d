"""The twelve trainings that ``step_truth.py`` measures, each at two sizes: at size 0 Python sets the pace.

A script is called with its size, the number of steps and what to call after each step. ``RANKS``: how many
processes it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

WIDTH = (64, 512)
Step = Callable[[], None]


class Block(nn.Module):
    """A transformer's MLP with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return out


def _blocks(size: int, count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH[size]) for _ in range(count)))


def _batch(size: int, rows: int = 64) -> Tensor:
    return torch.randn(rows, WIDTH[size])


def _loop(model: nn.Module, size: int, steps: int, after: Step, micro: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            batch = _batch(size)
            mse_loss(model(batch), batch).backward()
        optimizer.step()
        after()


def single(size: int, steps: int, after: Step) -> None:
    _loop(_blocks(size), size, steps, after)


def ddp_accumulation(size: int, steps: int, after: Step) -> None:
    model = nn.parallel.DistributedDataParallel(_blocks(size))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(3):
            batch = _batch(size)
            if micro < 2:
                with model.no_sync():
                    mse_loss(model(batch), batch).backward()
            else:
                mse_loss(model(batch), batch).backward()
        optimizer.step()
        after()


def fsdp2_checkpoint_compile(size: int, steps: int, after: Step) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _blocks(size)
    for number, block in enumerate(model):
        wrapped = torch.compile(block) if number == 0 else checkpoint_wrapper(block)
        model[number] = wrapped  # type: ignore[assignment]
        fully_shard(wrapped, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    _loop(model, size, steps, after)


def tensor_and_data(size: int, steps: int, after: Step) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = _blocks(size, 3)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    _loop(model, size, steps, after)


def _pipeline(size: int, steps: int, after: Step, virtual: int) -> None:
    from torch.distributed import pipelining

    rank, world, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    stages = [
        pipelining.PipelineStage(_blocks(size, 2), rank + world * chunk, world * virtual, cpu)
        for chunk in range(virtual)
    ]
    schedule: Any = (
        pipelining.Schedule1F1B(stages[0], n_microbatches=4, loss_fn=mse_loss)
        if virtual == 1
        else pipelining.ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=mse_loss)
    )
    optimizer = torch.optim.AdamW(p for stage in stages for p in stage.submod.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = [_batch(size)] if rank == 0 else []
        target = {"target": torch.zeros(64, WIDTH[size])} if rank == world - 1 else {}
        schedule.step(*inputs, **target)
        optimizer.step()
        after()


def one_f_one_b(size: int, steps: int, after: Step) -> None:
    _pipeline(size, steps, after, 1)


def interleaved(size: int, steps: int, after: Step) -> None:
    _pipeline(size, steps, after, 2)


class Experts(nn.Module):
    """One expert per rank; tokens go there and back by all-to-all with uneven splits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(width, dist.get_world_size()), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        order = self.router(x).argmax(-1)
        sent = torch.bincount(order, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        splits = sent.tolist(), received.tolist()
        tokens = all_to_all_single_autograd(x[order.argsort()], splits[1], splits[0], dist.group.WORLD)
        back = all_to_all_single_autograd(self.expert(tokens), splits[0], splits[1], dist.group.WORLD)
        return x + torch.empty_like(back).index_copy(0, order.argsort(), back)


def experts(size: int, steps: int, after: Step) -> None:
    torch.manual_seed(dist.get_rank())
    _loop(nn.Sequential(*(Experts(WIDTH[size]) for _ in range(2))), size, steps, after)


GPT = ({"n_layer": 2, "n_head": 2, "n_embd": 64}, {"n_layer": 4, "n_head": 4, "n_embd": 256})


def hf_trainer(size: int, steps: int, after: Step) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            after()

    tokens = torch.randint(0, 500, (64, 32))
    arguments = TrainingArguments(
        output_dir="outputs/step_truth", max_steps=steps, per_device_train_batch_size=4, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    settings = GPT2Config(vocab_size=500, bos_token_id=0, eos_token_id=0, **GPT[size])
    data = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(GPT2LMHeadModel(settings), arguments, train_dataset=data, callbacks=[After()]).train()


def accelerate(size: int, steps: int, after: Step) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _blocks(size)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        batch = _batch(size)
        accelerator.backward(mse_loss(model(batch), batch))
        optimizer.step()
        after()


def lightning(size: int, steps: int, after: Step) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _blocks(size)

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return mse_loss(self.model(batch), batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            after()

    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64 * steps, WIDTH[size]), batch_size=64))


def _family(family: Any, preset: dict[str, Any], steps: int, after: Step) -> None:
    model = family.build({"vocab_size": 500, **preset}, None, None)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randint(0, 500, (4, 64))
    for _ in range(steps):
        optimizer.zero_grad()
        batch = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
        batch["token_type_ids"] = torch.zeros_like(rows)
        loss, count = family.loss_sum(model, batch)
        (loss / count).backward()
        optimizer.step()
        after()


def gpt2(size: int, steps: int, after: Step) -> None:
    from gpt2.model import GPT2

    _family(GPT2, {**GPT[size], "bos_token_id": 0, "eos_token_id": 0}, steps, after)


def bert(size: int, steps: int, after: Step) -> None:
    from bert.model import BERT

    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    preset = dict(zip(names, GPT[size].values(), strict=True))
    _family(BERT, {**preset, "intermediate_size": 4 * preset["hidden_size"]}, steps, after)


_ALONE = (single, hf_trainer, accelerate, lightning, gpt2, bert)
_OF_TWO = (ddp_accumulation, fsdp2_checkpoint_compile, one_f_one_b, interleaved, experts)
SCRIPTS: dict[str, Callable[[int, int, Step], None]] = {
    script.__name__: script for script in (*_ALONE, *_OF_TWO, tensor_and_data)
}
RANKS = {
    name: 4 if name == "tensor_and_data" else 1 + (script in _OF_TWO) for name, script in SCRIPTS.items()
}
