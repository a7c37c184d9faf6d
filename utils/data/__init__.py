"""Text to batches: SQuAD or a file of its layout in, token ids out, with caches of what takes long."""
