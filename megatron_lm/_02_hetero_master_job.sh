#!/usr/bin/env bash
# The batch script of a heterogeneous run's first job, which has the master; with _03_submit.sh --het, of the whole
# run. Submit it with _03_submit.sh, which adds the settings' own options. Further options of sbatch can stand here
# as #SBATCH lines; they override the settings:
##SBATCH --time=01:00:00

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -f "$here/slurm/job.sh" ]; then
    # sbatch has copied this script away from the others.
    echo "_02_hetero_master_job.sh: submit it with megatron_lm/_03_submit.sh, not with sbatch" >&2
    exit 2
fi
# shellcheck source=megatron_lm/slurm/job.sh
. "$here/slurm/job.sh"
in_slurm
choose_python
if [ -n "${SLURM_HET_SIZE:-}" ]; then
    # srun numbers the nodes of all components as one.
    launch_nodes 0 "$(master_of "$SLURM_JOB_NODELIST_HET_GROUP_0")" --het-group=0,1
else
    launch_nodes 0 "$(master_of "$SLURM_JOB_NODELIST")"
fi
