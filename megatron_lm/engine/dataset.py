"""The training samples: megatron-core's GPT dataset over .bin and .idx files, and this rank's share of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lm import datasets
from megatron_lm.engine import index_maps, indexed
from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER
from utils.data.hub import DataError

log = logging.getLogger(__name__)
SAMPLE = FOLDER.parent / "data" / "squad_sample.json"
BLOCK, MOST_TOKENS = 1 << 20, 1 << 34  # that are compared with the vocabulary
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
    after the model; those of Megatron-LM there are used if they fit. Raises ``DataError`` if DATA_PATH
    names no complete dataset, or one of a larger vocabulary.
    """
    prefix = FOLDER / settings.data_path if settings.data_path else _sample(settings)
    if problem := datasets.problem(prefix):
        raise DataError(f"DATA_PATH={prefix}: {problem}.")
    _check_vocabulary(prefix, settings)
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
    for sentence in index_maps.adopt(train, prefix, settings):
        if dist.get_rank() == 0:
            log.warning("%s", sentence)
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


def _check_vocabulary(prefix: Path, settings: Settings) -> None:
    """Every rank looks at its share of the tokens, or of ``MOST_TOKENS`` of them. Raises ``DataError``."""
    tokens = np.memmap(f"{prefix}.bin", IndexedDataset(str(prefix)).index.dtype, "r")
    every = dist.get_world_size() * max(1, round(len(tokens) / MOST_TOKENS))
    shares = (tokens[at : at + BLOCK] for at in range(0, len(tokens), BLOCK)[dist.get_rank() :: every])
    largest = torch.tensor([max((int(share.max()) for share in shares), default=0)])
    largest = largest.cuda() if torch.cuda.is_available() else largest
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    size = settings.size.vocabulary
    if largest >= size:
        raise DataError(
            f"DATA_PATH={prefix}: has token {largest.item()}, and VOCAB_SIZE is {size}: set VOCAB_SIZE to "
            f"at least {int(largest.item()) + 1}, or give data that was made with this vocabulary."
        )


def _sample(settings: Settings) -> Path:
    """This repository's sample as a dataset, made by rank 0 unless it is up to date."""
    prefix = OUTPUTS / f"sample_{settings.size.vocabulary}"
    made = Path(f"{prefix}.idx")
    if dist.get_rank() == 0 and not (made.exists() and made.stat().st_mtime > SAMPLE.stat().st_mtime):
        texts = indexed.documents(SAMPLE, "squad", "")
        indexed.write(prefix, texts, indexed.open_tokenizer(settings.size.vocabulary))
    dist.barrier()
    return prefix
