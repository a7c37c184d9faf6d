"""One training run of benchmarks/train_benchmark.py, in a process of its own; prints its figures as JSON.

    python benchmarks/train_runs.py ours|hf|tracing [flags of gpt2/train.py]

``ours`` and ``hf`` train the same GPT-2 on the same samples with the same batch, precision and optimizer
settings: ``ours`` with utils/training, ``hf`` with Hugging Face's Trainer, its other settings left alone. The
figures: the time and the CPU time of this process when each step began, the step's tokens that are not
padding, peak memory in MB, and with --enable-tracing the size of the trace pair. ``tracing`` takes the same
step again and again, in turns without a tracer, before a trace and in it; its figures are the times of each.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from chakra_et import cli
from gpt2.config import GPT2TrainConfig
from utils.distributed import read_world, set_threads
from utils.training.config import TrainConfig

Clocks = tuple[float, float]
TURNS = 8


def main(kind: str, flags: list[str]) -> None:
    config = cli.parse(GPT2TrainConfig, flags)
    set_threads(1)
    if kind == "tracing":
        print(json.dumps(tracing(config)), flush=True)
        return
    began, tokens = {"ours": ours, "hf": huggingface}[kind](config)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gpu = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0
    pair = [Path(config.trace_output_dir, f"{config.trace_name}_{side}.json") for side in ("host", "device")]
    size = sum(path.stat().st_size for path in pair) / 1e6 if config.enable_tracing else 0.0
    wall, cpu = zip(*began, strict=True)
    figures = {"wall": wall, "cpu": cpu, "tokens": tokens, "rss_mb": peak, "gpu_mb": gpu, "pair_mb": size}
    print(json.dumps(figures), flush=True)


def our_trainer(config: TrainConfig) -> Any:
    from gpt2.model import GPT2
    from utils.training.trainer import Trainer
    from utils.watch import Watch

    return Trainer(config, GPT2, read_world(), Watch(0, 1, config.dist_timeout))


def ours(config: TrainConfig) -> tuple[list[Clocks], list[float]]:
    """Train with utils/training; when each step began, and its tokens."""
    trainer = our_trainer(config)
    began: list[Clocks] = []
    tokens: list[float] = []
    run = trainer.stepper.run

    def timed(*arguments: Any) -> Any:
        began.append(now())
        result = run(*arguments)
        tokens.append(result.tokens)
        return result

    trainer.stepper.run = timed
    trainer.train()
    return began, tokens


def tracing(config: TrainConfig) -> dict[str, Any]:
    """Seconds (time, CPU time) of equal steps in each turn: without a tracer, before a trace, in it.

    Steps at whose end the profiler starts, stops or writes are left out.
    """
    from chakra_et import ChakraTracer

    trainer = our_trainer(config)
    trainer.model.train()
    batch = next(trainer._micro_batches())

    def step(tracer: ChakraTracer | None = None) -> Clocks:
        wall, cpu = now()
        trainer.stepper.run(0, itertools.repeat(batch))
        if tracer is not None:
            tracer.step()
        after = now()
        return after[0] - wall, after[1] - cpu

    for _ in range(3):  # caches and memory settle
        step()
    times: dict[str, list[list[Clocks]]] = {"plain": [], "before": [], "traced": []}
    for turn in range(TURNS):
        plain = [step(), step()]
        with ChakraTracer(
            config.trace_output_dir, f"turn{turn}", wait_steps=3, warmup_steps=1, active_steps=3
        ) as tracer:
            steps = [step(tracer) for _ in range(7)]
        for name, own in zip(times, (plain, steps[:2], steps[4:6]), strict=True):
            times[name].append(own)
    return {**times, "gpu": torch.cuda.is_available()}


def huggingface(config: TrainConfig) -> tuple[list[Clocks], list[float]]:
    """The same with Hugging Face's Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from utils.data.tokenizers import load_tokenizer
    from utils.data_utils import build_datasets, stack

    torch.manual_seed(config.seed)
    settings: dict[str, Any] = dict(config.presets[config.model_name])
    model = GPT2LMHeadModel(GPT2Config(**settings))
    tokenizer, _ = load_tokenizer(config.family, config.model_name, config, model.config.vocab_size)
    samples, _ = build_datasets(config.family, tokenizer, config, config.seed)
    began: list[Clocks] = []
    counts: list[torch.Tensor] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(now())

    class Counting(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            counts.append(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *rest)

    arguments = TrainingArguments(
        output_dir=config.save_dir,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        bf16=config.bf16,
        logging_steps=config.logging_steps,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=config.num_workers,
        remove_unused_columns=False,
        disable_tqdm=True,
        seed=config.seed,
        use_cpu=not torch.cuda.is_available(),
    )
    Counting(model, arguments, data_collator=stack, train_dataset=samples, callbacks=[Timer()]).train()
    return began, [float(count) for count in counts]


def now() -> Clocks:
    """The time, and the CPU time of all threads of this process, in seconds."""
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1], sys.argv[2:])
