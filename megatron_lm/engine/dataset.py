"""The training samples: megatron-core's GPT dataset over .bin and .idx, and this rank's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_lm import preprocess_data
from megatron_lm.settings import Settings
from utils.data.hub import DataError

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "squad_sample.json"
OUTPUTS = ROOT / "outputs" / "megatron"


class Vocabulary:
    """What the dataset wants to know of the tokenizer."""

    def __init__(self, size: int) -> None:
        self.vocab_size = size
        self.eod = self.pad = size - 1
        self.unique_identifiers = {"class": "gpt2", "vocab_size": size}


def build(settings: Settings) -> GPTDataset:
    """The training split, long enough for all iterations; every rank calls it.

    Its index maps (document, sample and shuffle order) are kept in a folder named after the model, beside the
    data. Raises ``DataError`` where DATA_PATH holds no dataset.
    """
    prefix = Path(settings.data_path) if settings.data_path else _sample(settings)
    for ending in (".bin", ".idx"):
        if not Path(f"{prefix}{ending}").is_file():
            raise DataError(
                f"DATA_PATH={prefix}: no {prefix.name}{ending} there; make it with preprocess_data.py."
            )
    config = GPTDatasetConfig(
        random_seed=settings.seed,
        sequence_length=settings.size.sequence,
        blend=([str(prefix)], None),
        split=settings.split,
        path_to_cache=str(prefix.parent / settings.model),
        tokenizer=Vocabulary(settings.size.vocabulary),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = settings.train_iters * settings.global_batch_size
    # Validation and test samples are not asked for.
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    return train


def _sample(settings: Settings) -> Path:
    """The sample of this repository, made into a dataset by rank 0 where that has not been done."""
    prefix = OUTPUTS / f"sample_{settings.size.vocabulary}"
    made = Path(f"{prefix}.idx")
    if dist.get_rank() == 0 and not (made.exists() and made.stat().st_mtime > SAMPLE.stat().st_mtime):
        texts = preprocess_data.documents(SAMPLE, "squad", "")
        preprocess_data.write(prefix, texts, preprocess_data.open_tokenizer(settings.model))
    dist.barrier()
    return prefix


def micro_batches(
    dataset: Any, settings: Settings, data_rank: int, consumed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's micro-batches from sample ``consumed`` on: tokens, labels, loss_mask and
    position_ids, each (micro batch size, sequence). All ranks together take the samples in their order."""
    size = settings.micro_batch_size
    first = consumed + data_rank * size
    while first + size <= len(dataset):
        rows = [dataset[first + row] for row in range(size)]
        names = ("tokens", "labels", "loss_mask", "position_ids")
        yield {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in names}
        first += size * settings.dp_size
