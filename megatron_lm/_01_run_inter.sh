#!/usr/bin/env bash
# Launch one node's ranks: say the settings, then torchrun, in the container where there is one.
#
# Usage: megatron_lm/_01_run_inter.sh NODE_RANK MASTER_ADDR
#
# To run by hand, start it on each node. NSYS=true or NCU=true: under that profiler, with its reports in
# ../log-nsys or ../log-ncu beside megatron_lm.

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm/job.sh"
case ${1:-} in -h | --help) show_help ;; esac
[ $# = 2 ] || usage_error "two arguments are needed: NODE_RANK and MASTER_ADDR"
case $1 in '' | *[!0-9]*) usage_error "NODE_RANK is a number from 0, not '$1'" ;; esac
[ "$1" -lt "$NNODES" ] || usage_error "NODE_RANK $1: there are $NNODES nodes (NNODES), counted from 0"
NODE_RANK=$1 MASTER_ADDR=$2
export NODE_RANK MASTER_ADDR
RUN_ID=${RUN_ID:-${SLURM_JOB_ID:-by-hand}}
export RUN_ID

# enter_container: make sure that it is unpacked here; set container, the command that runs one in it.
enter_container() {
    [ -n "$CONTAINER_PATH" ] || die "CONTAINER_PATH is empty: set it to the folder that containers are unpacked in"
    export ENROOT_DATA_PATH=$CONTAINER_PATH
    mkdir -p "$CONTAINER_PATH" "$LOGS"
    if [ "$RELOAD_CONTAINER" = true ]; then
        enroot remove --force "$CONTAINER_NAME" >&2 || true
    fi
    if ! enroot list | grep -qxF "$CONTAINER_NAME"; then
        [ -f "$CONTAINER_IMAGE_PATH" ] ||
            die "CONTAINER_IMAGE_PATH: there is no file $CONTAINER_IMAGE_PATH; give a .sqsh image, or leave it empty"
        enroot create --name "$CONTAINER_NAME" "$CONTAINER_IMAGE_PATH" >&2
    fi
    local place places variable
    container=(enroot start --rw)
    # Every place has the same path inside as outside.
    places=("$ROOT" "$LOGS")
    for place in "$DATA_PATH" "$SAVE" "$LOAD"; do
        case $place in /*) places+=("$(dirname "$place")") ;; esac
    done
    for place in "${places[@]}"; do
        container+=(--mount "$place:$place")
    done
    for variable in "${names[@]}" RUN_ID OMP_NUM_THREADS; do
        container+=(--env "$variable=${!variable-}")
    done
    container+=("$CONTAINER_NAME")
}

names=(NODE_RANK MASTER_ADDR "${SETTINGS[@]}")
for name in "${names[@]}"; do
    printf '%s: %s\n' "$name" "${!name-}"
done

# Not more threads than there are CPUs for each rank: too many make a rank many times slower.
cpus=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
threads=$(((CPUS_PER_TASK < cpus ? CPUS_PER_TASK : cpus) / NPROC_PER_NODE))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

choose_python
python=$PYTHON container=()
if uses_container; then
    enter_container
    python=${CONTAINER_PYTHON:-python3}
fi

report=$RUN_ID
[ "$NNODES" = 1 ] || report=$RUN_ID-$NODE_RANK
profiler=()
if [ "$NSYS" = true ]; then
    mkdir -p "$ROOT/log-nsys"
    profiler=(nsys profile -t "cuda,nvtx" -o "$ROOT/log-nsys/$report" --export=sqlite --force-overwrite=true)
elif [ "$NCU" = true ]; then
    mkdir -p "$ROOT/log-ncu"
    profiler=(ncu --target-processes all --nvtx -o "$ROOT/log-ncu/$report" --force-overwrite)
fi
if [ ${#container[@]} = 0 ] && [ ${#profiler[@]} != 0 ] && ! command -v "${profiler[0]}" >/dev/null; then
    die "${profiler[0]} is not installed: install NVIDIA's profiler, or set NSYS=false and NCU=false"
fi

supervise ${container[@]+"${container[@]}"} ${profiler[@]+"${profiler[@]}"} \
    "$python" -m torch.distributed.run --nproc_per_node "$NPROC_PER_NODE" --nnodes "$NNODES" \
    --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    "$MEGATRON/_00_pretrain_gpt.py"
