"""The one training loop of both models: its flags, checkpoints, metrics, and the watch over all ranks."""
