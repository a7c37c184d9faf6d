"""BERT sizes and training defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from utils.data.tokenizers import Family
from utils.training.config import TrainConfig

# Layers, heads, width and feed-forward width of the published models (Devlin et al. 2019, section 3). "tiny"
# is for tests and keeps the real vocabulary and context.
PRESETS: dict[str, dict[str, int]] = {
    "bert-base-uncased": {
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
    },
    "bert-large-uncased": {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_size": 1024,
        "intermediate_size": 4096,
    },
    "tiny": {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 128},
}


@dataclass
class BertTrainConfig(TrainConfig):
    """Flags of bert/train.py."""

    family: ClassVar[Family] = "bert"
    presets: ClassVar[dict[str, dict[str, int]]] = PRESETS
    context: ClassVar[int] = 512

    model_name: str = field(default="bert-base-uncased", metadata={"help": "one of " + ", ".join(PRESETS)})
    learning_rate: float = field(default=1e-4, metadata={"help": "peak learning rate of AdamW"})
    save_dir: str = field(default="checkpoints/bert", metadata={"help": "folder of the checkpoints"})
