"""Stage 2 of the data: tokenize each distinct text once and keep the result on disk.

SQuAD asks about five questions a paragraph, so texts are tokenized apart and put together by the datasets:
a fifth of the work and of the space, and one cache serves every --max-seq-length, --pack and family layout.

The cache is one .npz rather than a ``datasets`` map: a fast tokenizer encodes batches on all cores by itself
(RAYON_NUM_THREADS limits them), numpy reads the whole of SQuAD back in a moment, and importing ``datasets``
takes longer than either.
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
from utils.data.hub import tell
from utils.data.squad import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1  # part of the cache's key: raise it when the layout or the tokenizing changes
BATCH = 1000


@dataclass(frozen=True)
class TokenizedPairs:
    """Questions and contexts as ids, without special tokens.

    ``ids``: int32 [tokens], all distinct texts end to end; ``ends``: int64 [texts], where each ends;
    ``pairs``: int32 [questions, 2], the number of the question's text and of its context's;
    ``fingerprint``: a hash of texts and tokenizer, equal wherever the data is equal.
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

    Processes may do this at the same time: each writes under a name of its own and renames. A damaged
    cache is built again and an unwritable folder is done without, each with one line on rank 0.
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

    if arrays := _read(path):
        return TokenizedPairs(*arrays, pairs, fingerprint)
    arrays = _tokenize(texts, tokenizer)
    _write(path, *arrays)
    return TokenizedPairs(*arrays, pairs, fingerprint)


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    # Said aloud because the library otherwise warns in each DataLoader worker that is forked later.
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
                verbose=False,  # or it warns of texts longer than the model, which are cut later
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
        tell(logging.WARNING, f"tokenized data: {path} can't be used ({error}); tokenizing again")
        return None
    tell(logging.INFO, f"tokenized data: read from {path}")
    return ids, ends


def _write(path: Path, ids: np.ndarray, ends: np.ndarray) -> None:
    content = io.BytesIO()  # in memory first, for zipfile complains on stderr when a disk is full
    np.savez(content, ids=ids, ends=ends)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(content.getbuffer())
    except OSError as error:
        tell(logging.WARNING, f"tokenized data: can't be kept in {path.parent} ({error}); going on without")
