#!/usr/bin/env python3
"""Turn a checkpoint of a GPT-2 into a Hugging Face folder.

    python megatron_lm/export_hf.py outputs/megatron/checkpoints --output outputs/megatron/gpt2

``GPT2LMHeadModel.from_pretrained`` loads the folder; rows that only pad the vocabulary are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from chakra_et import cli
from megatron_lm.settings import Size
from megatron_lm.settings.values import gpt2
from utils.training.checkpoint import CheckpointError, atomic_folder

# megatron-core's name of each part of a layer, and Hugging Face's.
PARTS = {
    "input_layernorm": "ln_1",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


@dataclass
class ExportConfig:
    """Which checkpoint to export, and where to."""

    checkpoint: str = field(default="", metadata={"positional": True, "help": "folder iter_…, or its parent"})
    output: str = field(default="", metadata={"help": "folder to write"})

    def __post_init__(self) -> None:
        if not self.checkpoint or not self.output:
            raise ValueError("give a checkpoint's folder and --output")


def main(argv: Sequence[str] | None = None) -> int:
    from megatron_lm.engine.checkpoint import read, size_of

    config = cli.parse(ExportConfig, argv, description=(__doc__ or "").splitlines()[0])
    meta, parts = read(Path(config.checkpoint).resolve())
    size = size_of(meta)
    if size != gpt2(size.hidden, size.layers, size.heads, size.sequence, size.vocabulary):
        raise CheckpointError(
            f"{config.checkpoint}: {meta['model']} is not a GPT-2: only a GPT-2 can be exported"
        )
    model = convert({name: part["value"] for name, part in parts.items()}, size)
    with atomic_folder(Path(config.output)) as folder:
        model.save_pretrained(folder)
    print(f"{config.output}: GPT-2 {meta['model']} after {meta['iteration']} iterations")
    return 0


def convert(weights: dict[str, torch.Tensor], size: Size) -> GPT2LMHeadModel:
    """The Hugging Face model of these weights, which have the names and shapes of the whole model."""
    end = size.vocabulary - 1  # in our data
    config = GPT2Config(
        vocab_size=size.vocabulary, n_positions=size.sequence, n_embd=size.hidden, n_layer=size.layers,
        n_head=size.heads, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    state = {
        "transformer.wte.weight": weights["embedding.word_embeddings.weight"][: size.vocabulary],
        "transformer.wpe.weight": weights["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": weights["decoder.final_layernorm.weight"],
        "transformer.ln_f.bias": weights["decoder.final_layernorm.bias"],
    }
    for layer in range(size.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            for source, target in PARTS.items():
                # Hugging Face's GPT-2 stores its matrices transposed.
                state[f"{theirs}{target}.{kind}"] = weights[f"{ours}{source}.{kind}"].t()
            joint = weights[f"{ours}self_attention.linear_qkv.{kind}"]
            state[f"{theirs}attn.c_attn.{kind}"] = by_kind(joint, size).t()
    state["lm_head.weight"] = state["transformer.wte.weight"]
    model.load_state_dict({name: tensor.float().contiguous() for name, tensor in state.items()})
    return model


def by_kind(joint: torch.Tensor, size: Size) -> torch.Tensor:
    """From (query, key, value) of each head in turn to all queries, all keys, all values."""
    width = size.hidden // size.heads
    heads = joint.reshape(size.heads, 3, width, *joint.shape[1:])
    return heads.transpose(0, 1).reshape(joint.shape)


if __name__ == "__main__":
    sys.exit(cli.run(main, CheckpointError))
