"""The training loop of both models: flags and data in, checkpoints, metrics and traces out."""
