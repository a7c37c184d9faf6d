"""One run of either model, from its options to its last checkpoint.

Data order, learning rate and random numbers are functions of the seed and the step, so a resumed run needs
only the weights, the optimizer's state and the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from chakra_et.capture.tracer import ChakraTracer
from chakra_et.files import write_json
from utils.data.tokenizers import MAX_LENGTH, load_tokenizer
from utils.data_utils import build_datasets, stack
from utils.distributed import World, run
from utils.training import checkpoint
from utils.training.checkpoint import CheckpointError
from utils.training.config import TrainConfig
from utils.training.metrics import Metrics
from utils.training.step import Batch, BatchPlan, ModelFamily, Stepper, build_optimizer
from utils.watch import Watch

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
# Short enough for a quick run on two cores; on GPUs the default is the model's context.
CPU_SEQ_LENGTH = 128


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
        self.config, self.world, self.watch = config, world, watch
        self.save_dir = Path(config.save_dir)
        # Defaults that depend on the machine, so that the saved configuration is complete.
        if config.max_seq_length is None:
            on_gpu = world.device.type == "cuda"
            config.max_seq_length = MAX_LENGTH[config.family] if on_gpu else CPU_SEQ_LENGTH
        if config.trace_name is None:
            config.trace_name = f"{config.family}_{world.size}gpu_trace"
        if world.is_main:
            config.save("--save-dir", self.save_dir / "train_config.json")
            for leftover in checkpoint.clean_up(self.save_dir):
                log.warning("removed %s, left by an interrupted save", leftover)
        watch.barrier("folder prepared")
        resumed, state = None, {}
        if config.resume_from_checkpoint is not None:
            resumed = checkpoint.find_checkpoint(config.resume_from_checkpoint, self.save_dir)
            state = checkpoint.read_state(resumed)
            if (model := state["model_name"]) != config.model_name:
                raise ValueError(f"--model-name {config.model_name}: checkpoint {resumed} is of {model}")
        torch.manual_seed(config.seed)
        preset = config.presets[config.model_name]
        self.model = family.build(preset, resumed, config.dropout, config.gradient_checkpointing)
        self.model.to(world.device)
        self._build_data()
        samples, accumulation = len(self.training_set), config.gradient_accumulation_steps
        self.plan = BatchPlan(samples, config.batch_size, world.size, accumulation, config.seed)
        # Everything that the order of samples depends on.
        self.order = {"samples": samples, "global_batch": self.plan.global_batch, "seed": config.seed}
        self.total_steps = config.max_steps or config.num_epochs * self.plan.steps_per_epoch
        self.optimizer = build_optimizer(self.model, config.learning_rate, config.weight_decay)
        self.stepper = Stepper(config, family, world, watch, self.model, self.optimizer, self.total_steps)
        # Everything that was due after ``step`` is done: evaluation, and at the end the best model.
        self.step, self.best_loss, self.complete = 0, math.inf, True
        self.folder = resumed or Path()  # the last checkpoint
        if resumed:
            self._resume(resumed, state)

    def _resume(self, folder: Path, state: dict[str, Any]) -> None:
        checkpoint.load_optimizer(folder, self.optimizer, self.world.device)
        self.step, self.complete = state["step"], state.get("complete", False)
        self.best_loss = math.inf if state["best_loss"] is None else state["best_loss"]
        if not self.world.agree(self.step):
            here = f"({folder}, step {self.step} here): --save-dir must be a folder that all nodes share"
            raise ValueError(f"the ranks don't see the same checkpoint {here}")
        if state["order"] != self.order and self.world.is_main:
            log.warning("seed, data or global batch differ from the interrupted run: so does the data order")
        log.info("resumed from %s, after step %d", folder, self.step)

    def _build_data(self) -> None:
        config, first = self.config, self.world.local_rank == 0
        if not first:
            # One process per node downloads; the others read its cache.
            self.watch.barrier("data loaded")
        of_model = config.family, config.model_name, config, self.model.config.vocab_size
        self.tokenizer, self.tokenizer_source = load_tokenizer(*of_model)
        both = build_datasets(config.family, self.tokenizer, config, config.seed)
        self.training_set, self.validation_set = both
        if first:
            self.watch.barrier("data loaded")
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
            collate_fn=stack if self.config.padding == "longest" else None,
            **batching,
        )

    def _tracer(self) -> contextlib.AbstractContextManager[ChakraTracer | None]:
        config = self.config
        if not config.enable_tracing or config.trace_name is None or self.step >= self.total_steps:
            return contextlib.nullcontext()
        try:
            config.check_trace_length(self.total_steps - self.step, f"{self.step} to {self.total_steps}")
        except ValueError as error:
            if not self.step:
                raise
            # The rest of an interrupted run matters more than its trace.
            if self.world.is_main:
                log.warning("no trace of this resumed run: %s", error)
            return contextlib.nullcontext()
        if self.world.is_main:
            path = Path(config.trace_output_dir, f"{config.trace_name}_config.json")
            config.save("--trace-output-dir", path)
        info = {
            "model": config.model_name,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dataset": self.training_set.source,
            "tokenizer": self.tokenizer_source,
            "config": dataclasses.asdict(config),
        }
        return ChakraTracer(**config.arguments(), run_info=info)

    def train(self) -> int:
        """Train to the end; returns 0, or 128 + N after signal N."""
        if self.step >= self.total_steps and self.complete:
            if self.world.is_main:
                log.warning("nothing to do: the checkpoint is at step %d of %d", self.step, self.total_steps)
            return 0
        with (
            self._tracer() as tracer,
            self.watch.training(),
            Metrics(self.config, self.world.is_main, self.step, self.total_steps) as metrics,
            contextlib.closing(self._micro_batches()) as batches,
        ):
            self.model.train()
            # A resumed run first does what the interrupted one had left to do.
            stop = not self.complete and self._after_step(metrics)
            while not stop and self.step < self.total_steps:
                stop = self._take_step(tracer, metrics, batches)
                self._save(metrics, stop)
                stop = stop or self._after_step(metrics)
        if stop:
            number = self.watch.signal or signal.SIGTERM
            if self.world.is_main:
                resume = "resume with --resume-from-checkpoint latest"
                saved = resume if self.config.save_steps else "nothing saved"
                name = signal.Signals(number).name
                log.warning("stopped by %s after step %d of %d: %s", name, self.step, self.total_steps, saved)
            return 128 + number
        if self.world.is_main:
            if tracer is not None and tracer.written and self.config.convert:
                convert_traces(self.config.trace_output_dir, str(self.config.trace_name))
            print(self._summary(metrics), flush=True)
        return 0

    def _micro_batches(self) -> Generator[Batch]:
        """This rank's batches from the current step on, epoch after epoch."""
        while True:
            epoch, first_step = divmod(self.step, self.plan.steps_per_epoch)
            self.training_set.set_epoch(epoch)
            indices = self.plan.micro_batches(self.world.rank, epoch, first_step)
            yield from self._loader(self.training_set, batch_sampler=indices)

    def _take_step(self, tracer: ChakraTracer | None, metrics: Metrics, batches: Generator[Batch]) -> bool:
        """One optimizer step and its figures; returns whether a rank was asked to stop."""
        began = time.perf_counter()
        figures, tokens, stop = self.stepper.run(self.step, batches)
        ended = time.perf_counter()
        self.step, self.complete = self.step + 1, False
        if tracer is not None:
            tracer.step()
        traced = {"trace_seconds": time.perf_counter() - ended} if tracer is not None else {}
        shown = self.step == self.total_steps or self.step % self.config.logging_steps == 0
        metrics.advance(self.step, tokens, ended - began, figures | traced, shown)
        return stop

    def _save(self, metrics: Metrics, stop: bool) -> None:
        """Save the checkpoint that is due after a step."""
        every, last = self.config.save_steps, self.step == self.total_steps
        if every and (self.step % every == 0 or last or stop):
            began = time.perf_counter()
            self._checkpoint(last or stop)
            metrics.write(self.step, {"checkpoint_seconds": time.perf_counter() - began})

    def _after_step(self, metrics: Metrics) -> bool:
        """The evaluation that is due after a step, and the best model; returns whether to stop."""
        config, last = self.config, self.step >= self.total_steps
        if not config.skip_eval and (last or (config.eval_steps and self.step % config.eval_steps == 0)):
            if not self._evaluate(metrics, last):
                if config.save_steps and self.folder.name != self._step_folder.name:
                    self._checkpoint(last=True)
                return True
        elif last:
            self._write(self.save_dir / checkpoint.BEST, last)
        self.complete = True
        if self.world.is_main and self.folder.name == self._step_folder.name:
            try:
                state = checkpoint.read_state(self.folder) | self._state()
                write_json(self.folder / checkpoint.STATE, state)
            except OSError as error:
                log.warning("%s; a resumed run will evaluate once more", error)
        return False

    def _evaluate(self, metrics: Metrics, last: bool) -> bool:
        """Evaluate, and save the model if it is the best so far; False if a rank was asked to stop."""
        began = time.perf_counter()
        share = Subset(self.validation_set, range(self.world.rank, len(self.validation_set), self.world.size))
        loss = self.stepper.evaluate(self.step, self._loader(share, batch_size=self.config.batch_size))
        if loss is None:
            return False
        perplexity = math.exp(min(loss, 700.0))
        seconds = time.perf_counter() - began
        metrics.write(self.step, {"eval_loss": loss, "eval_perplexity": perplexity, "eval_seconds": seconds})
        if loss < self.best_loss and self._write(self.save_dir / checkpoint.BEST, last):
            self.best_loss = loss
        return True

    @property
    def _step_folder(self) -> Path:
        return self.save_dir / f"step-{self.step}"

    def _checkpoint(self, last: bool) -> None:
        if self._write(self._step_folder, last, self.optimizer, self._state()):
            self.folder = self._step_folder

    def _state(self) -> dict[str, Any]:
        best = self.best_loss if math.isfinite(self.best_loss) else None
        known = {"step": self.step, "best_loss": best, "model_name": self.config.model_name}
        return {**known, "order": self.order, "complete": self.complete}

    def _write(self, folder: Path, last: bool, *training_state: Any) -> bool:
        """Save on rank 0. Where that fails, training goes on with a warning, unless it is the ``last`` save,
        which raises CheckpointError.
        """
        self.watch.mark(self.step - 1, "saving")
        if not self.world.is_main:
            return True
        try:
            checkpoint.save_checkpoint(folder, self.model, self.tokenizer, *training_state)
        except CheckpointError as error:
            if last:
                raise
            log.warning("%s; training goes on", error)
            return False
        log.info("saved %s", folder)
        return True

    def _summary(self, metrics: Metrics) -> str:
        config, world = self.config, self.world
        where = f"data: {len(self.training_set):,} samples of {self.training_set.source}"
        where += f"; model: {self.save_dir / checkpoint.BEST}"
        if config.enable_tracing:
            where += f"; traces: {Path(config.trace_output_dir, str(config.trace_name))}_*"
        done = f"{metrics.steps} steps on {world.size} x {world.device.type}{metrics.span()}"
        return f"{config.family} {config.model_name}: {done}; {where}"


def convert_traces(folder: str, name: str) -> None:
    """Run ``chakra-et convert`` on the traces NAME in ``folder``, in a process of its own.

    A failure is logged with the command to repeat, as the traces of other nodes may have to be copied first.
    """
    command = [sys.executable, "-m", "chakra_et", "convert", str(Path(folder).resolve()), "--name", name]
    if subprocess.run(command, cwd=ROOT).returncode:
        again = f"chakra-et convert {shlex.quote(folder)} --name {shlex.quote(name)}"
        log.error("the traces are kept, but not all could be converted; to repeat it: %s", again)
