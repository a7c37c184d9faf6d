"""``job.sh`` and ``node.sh`` start nodes, ``submit`` calls Slurm, ``local_cluster.sh`` is one for tests."""
