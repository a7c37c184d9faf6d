#!/usr/bin/env bash
# One node of a run: its ranks, its log files, its GPU log.
#
# Usage: megatron_lm/slurm/node.sh FIRST_RANK MASTER_ADDR     (started by srun, or by _03_submit.sh --local)
#
# The node's rank is its place in NODELIST, or else FIRST_RANK plus its number in the job. Appends to
# $LOG_DIR/$RUN_ID/<node>.out, .err and .gpu, and writes .state: "running PID", at the end "exit STATUS SECONDS".

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/job.sh"
SCRIPT=megatron_lm/slurm/node.sh
RUN_ID=${RUN_ID:-${SLURM_JOB_ID:?}}
export RUN_ID
# Slurm's name of this node: virtual nodes share the machine's name.
node=${SLURMD_NODENAME:-$(hostname -s)}
files=$LOG_DIR/$RUN_ID/$node
gpu_log=

# rank_of NODE FIRST_RANK: the rank of this node.
rank_of() {
    local rank=0 name
    if [ -z "$NODELIST" ]; then
        printf '%s\n' "$(($2 + ${SLURM_NODEID:-0}))"
        return
    fi
    for name in ${NODELIST//,/ }; do
        if [ "$name" = "$1" ]; then
            printf '%s\n' "$rank"
            return
        fi
        rank=$((rank + 1))
    done
    die "node '$1' is not in NODELIST=$NODELIST"
}

# shellcheck disable=SC2329 # called by the trap
finish() {
    [ -z "$gpu_log" ] || kill "$gpu_log" 2>/dev/null || true
    printf 'exit %s %s\n' "$1" "$(date +%s)" >"$files.state"
}

mkdir -p "$LOG_DIR/$RUN_ID"
printf 'running %s\n' "$$" >"$files.state"
trap 'finish $?' EXIT
# What stands above this line is of an earlier attempt, before Slurm requeued the job.
printf 'attempt %s on %s at %s\n' "${SLURM_RESTART_COUNT:-0}" "$node" "$(date +%Y-%m-%dT%H:%M:%S%z)" >>"$files.err"
{
    rank=$(rank_of "$node" "$1")
    choose_python
} 2>>"$files.err"
"$PYTHON" "$MEGATRON" gpu_log >>"$files.gpu" 2>>"$files.err" &
gpu_log=$!
status=0
# Appending, because the ranks of a node share the file and must not overwrite each other's lines.
supervise "$MEGATRON/_01_run_inter.sh" "$rank" "$2" >>"$files.out" 2>>"$files.err" || status=$?
exit "$status"
