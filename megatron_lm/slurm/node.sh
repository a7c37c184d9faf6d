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

# take_port PORT: whether nothing on this node uses it. Others that ask see it taken as long as this script runs,
# because torchrun listens there only seconds later.
take_port() {
    exec 9>"${TMPDIR:-/tmp}/megatron-port-$1.$(id -u)"
    "$PYTHON" - "$1" 2>/dev/null <<'END'
import fcntl, socket, sys

fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("", int(sys.argv[1])))
END
}

# choose_port RANK: unless MASTER_PORT was set by hand, the node of rank 0 takes the first free port from it on, and
# the other nodes wait for its choice.
choose_port() {
    local file=$LOG_DIR/${MASTER_JOB_ID:-$RUN_ID}/port.${SLURM_RESTART_COUNT:-0} port=$MASTER_PORT tries
    [ -z "$PORT_BY_HAND" ] || return 0
    if [ "$1" = 0 ]; then
        until take_port "$port"; do
            port=$((port + 1))
            [ $((port - MASTER_PORT)) -lt 1000 ] || die "no port from $MASTER_PORT to $port is free: set MASTER_PORT"
        done
        printf '%s\n' "$port" >"$file.tmp"
        mv "$file.tmp" "$file"
    else
        for tries in $(seq 600); do
            [ ! -s "$file" ] || break
            [ "$tries" -lt 600 ] || die "the first node has not chosen a port within 2 minutes ($file)"
            sleep 0.2
        done
        port=$(cat "$file")
    fi
    if [ "$port" != "$MASTER_PORT" ]; then
        say "port $MASTER_PORT is taken on the first node: all nodes use $port" >>"$files.out"
        MASTER_PORT=$port
        export MEGATRON_MASTER_PORT=$port
    fi
}

# log_gpus FILE: append a line per GPU and second in gpustat's format, in the background; its process is $gpu_log.
log_gpus() {
    if ! nvidia-smi -L >/dev/null 2>&1; then
        echo "no GPU: nvidia-smi finds none" >>"$1"
        return
    fi
    nvidia-smi --query-gpu=index,name,temperature.gpu,utilization.gpu,memory.used,memory.total \
        --format=csv,noheader,nounits --loop=1 > >(sed -uE "s/\\[[^]]*\\]/?/g
s/^([0-9]+), (.*), ([^,]*), ([^,]*), ([^,]*), ([^,]*)\$/[\\1] \\2 | \\3'C, \\4 % | \\5 \\/ \\6 MB |/" >>"$1") &
    gpu_log=$!
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
    choose_port "$rank"
} 2>>"$files.err"
log_gpus "$files.gpu"
status=0
# Appending, because the ranks of a node share the file and must not overwrite each other's lines.
supervise "$MEGATRON/_01_run_inter.sh" "$rank" "$2" >>"$files.out" 2>>"$files.err" || status=$?
exit "$status"
