"""Captures two steps of each small model of this file: python tests/fasop/small_captures.py FOLDER"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BATCH, LENGTH, VOCABULARY = 2, 32, 1000
MICRO_BATCHES = {"gpt2": 1, "gpt2-accumulated": 4, "llama": 1, "bert": 1}


def model_of(name: str) -> Any:
    """What a planner's model of the tests describes, as transformers makes it."""
    import transformers as t

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    grouped = sizes | {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
    if name.startswith("gpt2"):
        config = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        return t.GPT2LMHeadModel(t.GPT2Config(**config, bos_token_id=0, eos_token_id=0))
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**grouped, attn_implementation="eager"))
    return t.BertForMaskedLM(t.BertConfig(**sizes, intermediate_size=256, max_position_embeddings=64))


def capture(name: str) -> None:
    import torch

    from chakra_et.capture.tracer import ChakraTracer

    torch.manual_seed(0)
    model = model_of(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with ChakraTracer(".", name, 1, 1, 2, 0, 1, run_info={"model": name}) as tracer:
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(MICRO_BATCHES[name]):
                tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
                model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tracer.step()


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    os.chdir(sys.argv[1])
    for each in MICRO_BATCHES:
        capture(each)
