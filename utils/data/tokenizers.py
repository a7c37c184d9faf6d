"""Stage 2 of the data: find the tokenizer (--tokenizer, the Docker image, the hub cache, the hub, then the
small ones in data/), and tokenize each distinct text once.

SQuAD asks about five questions per paragraph, so questions and contexts are tokenized separately and joined
by the data sets in ``data_utils``: a fifth of the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from utils.data.config import DataConfig, DataError, hub_problem, log_once
from utils.data.squad import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Family = Literal["gpt2", "bert"]

IMAGE_FOLDER = Path("/workspace/pretrained_models")
SMALL_FOLDER = Path(__file__).resolve().parents[2] / "data" / "tokenizers"
# All sizes of a family share one vocabulary, named after the smallest.
VOCABULARY = {"gpt2": "gpt2", "bert": "bert-base-uncased"}
HUB_NAMES = {
    "gpt2": ("openai-community/gpt2", "gpt2"),
    "bert": ("google-bert/bert-base-uncased", "bert-base-uncased"),
}
_END = "<|endoftext|>"
SPECIAL_TOKENS = {
    "gpt2": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": _END},
    "bert": {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
}
MAX_LENGTH = {"gpt2": 1024, "bert": 512}


def load_tokenizer(
    family: Family, model_name: str, config: DataConfig, vocab_size: int
) -> tuple[PreTrainedTokenizerFast, str]:
    """Return the first tokenizer found, and where it came from in words (also logged on rank 0).

    A tokenizer is a tokenizer.json or a folder with one, as ``save_pretrained`` of a fast tokenizer writes.
    Its ids must be below ``vocab_size``, the number of rows of the model's embedding. If --tokenizer doesn't
    fit, ``DataError`` is raised; any other place whose tokenizer doesn't fit is skipped with a warning.
    """
    chosen = Path(config.tokenizer).expanduser() if config.tokenizer is not None else None
    wanted = [(chosen, f"--tokenizer {chosen}")] if chosen is not None else None
    for path, source in wanted or _candidates(family, model_name):
        try:
            tokenizer = _open(family, path, vocab_size)
        except DataError as error:
            if wanted:
                raise DataError(f"{source}: {error}") from error
            log_once(logging.WARNING, f"tokenizer: {source} ({path}) is skipped: {error}")
            continue
        log_once(logging.INFO, f"tokenizer: {source}")
        return tokenizer, source
    raise DataError(f"no {family} tokenizer fits a vocabulary of {vocab_size}; give one with --tokenizer")


def _candidates(family: Family, model_name: str) -> Iterator[tuple[Path, str]]:
    """Places to look in, best first; the hub is asked only after the ones before it failed."""
    import huggingface_hub

    for name in dict.fromkeys((model_name, VOCABULARY[family])):
        folder = IMAGE_FOLDER / name
        if folder.is_dir():
            yield folder, f"the image's {folder}"

    for repository in HUB_NAMES[family]:
        cached = huggingface_hub.try_to_load_from_cache(repository, "tokenizer.json")
        if isinstance(cached, str):
            yield Path(cached), f"the hub cache's {repository}"

    problem = hub_problem()
    if problem is None:
        repository = HUB_NAMES[family][0]
        if not sys.stderr.isatty():
            huggingface_hub.utils.disable_progress_bars()
        try:
            path = huggingface_hub.hf_hub_download(repository, "tokenizer.json")
            yield Path(path), f"the hub's {repository}"
            problem = "the hub's tokenizer doesn't fit"
        except Exception as error:  # whatever the hub's library raises, the small tokenizers are still there
            problem = f"the hub failed: {type(error).__name__}: {error}".splitlines()[0]
    name = VOCABULARY[family]
    yield SMALL_FOLDER / name, f"the small one in data/tokenizers/{name} ({problem})"


def _open(family: Family, path: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    # Imported late: it takes seconds.
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no such file: {file}; give a tokenizer.json or a folder that has one")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{file} isn't a file of the tokenizers library ({error})") from error

    specials = SPECIAL_TOKENS[family]
    vocabulary = backend.get_vocab()
    # Checked here because transformers would add a missing token with an id beyond the vocabulary.
    if missing := [token for token in dict.fromkeys(specials.values()) if token not in vocabulary]:
        raise DataError(f"{file} has no {', '.join(missing)}, which {family} needs")
    if (top := max(vocabulary.values())) >= vocab_size:
        raise DataError(f"{file} has ids up to {top}, but the model's vocabulary ends at {vocab_size - 1}")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=MAX_LENGTH[family],
        clean_up_tokenization_spaces=False,
        **specials,
    )


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


def tokenize_pairs(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> TokenizedPairs:
    """The ids of all questions and contexts, without white space at their ends. A fast tokenizer uses all
    cores by itself (RAYON_NUM_THREADS limits them).
    """
    numbers: dict[str, int] = {}
    rows = [[numbers.setdefault(text.strip(), len(numbers)) for text in example] for example in examples]
    pairs = np.array(rows, dtype=np.int32)
    texts = list(numbers)
    key = hashlib.sha256(json.dumps([texts, tokenizer.backend_tokenizer.to_str()]).encode() + pairs.tobytes())
    # Set explicitly, because the library otherwise warns in every DataLoader worker that is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    rows = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # or it warns about texts longer than the model, which are cut later
    )["input_ids"]
    ids = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    return TokenizedPairs(ids, np.cumsum([len(row) for row in rows]), pairs, key.hexdigest())
