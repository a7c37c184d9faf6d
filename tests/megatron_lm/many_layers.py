"""The training of a model of 48 layers that is small enough for eight ranks on a laptop."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lm import settings
from utils import distributed

settings.MODELS["tiny"] = settings.Size(32, 48, 4, 32, 2_920, 128, 4)

if __name__ == "__main__":
    import importlib

    distributed.run(importlib.import_module("megatron_lm._00_pretrain_gpt").main, 300)
