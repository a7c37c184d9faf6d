"""BERT: what differs from GPT-2. The training loop is utils/training/trainer.py."""
