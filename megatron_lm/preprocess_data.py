#!/usr/bin/env python3
"""Make a Megatron indexed dataset (.bin and .idx) of SQuAD JSON, plain text or JSON lines.

    python megatron_lm/preprocess_data.py data/squad_sample.json --output outputs/megatron/sample
    DATA_PATH=$PWD/outputs/megatron/sample MODEL=tiny megatron_lm/_03_submit.sh --local

One document is: a SQuAD question after its paragraph; a block of text between empty lines; the
field ``text`` of a JSON line. Each ends with the tokenizer's end-of-text token.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
from tqdm import tqdm

from chakra_et import cli
from megatron_lm.settings import MODELS
from utils.data.config import DataConfig
from utils.data.hub import DataError
from utils.data.squad import read_squad_json
from utils.data.tokenizers import load_tokenizer

Format = Literal["auto", "squad", "text", "jsonl"]


@dataclass
class PreprocessConfig:
    """What becomes a dataset, and where."""

    inputs: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "files, read one after another"}
    )
    output: str = field(default="", metadata={"help": "prefix of the .bin and .idx that are written"})
    format: Format = field(default="auto", metadata={"help": "of the inputs; auto: by the file's ending"})
    key: str = field(default="text", metadata={"help": "field of a JSON line that holds the text"})
    model: str = field(default="xl", metadata={"help": "whose vocabulary must hold the tokens"})
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "tokenizer.json or its folder; default: GPT-2's"},
    )

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("name at least one file to make a dataset of")
        if not self.output:
            raise ValueError("--output must name the prefix of the files to write")
        if self.model not in MODELS:
            raise ValueError(f"--model {self.model} is unknown; choose from {', '.join(MODELS)}")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(PreprocessConfig, argv, description=__doc__.splitlines()[0])
    try:
        documents, tokens = preprocess(config)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{config.output}.bin, {config.output}.idx: {documents} documents, {tokens} tokens")
    return 0


def preprocess(config: PreprocessConfig) -> tuple[int, int]:
    """Write the dataset; returns its documents and tokens. Raises ``DataError``; then nothing is written."""
    tokenizer = open_tokenizer(config.model, config.tokenizer)
    texts = [text for name in config.inputs for text in documents(Path(name), config.format, config.key)]
    if not texts:
        raise DataError(f"{', '.join(config.inputs)}: no document in it; give files with text.")
    return write(Path(config.output), texts, tokenizer)


def open_tokenizer(model: str, tokenizer: str | None = None) -> Any:
    return load_tokenizer("gpt2", "gpt2", DataConfig(tokenizer=tokenizer), MODELS[model].vocabulary)[0]


def documents(path: Path, form: Format, key: str) -> Iterator[str]:
    """The texts of one file. Raises ``DataError`` where it isn't what ``form`` says."""
    if form == "auto":
        form = {".json": "squad", ".jsonl": "jsonl"}.get(path.suffix, "text")
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
            raise DataError(f"{path}, line {number}: field {key!r} is no text.")
        yield value


def write(prefix: Path, texts: Iterable[str], tokenizer: Any) -> tuple[int, int]:
    """Write PREFIX.bin and PREFIX.idx; returns documents and tokens."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    endings = (".bin", ".idx")
    try:
        builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=DType.optimal_dtype(len(tokenizer)))
        count = tokens = 0
        for text in tqdm(texts, unit="document", disable=not sys.stderr.isatty()):
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            builder.add_document(np.array(ids), [len(ids)])
            count, tokens = count + 1, tokens + len(ids)
        builder.finalize(f"{unfinished}.idx")
        # The index last: a dataset is there when its index is.
        for ending in endings:
            os.replace(f"{unfinished}{ending}", f"{prefix}{ending}")
    except OSError as error:
        raise DataError(f"{prefix}: can't be written ({error.strerror or error}).") from None
    finally:
        for ending in endings:
            Path(f"{unfinished}{ending}").unlink(missing_ok=True)
    return count, tokens


if __name__ == "__main__":
    sys.exit(main())
