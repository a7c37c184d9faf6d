#!/usr/bin/env python3
"""Make a Megatron indexed dataset (.bin and .idx) from SQuAD JSON, plain text or JSON lines.

    python megatron_lm/preprocess_data.py data/squad_sample.json --output outputs/megatron/sample
    megatron_lm/_03_submit.sh --local MODEL=tiny DATA_PATH=outputs/megatron/sample

One document is: a SQuAD question after its paragraph; a block of text between empty lines; the field
``text`` of a JSON line. Each ends with the tokenizer's end-of-text token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et import cli
from megatron_lm.engine.indexed import Format, documents, open_tokenizer, write
from megatron_lm.settings import MODELS
from utils.data.hub import DataError


@dataclass
class PreprocessConfig:
    """Which files become a dataset, and where it goes."""

    inputs: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "files, read one after the other"}
    )
    output: str = field(default="", metadata={"help": "prefix of the .bin and .idx to write"})
    format: Format = field(default="auto", metadata={"help": "of the files; auto: by the file name's ending"})
    key: str = field(default="text", metadata={"help": "field of a JSON line that holds the text"})
    model: str = field(default="xl", metadata={"help": "model whose vocabulary must hold the tokens"})
    tokenizer: str | None = field(
        default=None, metadata={"help": "tokenizer.json or a folder with one; default: GPT-2's"}
    )

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("name at least one file")
        if not self.output:
            raise ValueError("--output: give the prefix of the files to write")
        if self.model not in MODELS:
            raise ValueError(f"--model {self.model}: choose from {', '.join(MODELS)}")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(PreprocessConfig, argv, description=(__doc__ or "").splitlines()[0])
    count, tokens = preprocess(config)
    print(f"{config.output}.bin, {config.output}.idx: {count} documents, {tokens} tokens")
    return 0


def preprocess(config: PreprocessConfig) -> tuple[int, int]:
    """Write the dataset; returns (documents, tokens). Raises ``DataError``, and then nothing is written."""
    tokenizer = open_tokenizer(MODELS[config.model].vocabulary, config.tokenizer)
    texts = [text for name in config.inputs for text in documents(Path(name), config.format, config.key)]
    if not texts:
        raise DataError(f"{', '.join(config.inputs)}: no document found; give files with text.")
    return write(Path(config.output), texts, tokenizer)


if __name__ == "__main__":
    sys.exit(cli.run(main, DataError))
