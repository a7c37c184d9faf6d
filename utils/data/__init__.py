"""Text to token ids: SQuAD or a file in its format in, cached token ids of questions and contexts out."""
