#!/usr/bin/env bash
# The body of a heterogeneous run's second job: node ranks count on from the first job's, whose first
# node is the master. Submitted by _03_submit.sh, which sets MASTER_JOB_ID.

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm/job.sh"
in_slurm
choose_python
nodes=$(scontrol --oneliner show job "${MASTER_JOB_ID:?}" | sed -n 's/.* NodeList=\([^ ]*\).*/\1/p')
case $nodes in
    '' | '(null)') die "the master job $MASTER_JOB_ID has no nodes: it was cancelled before it started" ;;
esac
launch_nodes "$MASTER_NNODES" "$(address_of "$nodes")"
