#!/usr/bin/env bash
# The batch script of a heterogeneous run's second job, whose node ranks continue those of the first. Submit it with
# _03_submit.sh, which adds the settings' own options and MASTER_JOB_ID. Further options of sbatch can stand here as
# #SBATCH lines; they override the settings:
##SBATCH --time=01:00:00

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -f "$here/slurm/job.sh" ]; then
    # sbatch has copied this script away from the others.
    echo "_02_hetero_slave_job.sh: submit it with megatron_lm/_03_submit.sh, not with sbatch" >&2
    exit 2
fi
# shellcheck source=megatron_lm/slurm/job.sh
. "$here/slurm/job.sh"
in_slurm
choose_python
nodes=$(scontrol --oneliner show job "${MASTER_JOB_ID:?}" | sed -n 's/.* NodeList=\([^ ]*\).*/\1/p')
case $nodes in
    '' | '(null)') die "the master job $MASTER_JOB_ID has no nodes: it was cancelled before it started" ;;
esac
launch_nodes "$MASTER_NNODES" "$(master_of "$nodes")"
