"""Texts become Megatron's indexed dataset: PREFIX.bin holds the tokens, PREFIX.idx the documents' bounds."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from chakra_et import files
from utils.data.config import DataConfig
from utils.data.hub import DataError
from utils.data.squad import read_squad_json
from utils.data.tokenizers import load_tokenizer

Format = Literal["auto", "squad", "text", "jsonl"]
FORMATS: dict[str, Format] = {".json": "squad", ".jsonl": "jsonl"}


def open_tokenizer(vocabulary: int, tokenizer: str | None = None) -> Any:
    """A GPT-2 tokenizer whose ids are below ``vocabulary``. Raises ``DataError``."""
    return load_tokenizer("gpt2", "gpt2", DataConfig(tokenizer=tokenizer), vocabulary)[0]


def documents(path: Path, form: Format, key: str) -> Iterator[str]:
    """The texts of one file. Raises ``DataError`` if it does not have the format ``form``."""
    if form == "auto":
        form = FORMATS.get(path.suffix, "text")
    if form == "squad":
        try:
            examples = read_squad_json(path)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        yield from (f"{example.context}\n{example.question}" for example in examples)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as text ({error}).") from None
    if form == "text":
        yield from (block.strip() for block in text.split("\n\n") if block.strip())
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(f"{path}, line {number}: no JSON object with a field {key!r} (--key).") from None
        if not isinstance(value, str):
            raise DataError(f"{path}, line {number}: field {key!r} is not text.")
        yield value


def write(prefix: Path, texts: Iterable[str], tokenizer: Any) -> tuple[int, int]:
    """Write PREFIX.bin and PREFIX.idx; returns (documents, tokens). Raises ``DataError``."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            tokens_file, index_file = (
                stack.enter_context(files.temporary_file(f"{prefix}{ending}")) for ending in (".bin", ".idx")
            )
            builder = IndexedDatasetBuilder(str(tokens_file.path), dtype=DType.optimal_dtype(len(tokenizer)))
            count = tokens = 0
            for text in tqdm(texts, unit="document", disable=not sys.stderr.isatty()):
                ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
                builder.add_document(np.array(ids), [len(ids)])
                count, tokens = count + 1, tokens + len(ids)
            builder.finalize(str(index_file.path))
            # The index comes last: a dataset exists once its index does.
            tokens_file.put_in_place()
            index_file.put_in_place()
    except OSError as error:
        raise DataError(f"{prefix}: can't be written ({error.strerror or error}).") from None
    return count, tokens
