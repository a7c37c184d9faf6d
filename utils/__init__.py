"""The training side: SQuAD text in, trained GPT-2 and BERT models and their traces out."""
