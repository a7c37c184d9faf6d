"""The flags of gpt2/train.py and bert/train.py, their checks, and the JSON file that records them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from chakra_et import cli
from chakra_et.capture.config import TraceConfig
from chakra_et.cli import option
from chakra_et.files import write_json
from utils.data.config import DataConfig
from utils.data.tokenizers import MAX_LENGTH, Family


def parse_config(config_class: type[TrainConfig], description: str | None) -> TrainConfig:
    """Parse the command line of a train.py. On a bad flag rank 0 prints one sentence and all exit with 2."""
    program = f"{config_class.family}/train.py"
    with contextlib.ExitStack() as quiet:
        if os.environ.get("RANK", "0") != "0":
            quiet.enter_context(contextlib.redirect_stderr(quiet.enter_context(open(os.devnull, "w"))))
        return cli.parse(config_class, prog=program, description=description)


@dataclass
class TrainConfig(TraceConfig, DataConfig):
    """All options of a training run; gpt2/ and bert/ add their models and defaults."""

    family: ClassVar[Family]
    presets: ClassVar[dict[str, dict[str, int]]]

    model_name: str = option("model size", "")
    dropout: float | None = option("dropout rate of all layers (default: the model's own)", None)

    batch_size: int = option("samples per forward pass on each GPU (or CPU process)", 4, least=1)
    gradient_accumulation_steps: int = option("forward passes per optimizer step", 1, least=1)
    learning_rate: float = option("peak learning rate of AdamW", 1e-4, above=0)
    weight_decay: float = option("weight decay of AdamW; none on biases and norms", 0.01, least=0)
    warmup_steps: int = option("steps of linear warm-up; the rate then decays linearly to 0", 100, least=0)
    max_grad_norm: float = option("clip the gradient to this norm (0: no clipping)", 1.0, least=0)
    num_epochs: int = option("passes over the training data", 3, least=1)
    max_steps: int | None = option(
        "optimizer steps, in place of --num-epochs (0: use --num-epochs)", None, least=0
    )
    num_gpus: int | None = option(
        "fail unless this many processes were launched (default: any number)", None, least=1
    )
    seed: int = option("seed of initial weights, data order, masks and dropout", 42, least=0, most=2**64 - 1)
    bf16: bool = option("compute in bfloat16 where that is safe (autocast)", False)
    gradient_checkpointing: bool = option("compute activations again instead of keeping them", False)
    compile: bool = option("compile the model with torch.compile", False)

    logging_steps: int = option("log every N steps", 10, least=1)
    eval_steps: int = option("evaluate every N steps and at the end (0: at the end only)", 1000, least=0)
    skip_eval: bool = option("never evaluate; best_model is then the final model", False)
    save_steps: int = option(
        "save a checkpoint every N steps and at the end (0: best_model only)", 1000, least=0
    )
    save_dir: str = option("folder of the checkpoints", "checkpoints")
    resume_from_checkpoint: str | None = option("checkpoint folder, or 'latest' in --save-dir", None)
    report_to: Literal["tensorboard", "wandb", "none"] = option("where metrics go besides the log", "none")
    convert: bool = option("with --enable-tracing: convert the traces to .et files at the end", True)
    dist_timeout: float = option("end the run if a rank hangs for this many seconds", 600.0, above=0)

    def __post_init__(self) -> None:
        TraceConfig.__post_init__(self)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        context = MAX_LENGTH[self.family]
        if self.max_seq_length is not None and self.max_seq_length > context:
            given = f"--max-seq-length {self.max_seq_length}"
            raise ValueError(f"{given} exceeds the {context} tokens of {self.model_name}'s context")
        if self.max_steps:
            self.check_trace_length(self.max_steps, "--max-steps")
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if self.num_gpus not in (None, launched):
            how = f"omit it, or launch `torchrun --nproc_per_node {self.num_gpus} {self.family}/train.py …`"
            raise ValueError(f"--num-gpus {self.num_gpus} needs as many processes, not {launched}: {how}")

    def check_trace_length(self, steps: int, origin: str) -> None:
        """Raise ValueError if the run ends before its trace is complete."""
        each = {name: getattr(self, f"trace_{name}_steps") for name in ("wait", "warmup", "active")}
        if self.enable_tracing and steps < (needed := sum(each.values())):
            flags = " + ".join(f"--trace-{name}-steps {count}" for name, count in each.items())
            raise ValueError(f"tracing needs {needed} steps ({flags}), but the run has {steps} ({origin})")

    def save(self, flag: str, path: Path) -> None:
        """Write all options as JSON, atomically. Raises OSError if the folder, that of ``flag``, can't be
        written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, dataclasses.asdict(self))
        except OSError as error:
            raise OSError(f"{flag} {path.parent} can't be written: {error.strerror}") from error
