"""Index maps that Megatron-LM left beside a dataset, used in place of megatron-core's own where they fit it.

They are ``small/…_indexmap_3200ns_1024sl_1234s_doc_idx.npy``, ``…_sample_idx.npy`` and
``…_shuffle_idx.npy``: for so many samples of that sequence length with that seed, the order of documents, the
document (by its place in that order) and offset where each sample starts, and the order of samples.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lm.settings import Settings

KINDS = ("doc", "sample", "shuffle")
NAME = re.compile(r"(.*)_indexmap_(\d+)ns_(\d+)sl_(\d+)s_doc_idx\.npy")


def adopt(dataset: Any, prefix: Path, settings: Settings) -> list[str]:
    """Let a GPTDataset of ``prefix`` use the maps in the folder named after MODEL; a sentence on each set."""
    needed, said = settings.train_iters * settings.global_batch_size, []
    for path in sorted((prefix.parent / settings.model).glob("*_indexmap_*_doc_idx.npy")):
        match = NAME.fullmatch(path.name)
        if match is None or match[1] not in (prefix.name, f"{prefix.name}_train"):
            continue
        samples, length, seed = map(int, match.groups()[1:])
        base, maps = str(path).removesuffix("doc_idx.npy"), None
        if (length, seed) != (settings.size.sequence, settings.seed):
            why = f"SEQ_LENGTH is {settings.size.sequence} and SEED {settings.seed}"
        elif samples < needed:
            why = f"TRAIN_ITERS × GLOBAL_BATCH_SIZE is {needed}"
        else:
            why, maps = _read(base, dataset.dataset.sequence_lengths, length, needed)
        if maps is None:
            said.append(f"index maps {base}*.npy are not used: {why}")
            continue
        dataset.document_index, dataset.sample_index, dataset.shuffle_index = maps
        return [*said, f"index maps {base}*.npy are used"]
    return said


def _read(base: str, lengths: Any, length: int, needed: int) -> tuple[str, list[Any] | None]:
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
