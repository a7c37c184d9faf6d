#!/usr/bin/env bash
# All ranks of a run on this machine, without Slurm. Started by _03_submit.sh --local, which sets RUN_ID.

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"
SCRIPT=megatron_lm/_03_submit.sh
choose_python
say "${RUN_ID:?}"
say "logs: $LOG_DIR/$RUN_ID; watch: megatron_lm/get_result.sh $RUN_ID" >&2
status=0
supervise "$MEGATRON/slurm/node.sh" 0 127.0.0.1 || status=$?
[ "$status" = 0 ] || die "the run failed with status $status: see megatron_lm/get_result.sh $RUN_ID" "$status"
