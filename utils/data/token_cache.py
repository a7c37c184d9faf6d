"""Stage 2 of the data: tokenize each distinct text once and keep the result on disk.

SQuAD asks about five questions per paragraph, so questions and contexts are tokenized separately and joined
by the data sets in ``data_utils``: a fifth of the work and of the space, and one cache serves every
--max-seq-length, with and without --pack.

The cache is one .npz file rather than a ``datasets`` map: a fast tokenizer uses all cores by itself
(RAYON_NUM_THREADS limits them), and numpy reads all of SQuAD back faster than ``datasets`` is imported.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from chakra_et.files import atomic_file
from utils.data.hub import log_once
from utils.data.squad import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1  # part of the cache key: raise it when the layout or the tokenization changes
BATCH = 1000


@dataclass(frozen=True)
class TokenizedPairs:
    """Questions and contexts as ids, without special tokens.

    ``ids``: int32 [tokens], all distinct texts end to end; ``ends``: int64 [texts], where each one ends;
    ``pairs``: int32 [questions, 2], the text numbers of each question and of its context;
    ``fingerprint``: a hash of texts and tokenizer, equal on ranks that have the same data.
    """

    ids: np.ndarray
    ends: np.ndarray
    pairs: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        question, context = self.pairs[index]
        return self._text(question), self._text(context)

    def _text(self, number: int) -> np.ndarray:
        return self.ids[self.ends[number - 1] if number else 0 : self.ends[number]]


def tokenize_pairs(
    examples: list[Example], tokenizer: PreTrainedTokenizerFast, cache_folder: Path
) -> TokenizedPairs:
    """Tokenize, or read what an earlier run with the same texts and tokenizer left in ``cache_folder``.

    Safe for several processes at once: each writes under a name of its own and renames. A damaged cache is
    rebuilt, and a folder that can't be written is ignored, each with one line on rank 0.
    """
    numbers: dict[str, int] = {}
    pairs = np.array(
        [[numbers.setdefault(text.strip(), len(numbers)) for text in example] for example in examples],
        dtype=np.int32,
    )
    texts = list(numbers)
    key = hashlib.sha256(json.dumps([FORMAT, texts, tokenizer.backend_tokenizer.to_str()]).encode())
    key.update(pairs.tobytes())
    fingerprint = key.hexdigest()
    path = cache_folder / f"{fingerprint[:32]}.npz"

    if (arrays := _read(path)) is None:
        arrays = _tokenize(texts, tokenizer)
        _write(path, *arrays)
    return TokenizedPairs(*arrays, pairs, fingerprint)


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    # Set explicitly, because the library otherwise warns in every DataLoader worker that is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    rows: list[list[int]] = []
    with tqdm(total=len(texts), desc="Tokenizing", unit="text", disable=None) as progress:
        for begin in range(0, len(texts), BATCH):
            batch = texts[begin : begin + BATCH]
            rows += tokenizer(
                batch,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # or it warns about texts longer than the model, which are cut later
            )["input_ids"]
            progress.update(len(batch))
    ids = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    return ids, np.cumsum([len(row) for row in rows], dtype=np.int64)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:  # the zip's checksums find any damaged byte
            ids, ends = arrays["ids"], arrays["ends"]
    except FileNotFoundError:
        return None
    except Exception as error:  # damage shows as an error of zipfile, zlib, struct or numpy
        log_once(logging.WARNING, f"tokenized data: {path} can't be used ({error}); tokenizing again")
        return None
    log_once(logging.INFO, f"tokenized data: read from {path}")
    return ids, ends


def _write(path: Path, ids: np.ndarray, ends: np.ndarray) -> None:
    content = io.BytesIO()  # in memory first: zipfile prints a traceback when the disk is full
    np.savez(content, ids=ids, ends=ends)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(content.getbuffer())
    except OSError as error:
        log_once(logging.WARNING, f"tokenized data: can't be cached in {path.parent} ({error})")
