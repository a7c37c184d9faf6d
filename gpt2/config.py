"""GPT-2 sizes and training defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chakra_et.cli import option
from utils.data.tokenizers import Family
from utils.training.config import TrainConfig

# Layers, heads and width of the published models (Radford et al. 2019, table 2). "tiny" is for tests and
# keeps the real vocabulary and context, so it takes the same data and runs the same operators.
PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 32},
}


@dataclass
class GPT2TrainConfig(TrainConfig):
    """Flags of gpt2/train.py."""

    family: ClassVar[Family] = "gpt2"
    presets: ClassVar[dict[str, dict[str, int]]] = PRESETS

    model_name: str = option("model size", "gpt2", choices=tuple(PRESETS))
    learning_rate: float = option("peak learning rate of AdamW", 3e-4, above=0)
    save_dir: str = option("folder of the checkpoints", "checkpoints/gpt2")
