"""The training loop of both models.

Each optimizer step has one collective besides DDP's own, over four numbers: the loss, its token count, the
count of all tokens, and whether a rank was asked to stop. The loss is a mean over the tokens of the global
batch, so loss and gradient don't depend on how ranks and accumulation share the batch. Data order, learning
rate and random numbers are functions of the seed and the step, so a resumed run needs only the weights, the
optimizer's state and the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

from chakra_et.capture.tracer import ChakraTracer
from utils.data.tokenizers import load_tokenizer
from utils.data_utils import build_datasets
from utils.distributed import World, run
from utils.training import checkpoint
from utils.training.config import TrainConfig
from utils.training.metrics import Metrics
from utils.training.models import Batch, ModelFamily
from utils.training.optim import build_optimizer, learning_rate_at
from utils.training.sampling import BatchPlan, MicroBatches, derived_seed
from utils.watch import Watch, describe

log = logging.getLogger(__name__)

# Short enough for a quick run on two cores; on GPUs the default is the model's context.
CPU_SEQ_LENGTH = 128
COMPILER_MODULES = ("torch._dynamo", "torch._inductor")


def train(config: TrainConfig, family: ModelFamily) -> NoReturn:
    """Train in this process and exit: with 0, with 1 after a failure, or with 128 + N after signal N."""
    run(lambda world, watch: Trainer(config, family, world, watch).train(), config.dist_timeout)


def _ignore_signals(_worker: int) -> None:
    # A scheduler's SIGTERM or a Ctrl-C reaches the whole process group. A loader that died of it would turn
    # an orderly stop into a failure; it ends with the training process instead.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class Trainer:
    """One run on one rank. Raises ValueError or OSError for anything the user can fix."""

    def __init__(self, config: TrainConfig, family: ModelFamily, world: World, watch: Watch):
        self.config, self.family, self.world, self.watch = config, family, world, watch
        self.save_dir = Path(config.save_dir)
        self._complete_config()
        self._prepare_folder()
        resumed, state = self._find_checkpoint()
        weights = str(resumed) if resumed else config.init_from
        torch.manual_seed(config.seed)
        self.model = family.build(config.presets[config.model_name], weights, config.dropout)
        self.model.to(world.device)  # type: ignore[arg-type]
        config.check_context(self.model.config.max_position_embeddings, weights or config.model_name)
        self._build_data()
        self.plan = BatchPlan(
            samples=len(self.training_set),
            micro_batch=config.batch_size,
            world_size=world.size,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed,
        )
        self.total_steps = config.max_steps or config.num_epochs * self.plan.steps_per_epoch
        self.optimizer = build_optimizer(self.model, config.learning_rate, config.weight_decay)
        self.step, self.best_loss = 0, math.inf
        if resumed:
            self._resume(resumed, state)
        self.ddp: DistributedDataParallel | None = None
        if world.size > 1:
            # These models have constant buffers only: nothing to broadcast per step.
            known = inspect.signature(DistributedDataParallel).parameters
            name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: dict[str, Any] = {name: False}
            self.ddp = DistributedDataParallel(self.model, **options)
        self.wrapped: nn.Module = self.ddp or self.model
        if config.compile:
            self.wrapped = cast(nn.Module, torch.compile(self.wrapped))

    # Set-up.

    def _complete_config(self) -> None:
        """Fill in defaults that depend on the machine, so that the saved configuration is complete."""
        config, cuda = self.config, self.world.device.type == "cuda"
        if config.max_seq_length is None:
            config.max_seq_length = config.context if cuda else CPU_SEQ_LENGTH
        if config.trace_name is None:
            config.trace_name = f"{config.family}_{self.world.size}gpu_trace"
        if config.bf16 and cuda and not torch.cuda.is_bf16_supported():
            raise ValueError(f"--bf16: {torch.cuda.get_device_name()} does not support bfloat16; omit it")

    def _prepare_folder(self) -> None:
        if self.world.is_main:
            self.config.save("save_dir", "train_config.json")
            for leftover in checkpoint.clean_up(self.save_dir):
                log.warning("removed %s, left by an interrupted save", leftover)
        self.watch.barrier("folder prepared")

    def _find_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        config = self.config
        if config.resume_from_checkpoint is None:
            return None, {}
        folder = checkpoint.find_checkpoint(config.resume_from_checkpoint, self.save_dir)
        state = checkpoint.read_state(folder)
        if state["model_name"] != config.model_name:
            raise ValueError(
                f"--model-name is {config.model_name}, but checkpoint {folder} is of {state['model_name']}"
            )
        return folder, state

    def _resume(self, folder: Path, state: dict[str, Any]) -> None:
        checkpoint.load_optimizer(folder, self.optimizer, self.world.device)
        self.step = state["step"]
        self.best_loss = math.inf if state["best_loss"] is None else state["best_loss"]
        if not self.world.agree(self.step):
            raise ValueError(
                f"the ranks don't see the same checkpoint ({folder}, step {self.step} here): "
                f"--save-dir must be one folder that all nodes share"
            )
        if state["order"] != self._order() and self.world.is_main:
            log.warning("seed, data or global batch differ from the interrupted run: so does the data order")
        log.info("resumed from %s, after step %d", folder, self.step)

    def _order(self) -> dict[str, int]:
        """Everything that the order of samples depends on."""
        return {"samples": self.plan.samples, "global_batch": self.plan.global_batch, "seed": self.plan.seed}

    def _build_data(self) -> None:
        config, first = self.config, self.world.local_rank == 0
        if not first:
            # One process per node tokenizes; the others read its cache.
            self.watch.barrier("data cached")
        self.tokenizer, self.tokenizer_source = load_tokenizer(
            config.family, config.model_name, config, self.model.config.vocab_size
        )
        self.training_set, self.validation_set = build_datasets(
            config.family, self.tokenizer, config, config.seed
        )
        if first:
            self.watch.barrier("data cached")
        if not self.world.agree(int(self.training_set.fingerprint[:12], 16)):
            raise ValueError("the ranks have different data or tokenizers: give every node the same files")

    def _loader(self, data: Dataset[Batch], **batching: Any) -> DataLoader[Batch]:
        return DataLoader(
            data,
            num_workers=self.config.num_workers,
            pin_memory=self.world.device.type == "cuda",
            # A generator of its own, or every new iterator would draw from the one that dropout uses.
            generator=torch.Generator(),
            worker_init_fn=_ignore_signals,
            **batching,
        )

    def _tracer(self) -> contextlib.AbstractContextManager[ChakraTracer | None]:
        config, world = self.config, self.world
        if not config.enable_tracing or config.trace_name is None:
            return contextlib.nullcontext()
        config.check_trace_length(self.total_steps - self.step, f"{self.step} to {self.total_steps}")
        if world.is_main:
            config.save("trace_output_dir", f"{config.trace_name}_config.json")
        return ChakraTracer(
            config.trace_output_dir,
            config.trace_name,
            config.trace_wait_steps,
            config.trace_warmup_steps,
            config.trace_active_steps,
            world.rank,
            world_size=world.size,
            gzip=config.trace_gzip,
            memory=config.trace_memory,
            run_info={
                "model": config.model_name,
                "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
                "dataset": self.training_set.source,
                "tokenizer": self.tokenizer_source,
                "config": dataclasses.asdict(config),
            },
        )

    # The loop.

    def train(self) -> int:
        """Train to the end; returns 0, or 128 + N after signal N."""
        config = self.config
        if self.step >= self.total_steps:
            if self.world.is_main:
                log.warning("nothing to do: the checkpoint is at step %d of %d", self.step, self.total_steps)
            return 0
        with (
            self._tracer() as tracer,
            self.watch.training(),
            Metrics(config, self.world.is_main, self.step, self.total_steps) as metrics,
            contextlib.closing(self._micro_batches()) as batches,
        ):
            self.model.train()
            while self.step < self.total_steps:
                figures, tokens, stop = self._optimizer_step(batches)
                self.step += 1
                if tracer is not None:
                    tracer.step()
                last = self.step == self.total_steps
                shown = last or self.step % config.logging_steps == 0
                metrics.advance(self.step, tokens, figures, shown)
                if config.save_steps and (self.step % config.save_steps == 0 or last or stop):
                    self._save()
                if not stop and not config.skip_eval:
                    due = last or (config.eval_steps and self.step % config.eval_steps == 0)
                    stop = bool(due) and self._evaluate(metrics)
                if stop:
                    return self._stopped()
            if config.skip_eval:
                self._save_best()
        if self.world.is_main:
            print(self._summary(metrics), flush=True)
        return 0

    def _micro_batches(self) -> Generator[Batch]:
        """This rank's batches from the current step on, epoch after epoch."""
        while True:
            epoch, first_step = divmod(self.step, self.plan.steps_per_epoch)
            self.training_set.set_epoch(epoch)
            sampler = MicroBatches(self.plan, self.world.rank, epoch, first_step)
            yield from self._loader(self.training_set, batch_sampler=sampler)

    def _optimizer_step(self, batches: Iterator[Batch]) -> tuple[dict[str, Any], float, bool]:
        """One step: its figures, its tokens over all ranks, and whether a rank was asked to stop."""
        config, watch, step = self.config, self.watch, self.step
        torch.manual_seed(derived_seed(config.seed, "step", step, self.world.rank))
        rate = learning_rate_at(step, config.learning_rate, config.warmup_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        for micro in range(config.gradient_accumulation_steps):
            watch.mark(step, "loading data", micro)
            batch = self._to_device(next(batches))
            watch.mark(step, "forward", micro)
            inner = micro + 1 < config.gradient_accumulation_steps
            with self.ddp.no_sync() if self.ddp is not None and inner else contextlib.nullcontext():
                loss, counted = self._forward(batch)
                watch.mark(step, "backward", micro)
                loss.backward()
            seen = batch["attention_mask"].sum()
            sums += torch.stack([loss.detach().double(), counted.double(), seen.double()])
        watch.mark(step, "reducing")
        loss_sum, predicted, tokens, stop = self.world.sum(*sums, float(watch.signal != 0))
        mean = loss_sum / max(1.0, predicted)
        if not math.isfinite(mean):
            raise ValueError(f"the loss is {mean} at step {step + 1}: lower --learning-rate")
        watch.mark(step, "optimizer step")
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # DDP has averaged gradients of sums over ranks; rescale them to the mean over all tokens.
        torch._foreach_mul_(gradients, self.world.size / max(1.0, predicted))
        figures: dict[str, Any] = {"loss": mean, "learning_rate": rate}
        if config.max_grad_norm:
            figures["grad_norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return figures, tokens, stop > 0

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        try:
            with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.bf16):
                return self.family.loss_sum(self.wrapped, batch)
        except Exception as error:
            if self.config.compile and type(error).__module__.startswith(COMPILER_MODULES):
                raise ValueError(f"--compile fails here, omit it: {describe(error)}") from error
            raise

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in batch.items()}

    @torch.no_grad()
    def _evaluate(self, metrics: Metrics) -> bool:
        """Compute the mean loss over the validation set, and save the model if it is the best so far.

        Returns whether a rank was asked to stop; the result is then dropped.
        """
        world = self.world
        share = Subset(self.validation_set, range(world.rank, len(self.validation_set), world.size))
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        self.model.eval()
        for index, batch in enumerate(self._loader(share, batch_size=self.config.batch_size)):
            self.watch.mark(self.step - 1, "evaluating", index)
            if self.watch.signal:
                break
            with torch.autocast(world.device.type, torch.bfloat16, enabled=self.config.bf16):
                loss, counted = self.family.loss_sum(self.model, self._to_device(batch))
            sums += torch.stack([loss.double(), counted.double()])
        self.model.train()
        loss_sum, predicted, stop = world.sum(*sums, float(self.watch.signal != 0))
        if stop:
            return True
        mean = loss_sum / max(1.0, predicted)
        metrics.write(self.step, {"eval_loss": mean})
        if mean < self.best_loss:
            self.best_loss = mean
            self._save_best()
        return False

    # Saving and ending.

    def _save(self) -> None:
        """Save a checkpoint to resume from."""
        self.watch.mark(self.step - 1, "saving")
        if not self.world.is_main:
            return
        folder = checkpoint.step_folder(self.save_dir, self.step)
        state = {
            "step": self.step,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "model_name": self.config.model_name,
            "order": self._order(),
        }
        checkpoint.save_checkpoint(
            folder, self.model, self.tokenizer, self.config.save_format, self.optimizer, state
        )
        log.info("saved %s", folder)

    def _save_best(self) -> None:
        """Save the best model: the one with the lowest validation loss or, without evaluation, the last."""
        self.watch.mark(self.step - 1, "saving")
        if self.world.is_main:
            folder = self.save_dir / checkpoint.BEST
            checkpoint.save_checkpoint(folder, self.model, self.tokenizer, self.config.save_format)
            log.info("saved %s", folder)

    def _stopped(self) -> int:
        number = self.watch.signal or signal.SIGTERM
        saved = (
            "resume with --resume-from-checkpoint latest" if self.config.save_steps else "nothing is saved"
        )
        if self.world.is_main:
            name = signal.Signals(number).name
            log.warning("stopped by %s after step %d of %d: %s", name, self.step, self.total_steps, saved)
        return 128 + number

    def _summary(self, metrics: Metrics) -> str:
        config, world = self.config, self.world
        where = f"model: {self.save_dir / checkpoint.BEST}"
        if config.enable_tracing:
            where += f"; traces: {Path(config.trace_output_dir, str(config.trace_name))}_*"
        done = f"{metrics.steps} steps on {world.size} x {world.device.type}, {metrics.span()}"
        return f"{config.family} {config.model_name}: {done}; {where}"
