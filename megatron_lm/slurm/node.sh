#!/usr/bin/env bash
# One node of a run: its ranks, its log files, its GPU log.
#
# Usage: megatron_lm/slurm/node.sh FIRST_RANK MASTER_ADDR     (started by srun, or by _03_submit.sh --local)
#
# Writes $LOG_DIR/$RUN_ID/<node>.out, .err and .gpu; and .state: "running PID", in the end "exit STATUS".

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"
SCRIPT=megatron_lm/slurm/node.sh
RUN_ID=${RUN_ID:-${SLURM_JOB_ID:?}}
export RUN_ID
# The name that Slurm has for this node: that of the machine is the same for all virtual ones.
node=${SLURMD_NODENAME:-$(hostname -s)}
files=$LOGS/$RUN_ID/$node
gpu_log=

# shellcheck disable=SC2329 # called by the trap
finish() {
    [ -z "$gpu_log" ] || kill "$gpu_log" 2>/dev/null || true
    printf 'exit %s\n' "$1" >"$files.state"
}

mkdir -p "$LOGS/$RUN_ID"
printf 'running %s\n' "$$" >"$files.state"
trap 'finish $?' EXIT
choose_python
"$PYTHON" "$MEGATRON" gpu_log >"$files.gpu" 2>>"$files.err" &
gpu_log=$!
status=0
# Appending: the ranks of a node share the file, and no line may overwrite another.
supervise "$MEGATRON/_01_run_inter.sh" "$(($1 + ${SLURM_NODEID:-0}))" "$2" >>"$files.out" 2>>"$files.err" || status=$?
exit "$status"
