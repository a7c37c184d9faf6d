"""Training on megatron-core: settings in; log lines, checkpoints and traces out. Needs megatron-core."""
