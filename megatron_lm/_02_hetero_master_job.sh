#!/usr/bin/env bash
# The body of a heterogeneous run's first job, whose first node is the master. Submitted by _03_submit.sh.
#
# As a Slurm het job (--het), it is the body of the whole run and launches the nodes of both parts.

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm/job.sh"
in_slurm
choose_python
if [ -n "${SLURM_HET_SIZE:-}" ]; then
    # The components count their nodes as one.
    launch_nodes 0 "$(address_of "$SLURM_JOB_NODELIST_HET_GROUP_0")" --het-group=0,1
else
    launch_nodes 0 "$(address_of "$SLURM_JOB_NODELIST")"
fi
