"""Training on megatron-core: settings go in; log lines, checkpoints and traces come out.

``training`` is the loop; ``model``, ``optimizer``, ``dataset`` and ``checkpoint`` are what it drives;
``log_lines`` records it. ``shim`` lets megatron-core run on CPUs. Needs megatron-core and torch >= 2.6.
"""
