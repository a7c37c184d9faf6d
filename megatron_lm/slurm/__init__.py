"""Launching: ``job.sh`` and ``node.sh`` start the nodes of a run, ``submit`` gives it to Slurm,
``local_cluster.sh`` is a Slurm of virtual nodes for tests.
"""
