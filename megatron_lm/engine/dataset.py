"""The training samples: megatron-core's GPT dataset over .bin and .idx files, and this rank's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_lm import datasets
from megatron_lm.engine import indexed
from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER
from utils.data.hub import DataError

SAMPLE = FOLDER.parent / "data" / "squad_sample.json"
OUTPUTS = FOLDER.parent / "outputs" / "megatron"


class Vocabulary:
    """The part of a tokenizer that the dataset needs."""

    def __init__(self, size: int) -> None:
        self.vocab_size = size
        self.eod = self.pad = size - 1
        self.unique_identifiers = {"class": "gpt2", "vocab_size": size}


def build(settings: Settings) -> GPTDataset:
    """The training split, long enough for all iterations; every rank calls this.

    Its index maps (order of documents, samples and shuffling) are kept beside the data, in a folder named
    after the model. Raises ``DataError`` if DATA_PATH names no complete dataset.
    """
    prefix = FOLDER / settings.data_path if settings.data_path else _sample(settings)
    if problem := datasets.problem(prefix):
        raise DataError(f"DATA_PATH={prefix}: {problem}.")
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
    # No validation or test samples are used.
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    return train


def micro_batches(
    dataset: Any, settings: Settings, data_rank: int, consumed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's micro-batches from sample ``consumed`` on: tokens, labels, loss_mask and
    position_ids, each (micro-batch size, sequence). All ranks together take the samples in order."""
    size = settings.micro_batch_size
    first = consumed + data_rank * size
    while first + size <= len(dataset):
        rows = [dataset[first + row] for row in range(size)]
        names = ("tokens", "labels", "loss_mask", "position_ids")
        yield {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in names}
        first += size * settings.dp_size


def _sample(settings: Settings) -> Path:
    """This repository's sample as a dataset, made by rank 0 unless it is up to date."""
    prefix = OUTPUTS / f"sample_{settings.size.vocabulary}"
    made = Path(f"{prefix}.idx")
    if dist.get_rank() == 0 and not (made.exists() and made.stat().st_mtime > SAMPLE.stat().st_mtime):
        texts = indexed.documents(SAMPLE, "squad", "")
        indexed.write(prefix, texts, indexed.open_tokenizer(settings.size.vocabulary))
    dist.barrier()
    return prefix
