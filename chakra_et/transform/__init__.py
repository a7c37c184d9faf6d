"""Change a run: job in, job out. Each transform says what it assumed.

``scale`` makes a set of more or fewer data-parallel ranks, ``remodel`` one of other layers, batch, sequence,
tensor-parallel ranks or pipeline stages; ``ranks``, ``tensor_sizes``, ``bucket_size``, ``accumulation`` and
``fsdp`` change a run for a prediction, ``durations``, ``network`` and ``overlap`` the times of its nodes.
"""
