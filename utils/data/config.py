"""The flags of the data."""

from __future__ import annotations

from dataclasses import dataclass, field

from utils.data.hub import DataError

MIN_LENGTH = 8


@dataclass
class DataConfig:
    """What to train on and how it is cut up."""

    dataset: str = field(
        default="squad",
        metadata={"help": "squad (hub or its cache), sample (the small one in data/) or a SQuAD JSON file"},
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "tokenizer.json or its folder; if not given: image, hub cache, hub, data/tokenizers"
        },
    )
    cache_dir: str | None = field(
        default=None,
        metadata={"help": "for downloads and tokenized data; if not given: HF_DATASETS_CACHE or HF_HOME"},
    )
    max_seq_length: int | None = field(
        default=None,
        metadata={"help": "tokens a sample; if not given: 1024 (GPT-2) or 512 (BERT) on a GPU, 128 on a CPU"},
    )
    pack: bool = field(
        default=False, metadata={"help": "GPT-2: fill samples with texts end to end instead of padding each"}
    )
    num_workers: int = field(
        default=2, metadata={"help": "processes a rank that load batches; 0: load in the training process"}
    )

    def __post_init__(self) -> None:
        if self.max_seq_length is not None and self.max_seq_length < MIN_LENGTH:
            raise DataError(f"--max-seq-length {self.max_seq_length}: must be at least {MIN_LENGTH}")
        if self.num_workers < 0:
            raise DataError(f"--num-workers {self.num_workers}: must not be negative")
