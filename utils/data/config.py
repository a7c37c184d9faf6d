"""The data flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from utils.data.hub import DataError

MIN_LENGTH = 8


def flag(default: Any, help_text: str) -> Any:
    """A field that is a flag of the command line."""
    return field(default=default, metadata={"help": help_text})


@dataclass
class DataConfig:
    """What to train on, and how it is cut into samples."""

    dataset: str = flag(
        "squad", "squad (hub cache or hub), sample (the small one in data/) or a SQuAD JSON file"
    )
    tokenizer: str | None = flag(
        None, "tokenizer.json or its folder (default: Docker image, hub cache, hub, data/tokenizers)"
    )
    cache_dir: str | None = flag(
        None, "folder for downloads and tokenized data (default: HF_DATASETS_CACHE, then HF_HOME)"
    )
    max_seq_length: int | None = flag(
        None, "longest sample in tokens (default: 1024 for GPT-2 and 512 for BERT on GPUs, 128 on CPUs)"
    )
    pack: bool = flag(False, "GPT-2: fill samples with texts end to end instead of padding each text")
    padding: Literal["longest", "max"] = flag(
        "longest",
        "pad each batch to its longest sample, or all batches to --max-seq-length, so that every step has "
        "the same shapes",
    )
    require_dataset: bool = flag(
        False, "fail if --dataset squad is not available, instead of using the sample"
    )
    num_workers: int = flag(2, "data-loading processes per rank (0: load in the training process)")

    def __post_init__(self) -> None:
        if self.max_seq_length is not None and self.max_seq_length < MIN_LENGTH:
            raise DataError(f"--max-seq-length {self.max_seq_length}: must be at least {MIN_LENGTH}")
        if self.num_workers < 0:
            raise DataError(f"--num-workers {self.num_workers}: must not be negative")
