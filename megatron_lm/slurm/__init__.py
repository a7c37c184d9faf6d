"""Launching: ``job.sh`` and ``node.sh`` start the nodes of a run, ``gpu_log`` records their GPUs,
``local_cluster.sh`` is a Slurm of virtual nodes for tests."""
