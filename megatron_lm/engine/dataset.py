"""The training samples: megatron-core's GPT dataset over .bin and .idx files, and this rank's share of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lm import preprocess_data, saved
from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER
from utils.data.config import DataError

log = logging.getLogger(__name__)
SAMPLE = FOLDER.parent / "data" / "squad_sample.json"
BLOCK, MOST_TOKENS = 1 << 20, 1 << 34  # that are compared with the vocabulary
KINDS = ("doc", "sample", "shuffle")
INDEX_MAP = re.compile(r"(.*)_indexmap_(\d+)ns_(\d+)sl_(\d+)s_doc_idx\.npy")
OUTPUTS = FOLDER.parent / "outputs" / "megatron"


def build(settings: Settings) -> GPTDataset:
    """The training split, long enough for all iterations; every rank calls this.

    Its index maps (order of documents, samples and shuffling) are kept beside the data, in a folder named
    after the model; those of Megatron-LM there are used if they fit. Raises ``DataError`` if DATA_PATH
    names no complete dataset, or one of a larger vocabulary.
    """
    prefix = FOLDER / settings.data_path if settings.data_path else _sample(settings)
    if problem := saved.dataset_damage(prefix):
        raise DataError(f"DATA_PATH={prefix}: {problem}.")
    _check_vocabulary(prefix, settings)
    size = settings.size.vocabulary
    # The part of a tokenizer that the dataset needs.
    known = {"class": "gpt2", "vocab_size": size}
    tokenizer = SimpleNamespace(vocab_size=size, eod=size - 1, pad=size - 1, unique_identifiers=known)
    config = GPTDatasetConfig(
        random_seed=settings.seed,
        sequence_length=settings.size.sequence,
        blend=([str(prefix)], None),
        split=settings.split,
        path_to_cache=str(prefix.parent / settings.model),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = settings.train_iters * settings.global_batch_size
    # No validation or test samples are used.
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    for sentence in adopt_index_maps(train, prefix, settings):
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


def adopt_index_maps(dataset: Any, prefix: Path, settings: Settings) -> list[str]:
    """Let a GPTDataset of ``prefix`` use the index maps that Megatron-LM left in the folder named after
    MODEL, where they fit it; a sentence on each set.

    They are ``small/…_indexmap_3200ns_1024sl_1234s_doc_idx.npy``, ``…_sample_idx.npy`` and
    ``…_shuffle_idx.npy``: for so many samples of that sequence length with that seed, the order of documents,
    the document (by its place in that order) and offset where each sample starts, and the order of samples.
    """
    needed, said = settings.train_iters * settings.global_batch_size, []
    for path in sorted((prefix.parent / settings.model).glob("*_indexmap_*_doc_idx.npy")):
        match = INDEX_MAP.fullmatch(path.name)
        if match is None or match[1] not in (prefix.name, f"{prefix.name}_train"):
            continue
        samples, length, seed = map(int, match.groups()[1:])
        base, maps = str(path).removesuffix("doc_idx.npy"), None
        if (length, seed) != (settings.size.sequence, settings.seed):
            why = f"SEQ_LENGTH is {settings.size.sequence} and SEED {settings.seed}"
        elif samples < needed:
            why = f"TRAIN_ITERS × GLOBAL_BATCH_SIZE is {needed}"
        else:
            why, maps = _index_maps(base, dataset.dataset.sequence_lengths, length, needed)
        if maps is None:
            said.append(f"index maps {base}*.npy are not used: {why}")
            continue
        dataset.document_index, dataset.sample_index, dataset.shuffle_index = maps
        return [*said, f"index maps {base}*.npy are used"]
    return said


def _index_maps(base: str, lengths: Any, length: int, needed: int) -> tuple[str, list[Any] | None]:
    """(why not, the three maps): each sample must start ``length`` tokens after the one before."""
    try:
        maps = [np.load(f"{base}{kind}_idx.npy", mmap_mode="r") for kind in KINDS]
        documents, samples, shuffled = maps
        starts = np.concatenate([[0], np.cumsum(lengths[documents], dtype=np.int64)])
        places = starts[samples[:, 0]] + samples[:, 1]
        fits = np.array_equal(places, np.arange(len(samples)) * length) and len(shuffled) >= needed
        if not fits or shuffled.max() >= len(samples) - 1 or samples[:, 0].max() >= len(documents):
            return "they are of another .bin and .idx", None
    except (OSError, ValueError, IndexError) as error:
        return f"they can't be read, or are of another .bin and .idx ({error})", None
    return "", maps


def _check_vocabulary(prefix: Path, settings: Settings) -> None:
    """Every rank looks at its share of the tokens, or of ``MOST_TOKENS`` of them. Raises ``DataError``."""
    tokens = np.memmap(f"{prefix}.bin", IndexedDataset(str(prefix)).index.dtype, "r")
    every = dist.get_world_size() * max(1, round(len(tokens) / MOST_TOKENS))
    shares = (tokens[at : at + BLOCK] for at in range(0, len(tokens), BLOCK)[dist.get_rank() :: every])
    largest = torch.tensor([max((int(share.max()) for share in shares), default=0)])
    largest = largest.cuda() if torch.cuda.is_available() else largest
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    size = settings.size.vocabulary
    if (token := int(largest.item())) >= size:
        how = f"set VOCAB_SIZE to at least {token + 1}, or give data that was made with this vocabulary."
        raise DataError(f"DATA_PATH={prefix}: has token {token}, and VOCAB_SIZE is {size}: {how}")


def _sample(settings: Settings) -> Path:
    """This repository's sample as a dataset, made by rank 0 unless it is up to date."""
    prefix = OUTPUTS / f"sample_{settings.size.vocabulary}"
    made = Path(f"{prefix}.idx")
    if dist.get_rank() == 0 and not (made.exists() and made.stat().st_mtime > SAMPLE.stat().st_mtime):
        texts = preprocess_data.documents(SAMPLE)
        preprocess_data.write(prefix, texts, preprocess_data.open_tokenizer(settings.size.vocabulary))
    dist.barrier()
    return prefix
