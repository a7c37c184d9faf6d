"""Change a run: job in, job out. Each transform says what it assumed.

``scale`` makes a set of more or fewer data-parallel ranks, ``remodel`` one of other layers, batch, sequence,
tensor-parallel ranks or pipeline stages; ``ddp``, ``accumulation`` and ``fsdp`` change
a run for a prediction, ``durations`` and ``network`` the times of its nodes.
"""
