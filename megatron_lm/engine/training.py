"""The training loop: one iteration is one pipeline schedule over all micro-batches, then the optimizer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from chakra_et.capture.tracer import ChakraTracer
from megatron_lm.engine import dataset, log_lines, model, optimizer
from megatron_lm.engine.checkpoint import Checkpoints
from megatron_lm.engine.log_lines import Timers
from megatron_lm.engine.optimizer import Optimizer, Stepped
from megatron_lm.errors import RunError
from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER
from utils.watch import PeerFailure, Watch, ended_by

PATIENCE = 10  # median iterations without progress that count as a stall
LEAST_PATIENCE = 30.0  # seconds
TRACE_WAIT, TRACE_WARMUP, TRACE_ACTIVE = 1, 1, 2
OUTPUTS, GRADIENTS = range(2)  # where a number can stop being finite
Batch = dict[str, torch.Tensor]
log = logging.getLogger(__name__)


def train(settings: Settings, watch: Watch) -> int:
    """Train and log. Returns 0, or 128 + N after the iteration in which signal N asked any rank to end.

    The process groups must exist. Raises ``DataError``, ``CheckpointError``, ``RunError`` or ``OSError``.
    """
    timers = Timers(dist.get_rank()) if settings.profile else None
    chunks = model.build(settings, timers)
    adam = Optimizer(chunks, settings, timers)
    schedule = optimizer.schedule(adam, settings)
    health = Health(settings, chunks)
    checkpoints = Checkpoints(settings, chunks, adam, schedule)
    checkpoints.check_writable()
    done = checkpoints.load()
    samples = dataset.build(settings)
    data_rank, consumed = parallel_state.get_data_parallel_rank(), done * settings.global_batch_size
    # Every chunk goes through the micro-batches on its own.
    batches = [dataset.micro_batches(samples, settings, data_rank, consumed) for _ in chunks]
    lines = log_lines.Log(settings, timers)
    iteration, asked = done, False
    seconds: list[float] = []
    with _tracer(settings) as tracer, watch.training():
        lines.before_training()
        for iteration in range(done + 1, settings.train_iters + 1):
            began = time.monotonic()
            loss, stepped, asked = step(settings, chunks, adam, batches, timers, health, watch, iteration)
            if stepped.done:
                schedule.step(settings.global_batch_size)
            rate = adam.chained.param_groups[0]["lr"]
            lines.not_finite(iteration, health.after(iteration, loss, stepped))
            lines.iteration(iteration, loss, stepped, rate, adam.scale())
            if tracer is not None:
                tracer.step()
            watch.mark(iteration, "saving")
            # Weights that are not finite would hide the last good checkpoint.
            if not health.in_a_row:
                checkpoints.after(iteration, asked)
            if asked:
                break
            seconds = [*seconds[-50:], time.monotonic() - began]
            watch.patience = max(LEAST_PATIENCE, PATIENCE * statistics.median(seconds))
    if watch.signal:
        log.error("rank %d: %s after iteration %d", dist.get_rank(), ended_by(watch.signal), iteration)
    status = 128 + (watch.signal or signal.SIGTERM) if asked else 0
    lines.close(status)
    return status


def step(
    settings: Settings, chunks: list[Any], adam: Optimizer, batches: list[Iterator[Batch]],
    timers: Timers | None, health: Health, watch: Watch, iteration: int,
) -> tuple[float, Stepped, bool]:  # fmt: skip
    """One iteration: (loss over the global batch; the optimizer's step; whether a rank was asked to end)."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    adam.chained.zero_grad()
    scale = adam.scale()
    chunks[0].config.grad_scale_func = (lambda loss: loss * scale) if scale != 1 else None
    single = len(chunks) == 1
    counts = itertools.count()

    def forward(data: Iterator[Batch], chunk: Any) -> Any:
        """One micro-batch through one chunk, as megatron-core's schedules call it."""
        number = next(counts)
        watch.mark(iteration, "forward", number)
        first, last = chunk.module.pre_process, chunk.module.post_process
        with timers.during("batch-generator") if timers else contextlib.nullcontext():
            # Chunks in between need no data, but must keep their place in it.
            batch = next(data)
            if torch.cuda.is_available() and (first or last):
                batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
        length = batch["tokens"].shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        output = chunk(
            batch["tokens"] if first else None,
            batch["position_ids"] if first else None,
            future.to(torch.cuda.current_device()),
            labels=batch["labels"] if last else None,
        )
        health.output(chunk, output)
        watch.mark(iteration, "backward", number)
        return output, partial(_loss, timers, batch["loss_mask"])

    reduced = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches[0] if single else batches,
        model=chunks,
        num_microbatches=settings.micro_batches,
        seq_length=settings.size.sequence,
        micro_batch_size=settings.micro_batch_size,
        forward_only=False,
    )
    watch.mark(iteration, "optimizer step")
    with timers.during("optimizer") if timers else contextlib.nullcontext():
        stepped = adam.step()
    # The mean over all micro-batches of all ranks, and whether any rank was asked to end.
    total = torch.zeros(3, dtype=torch.float64, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        total[0] = sum(entry["lm loss"].double() for entry in reduced)
        total[1] = len(reduced)
    total[2] = float(watch.signal != 0)
    dist.all_reduce(total)
    loss, count, asked = total.tolist()
    return loss / count, stepped, asked > 0


def _loss(timers: Timers | None, mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Mean over the tokens of one micro-batch; ``losses``, ``mask``: (micro-batch size, sequence)."""
    with timers.during("loss-compute") if timers else contextlib.nullcontext():
        loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    # The schedule divides the first value by the number of micro-batches, in place.
    return loss, {"lm loss": loss.detach().clone()}


def _tracer(settings: Settings) -> contextlib.AbstractContextManager[ChakraTracer | None]:
    if not settings.profile_chakra:
        return contextlib.nullcontext()
    name = f"megatron_{settings.model}_{settings.world_size}gpu"
    folder = (FOLDER / settings.trace_output_dir).resolve()
    info = {"model": settings.model, "partition": settings.partition}
    return ChakraTracer(folder, name, TRACE_WAIT, TRACE_WARMUP, TRACE_ACTIVE, run_info=info)


class Health:
    """Watches each chunk's outputs and gradients, before those of other ranks are added to them.

    in_a_row: iterations without a finite loss or gradient until now. An fp16 step that is skipped because its
    gradients overflowed has a finite loss, lowers the loss scale and does not count.
    """

    def __init__(self, settings: Settings, chunks: list[Any]) -> None:
        self.settings, self.chunks = settings, chunks
        self.in_a_row = self.since = 0
        self._rank, self._where = 0, ""
        # On the device, so that nothing waits for it.
        self._bad = torch.zeros(2, len(chunks), device=torch.cuda.current_device())
        config = chunks[0].config
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func = self._before(config.finalize_model_grads_func)

    def output(self, chunk: Any, tensor: torch.Tensor) -> None:
        """Look at what a chunk computed for one micro-batch."""
        self._bad[OUTPUTS, self.chunks.index(chunk)] += ~_is_finite(tensor.detach())

    def after(self, iteration: int, loss: float, stepped: Stepped) -> str:
        """Judge an iteration; every rank calls this. A sentence for the log if it is the first bad one.

        Raises ``RunError`` on the rank where it began, and ``PeerFailure`` on the others, once STOP_ON_NAN
        iterations in a row were bad.
        """
        norm = stepped.norm if stepped.norm is not None else 0.0
        bad, first = not (math.isfinite(loss) and math.isfinite(norm)), self.in_a_row == 0
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if bad and first:
            self.since = iteration
            self._rank, self._where = self._origin()
        self._bad.zero_()
        if bad and self.in_a_row == self.settings.stop_on_nan:
            why = (
                f"loss or gradients are not finite since iteration {self.since}, first in {self._where}, "
                f"{self.in_a_row} times in a row (STOP_ON_NAN): continue from a checkpoint with a lower LR"
            )
            raise RunError(why) if dist.get_rank() == self._rank else PeerFailure(why)
        if not (bad and first):
            return ""
        return f"not finite: loss {loss:g}, grad norm {norm:g}, first in {self._where}"

    def _before(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            for number, chunk in enumerate(self.chunks):
                for buffer in chunk.buffers:
                    self._bad[GRADIENTS, number] += ~_is_finite(buffer.grad_data)
            return reduce(*args, **options)

        return call

    def _origin(self) -> tuple[int, str]:
        """(rank, words): the earliest in the order of the computation; every rank calls this."""
        flags = torch.zeros(dist.get_world_size(), *self._bad.shape, device=self._bad.device)
        flags[dist.get_rank()] = self._bad
        dist.all_reduce(flags)
        per_stage = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
        places = [(rank, rank // per_stage, kind, chunk) for rank, kind, chunk in flags.nonzero().tolist()]
        if outputs := [(chunk, stage, rank) for rank, stage, kind, chunk in places if kind == OUTPUTS]:
            rank = min(outputs)[2]
            return rank, f"the outputs of rank {rank}"
        # Backward passes go from the last stage to the first.
        if gradients := [(-chunk, -stage, rank) for rank, stage, _, chunk in places]:
            rank = min(gradients)[2]
            return rank, f"the gradients of rank {rank}"
        return 0, "the sum of all ranks' gradients"


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    # A sum of finite values could overflow; the largest value can't.
    return torch.isfinite(torch.linalg.vector_norm(tensor, float("inf")))
