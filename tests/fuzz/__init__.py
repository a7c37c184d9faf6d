"""Mutated traces through repair → link → convert → validate → replay.

``bases`` are good pairs, ``mutations`` damage them, ``judge`` says whether what became of them is right, and
``campaign`` does that many times under caps of time and memory:

    python -m tests.fuzz.campaign --inputs 20000 --workers 2

An input is known by its number: ``--only 1234`` makes it again and shows what became of it.
"""
