"""Megatron-style GPT-2 with an uneven pipeline, on megatron-core, under Slurm."""
