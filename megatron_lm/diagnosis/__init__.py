"""Why a run failed: error logs in, the first failing rank and the cause in one sentence out.

``lines`` takes the prefixes off log lines (rank, time, level); ``statements`` finds what reports a failure
by its form (tracebacks, error records, messages of tools, deaths of processes, Slurm's and torchrun's
reports); ``causes`` explains one statement; ``failures`` combines those of a run and picks the first.
"""
