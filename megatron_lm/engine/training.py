"""The training loop: one iteration is one pipeline schedule over all micro-batches, then the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from chakra_et.capture.tracer import ChakraTracer
from megatron_lm.engine import dataset, log_lines, model, optimizer
from megatron_lm.engine.checkpoint import Checkpoints
from megatron_lm.engine.optimizer import Optimizer, Stepped
from megatron_lm.engine.timing import Timers
from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER

TRACE_WAIT, TRACE_WARMUP, TRACE_ACTIVE = 1, 1, 2
Batch = dict[str, torch.Tensor]


def train(settings: Settings) -> list[float]:
    """Train and log. Returns the loss of each iteration, on every rank.

    The process groups must exist. Raises ``DataError``, ``CheckpointError`` or ``OSError``.
    """
    timers = Timers(dist.get_rank(), settings.sharded_optimizer) if settings.profile else None
    chunks = model.build(settings, timers)
    adam = Optimizer(chunks, settings, timers)
    schedule = optimizer.schedule(adam, settings)
    checkpoints = Checkpoints(settings, chunks, adam, schedule)
    done = checkpoints.load()
    samples = dataset.build(settings)
    data_rank, consumed = parallel_state.get_data_parallel_rank(), done * settings.global_batch_size
    # Every chunk goes through the micro-batches on its own.
    batches = [dataset.micro_batches(samples, settings, data_rank, consumed) for _ in chunks]
    log = log_lines.Log(settings, timers)
    log.before_training()
    losses = []
    with _tracer(settings) as tracer:
        for iteration in range(done + 1, settings.train_iters + 1):
            loss, stepped = step(settings, chunks, adam, batches, timers)
            if stepped.done:
                schedule.step(settings.global_batch_size)
            losses.append(loss)
            rate = adam.param_groups[0]["lr"]
            log.iteration(iteration, loss, stepped, rate, adam.scale())
            if tracer is not None:
                tracer.step()
            checkpoints.after(iteration)
    return losses


def step(
    settings: Settings,
    chunks: list[Any],
    adam: Optimizer,
    batches: list[Iterator[Batch]],
    timers: Timers | None,
) -> tuple[float, Stepped]:
    """One iteration: (loss over the global batch, on every rank; the optimizer's step)."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    adam.zero_grad()
    scale = adam.scale()
    chunks[0].config.grad_scale_func = (lambda loss: loss * scale) if scale != 1 else None
    single = len(chunks) == 1
    reduced = get_forward_backward_func()(
        forward_step_func=partial(_forward, timers),
        data_iterator=batches[0] if single else batches,
        model=chunks,
        num_microbatches=settings.micro_batches,
        seq_length=settings.size.sequence,
        micro_batch_size=settings.micro_batch_size,
        forward_only=False,
    )
    with timers.during("optimizer") if timers else contextlib.nullcontext():
        stepped = adam.step()
    return _mean_loss(reduced), stepped


def _forward(timers: Timers | None, batches: Iterator[Batch], chunk: Any) -> Any:
    """One micro-batch through one chunk, as megatron-core's schedules call it."""
    first, last = chunk.module.pre_process, chunk.module.post_process
    with timers.during("batch-generator") if timers else contextlib.nullcontext():
        # Chunks in between need no data, but must keep their place in it.
        batch = next(batches)
        if torch.cuda.is_available() and (first or last):
            batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
    length = batch["tokens"].shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None].to(torch.cuda.current_device())
    output = chunk(
        batch["tokens"] if first else None,
        batch["position_ids"] if first else None,
        future,
        labels=batch["labels"] if last else None,
    )
    return output, partial(_loss, timers, batch["loss_mask"])


def _loss(timers: Timers | None, mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Mean over the tokens of one micro-batch; ``losses``, ``mask``: (micro-batch size, sequence)."""
    with timers.during("loss-compute") if timers else contextlib.nullcontext():
        loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    # The schedule divides the first value by the number of micro-batches, in place.
    return loss, {"lm loss": loss.detach().clone()}


def _mean_loss(reduced: list[Batch]) -> float:
    """The mean over all micro-batches of all ranks, known on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for entry in reduced:
            total += torch.stack([entry["lm loss"].double(), torch.ones_like(entry["lm loss"].double())])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def _tracer(settings: Settings) -> contextlib.AbstractContextManager[ChakraTracer | None]:
    if not settings.profile_chakra:
        return contextlib.nullcontext()
    name = f"megatron_{settings.model}_{settings.world_size}gpu"
    folder = (FOLDER / settings.trace_output_dir).resolve()
    rank, size = dist.get_rank(), dist.get_world_size()
    return ChakraTracer(
        folder, name, TRACE_WAIT, TRACE_WARMUP, TRACE_ACTIVE, rank, size,
        run_info={"model": settings.model, "partition": settings.partition},
    )  # fmt: skip
