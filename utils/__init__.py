"""The training side: SQuAD text in, trained GPT-2 and BERT models and their traces out.

``data/`` and ``data_utils`` turn text into samples, ``distributed`` starts the process group, ``watch`` keeps
the ranks together, and ``training/`` is the loop that both models share. ``chakra_tracer`` is an import path
only: the tracer is ``chakra_et.ChakraTracer``.
"""
