"""A run's log folder, ``$LOG_DIR/<job id>``, read back: ``runs`` finds a run's nodes, files and state,
``records`` parses log lines. Here are the names of the files.
"""

LOCAL = "local-"  # first letters of a run id without Slurm
JOBS = "jobs"  # the ids of all jobs of the run, one per line
SETTINGS = "settings"  # NAME=VALUE lines, as the run was submitted
NODE_KINDS = ("out", "err", "gpu", "state")  # <node>.<kind>
BATCH_OUTPUT = "{job}.sbatch.out"  # in $LOG_DIR: the batch script's own output
