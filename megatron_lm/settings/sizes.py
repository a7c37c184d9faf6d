"""The models that can be trained, by the name that MODEL gives them."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """A GPT-2: hidden size, transformer layers, attention heads, tokens a sequence, vocabulary."""

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int


# tiny runs on a laptop; its vocabulary is that of the sample's tokenizer.
MODELS = {
    "tiny": Size(64, 4, 4, 64, 2_920),
    "small": Size(1024, 24, 16, 1024, 50_257),
    "xl": Size(1600, 48, 16, 1024, 50_257),
}
