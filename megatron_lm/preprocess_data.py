#!/usr/bin/env python3
"""Make a Megatron indexed dataset (.bin and .idx) from SQuAD (.json), JSON lines (.jsonl) or plain text.

    python megatron_lm/preprocess_data.py data/squad_sample.json --output outputs/megatron/sample
    megatron_lm/_03_submit.sh --local MODEL=tiny DATA_PATH=outputs/megatron/sample

One document is: a SQuAD question after its paragraph; a block of text between empty lines; the field
``text`` of a JSON line. Each ends with the tokenizer's end-of-text token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from chakra_et import cli, files
from megatron_lm.settings import MODELS
from utils.data.config import DataConfig, DataError
from utils.data.squad import read_squad_json
from utils.data.tokenizers import load_tokenizer


@dataclass
class PreprocessConfig:
    inputs: tuple[str, ...] = cli.option("files, read one after the other", positional=True)
    output: str = cli.option("prefix of the .bin and .idx to write")
    model: str = cli.option("model whose vocabulary must hold the tokens", "xl", choices=tuple(MODELS))
    tokenizer: str | None = cli.option("tokenizer.json or a folder with one; default: GPT-2's", None)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(PreprocessConfig, argv, description=__doc__)
    count, tokens = preprocess(config)
    print(f"{config.output}.bin, {config.output}.idx: {count} documents, {tokens} tokens")
    return 0


def preprocess(config: PreprocessConfig) -> tuple[int, int]:
    """Write the dataset; returns (documents, tokens). Raises ``DataError``, and then nothing is written."""
    tokenizer = open_tokenizer(MODELS[config.model].vocabulary, config.tokenizer)
    texts = [text for name in config.inputs for text in documents(Path(name))]
    if not texts:
        raise DataError(f"{', '.join(config.inputs)}: no document found; give files with text.")
    return write(Path(config.output), texts, tokenizer)


def open_tokenizer(vocabulary: int, tokenizer: str | None = None) -> Any:
    """A GPT-2 tokenizer whose ids are below ``vocabulary``. Raises ``DataError``."""
    return load_tokenizer("gpt2", "gpt2", DataConfig(tokenizer=tokenizer), vocabulary)[0]


def documents(path: Path) -> Iterator[str]:
    """The texts of one file, whose ending says what it is. Raises ``DataError`` if it isn't."""
    if path.suffix == ".json":
        try:
            examples = read_squad_json(path)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        yield from (f"{example.context}\n{example.question}" for example in examples)
        return
    try:
        with files.open_regular(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as text ({error}).") from None
    if path.suffix != ".jsonl":
        yield from (block.strip() for block in text.split("\n\n") if block.strip())
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(f"{path}, line {number}: no JSON object with a field 'text'.") from None
        if not isinstance(value, str):
            raise DataError(f"{path}, line {number}: field 'text' is not text.")
        yield value


def write(prefix: Path, texts: Iterable[str], tokenizer: Any) -> tuple[int, int]:
    """Write PREFIX.bin and PREFIX.idx; returns (documents, tokens). Raises ``DataError``."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # The index comes last: a dataset exists once its index does.
        with files.atomic_file(f"{prefix}.idx") as index, files.atomic_file(f"{prefix}.bin") as content:
            builder = IndexedDatasetBuilder(content.name, dtype=DType.optimal_dtype(len(tokenizer)))
            count = tokens = 0
            for text in tqdm(texts, unit="document", disable=not sys.stderr.isatty()):
                ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
                builder.add_document(np.array(ids), [len(ids)])
                count, tokens = count + 1, tokens + len(ids)
            builder.finalize(index.name)
    except OSError as error:
        raise DataError(f"{prefix}: can't be written ({error.strerror or error}).") from None
    return count, tokens


if __name__ == "__main__":
    sys.exit(cli.run(main, DataError))
