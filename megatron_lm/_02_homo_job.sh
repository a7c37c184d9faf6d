#!/usr/bin/env bash
# The body of the job of a homogeneous run. Submitted by _03_submit.sh.

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm/job.sh"
in_slurm
choose_python
launch_nodes 0 "$(address_of "$SLURM_JOB_NODELIST")"
