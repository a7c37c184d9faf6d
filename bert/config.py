"""BERT sizes and training defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chakra_et.cli import option
from utils.data.tokenizers import Family
from utils.training.config import TrainConfig

# Layers, heads, width and feed-forward width of the published models (Devlin et al. 2019, section 3). "tiny"
# is for tests and keeps the real vocabulary and context.
FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
SIZES = {
    "bert-base-uncased": (12, 12, 768, 3072),
    "bert-large-uncased": (24, 16, 1024, 4096),
    "tiny": (2, 2, 32, 128),
}
PRESETS = {name: dict(zip(FIELDS, sizes, strict=True)) for name, sizes in SIZES.items()}


@dataclass
class BertTrainConfig(TrainConfig):
    """Flags of bert/train.py."""

    family: ClassVar[Family] = "bert"
    presets: ClassVar[dict[str, dict[str, int]]] = PRESETS

    model_name: str = option("model size", "bert-base-uncased", choices=tuple(PRESETS))
    save_dir: str = option("folder of the checkpoints", "checkpoints/bert")
