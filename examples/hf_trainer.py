"""Trace Hugging Face's Trainer:  torchrun --nproc_per_node 2 examples/hf_trainer.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from chakra_et.capture.huggingface import ChakraCallback

tokens = torch.randint(0, 1000, (64, 32))
data = [{"input_ids": row, "labels": row} for row in tokens]
settings = GPT2Config(vocab_size=1000, n_layer=2, n_head=2, n_embd=64, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir="outputs/hf_trainer",
    max_steps=6,
    per_device_train_batch_size=2,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
callback = ChakraCallback("outputs", "hf_trainer", active_steps=1)
Trainer(GPT2LMHeadModel(settings), arguments, train_dataset=data, callbacks=[callback]).train()
