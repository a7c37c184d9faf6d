"""GPT-2: what differs from BERT. The training loop is utils/training/trainer.py."""
