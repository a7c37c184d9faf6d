#!/usr/bin/env bash
# The batch script of a homogeneous run. Submit it with _03_submit.sh, which adds the settings' own options.
# Further options of sbatch can stand here as #SBATCH lines; they override the settings:
##SBATCH --time=01:00:00
##SBATCH --exclusive

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -f "$here/slurm/job.sh" ]; then
    # sbatch has copied this script away from the others.
    echo "_02_homo_job.sh: submit it with megatron_lm/_03_submit.sh, not with sbatch" >&2
    exit 2
fi
# shellcheck source=megatron_lm/slurm/job.sh
. "$here/slurm/job.sh"
in_slurm
choose_python
launch_nodes 0 "$(master_of "$SLURM_JOB_NODELIST")"
