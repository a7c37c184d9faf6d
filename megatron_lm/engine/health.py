"""Where a number first stopped being finite: in which rank's outputs or gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lm.engine.optimizer import Stepped
from megatron_lm.errors import RunError
from megatron_lm.settings import Settings
from utils.watch import PeerFailure

OUTPUTS, GRADIENTS = range(2)


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
