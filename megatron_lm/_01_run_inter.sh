#!/usr/bin/env bash
# Launch one node's ranks: print the settings, then start torchrun, in the container if there is one.
#
# Usage: megatron_lm/_01_run_inter.sh NODE_RANK MASTER_ADDR
#
# To launch by hand, run it on each node. With NSYS=true or NCU=true the ranks run under that profiler, which
# writes its reports to log-nsys/ or log-ncu/ beside megatron_lm/.

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm/job.sh"
case ${1:-} in -h | --help) show_help ;; esac
[ $# = 2 ] || usage_error "give two arguments, NODE_RANK and MASTER_ADDR"
case $1 in '' | *[!0-9]*) usage_error "NODE_RANK is a number from 0, not '$1'" ;; esac
[ "$1" -lt "$NNODES" ] || usage_error "NODE_RANK $1: there are $NNODES nodes (NNODES), counted from 0"
NODE_RANK=$1 MASTER_ADDR=$2
export NODE_RANK MASTER_ADDR
RUN_ID=${RUN_ID:-${SLURM_JOB_ID:-by-hand}}
export RUN_ID

# enter_container: make sure that it is unpacked here; set container, the command that runs one in it.
enter_container() {
    local place variable
    command -v enroot >/dev/null || die "enroot is not installed on this node: CONTAINER_IMAGE_PATH needs it"
    [ -n "$CONTAINER_PATH" ] || die "CONTAINER_PATH is empty: set it to the folder that containers are unpacked in"
    export ENROOT_DATA_PATH=$CONTAINER_PATH
    mkdir -p "$CONTAINER_PATH" "$LOG_DIR"
    if [ "$RELOAD_CONTAINER" = true ]; then
        enroot remove --force "$CONTAINER_NAME" >&2 || true
    fi
    if ! enroot list | grep -qxF "$CONTAINER_NAME"; then
        [ -f "$CONTAINER_IMAGE_PATH" ] ||
            die "CONTAINER_IMAGE_PATH: there is no file $CONTAINER_IMAGE_PATH on this node; give a .sqsh image"
        enroot create --name "$CONTAINER_NAME" "$CONTAINER_IMAGE_PATH" >&2
    fi
    container=(enroot start --rw)
    # Folders have the same path inside as outside.
    for place in "$ROOT" "$LOG_DIR" "$TRACE_OUTPUT_DIR" "${DATA_PATH%/*}" "$SAVE" "$LOAD"; do
        case $place in
            /*)
                mkdir -p "$place"
                container+=(--mount "$place:$place")
                ;;
        esac
    done
    for variable in NODE_RANK MASTER_ADDR RUN_ID OMP_NUM_THREADS SLURM_RESTART_COUNT; do
        container+=(--env "$variable=${!variable-}")
    done
    for variable in "${SETTINGS[@]}"; do
        container+=(--env "MEGATRON_$variable=${!variable}")
    done
    container+=("$CONTAINER_NAME")
}

# The settings, as get_result.sh shows them. PRECISION is missing: rank 0 prints the one that is used.
printf 'NODE_RANK: %s\nMASTER_ADDR: %s\n' "$NODE_RANK" "$MASTER_ADDR"
for name in "${SETTINGS[@]}"; do
    [ "$name" = PRECISION ] || printf '%s: %s\n' "$name" "${!name}"
done

# More threads than CPUs per rank would make each rank many times slower.
cpus=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
threads=$(((CPUS_PER_TASK < cpus ? CPUS_PER_TASK : cpus) / NPROC_PER_NODE))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

choose_python
python=$PYTHON container=()
if uses_container; then
    enter_container
    python=$CONTAINER_PYTHON
fi
${container[@]+"${container[@]}"} "$python" "$ROOT/scripts/environment.py" check megatron || exit $?

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
