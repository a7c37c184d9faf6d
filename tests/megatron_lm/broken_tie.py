"""The training with the tie of first and last embedding broken: their gradients are not added up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import distributed

if __name__ == "__main__":
    import importlib

    pretrain = importlib.import_module("megatron_lm._00_pretrain_gpt")
    from megatron_lm.engine import model

    model.finalize_model_grads = None
    distributed.run(pretrain.main, 120)
