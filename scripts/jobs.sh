# shellcheck shell=bash
# The training jobs: quick (train, trace, repair, convert, check, table) and full. Sourced after common.sh.

set -euo pipefail

FORCE_CPU=
OUTPUT_DIR=$ROOT/outputs
STEPS=10
NNODES=1
NODE_RANK=0
RENDEZVOUS=()
POSITIONAL=()
EXTRA=()

# parse_job MAX_POSITIONAL ARG…: fills the variables above; what follows -- goes to train.py.
parse_job() {
    local limit=$1 flag value
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) show_help ;;
            --cpu) FORCE_CPU=1 ;;
            --)
                shift
                EXTRA=("$@")
                break
                ;;
            --*)
                flag=${1%%=*}
                if [ "$flag" != "$1" ]; then
                    value=${1#*=}
                elif [ $# -gt 1 ]; then
                    value=$2
                    shift
                else
                    value=
                fi
                job_option "$(printf '%s' "$flag" | tr _ -)" "$value"
                ;;
            -*) usage_error "unknown option $1" ;;
            *) POSITIONAL+=("$1") ;;
        esac
        shift
    done
    [ "${#POSITIONAL[@]}" -le "$limit" ] || usage_error "too many arguments: ${POSITIONAL[*]}"
    if [ "$NNODES" -gt 1 ]; then
        [ -n "${MASTER_ADDR:-}" ] || usage_error "--nnodes $NNODES needs --master-addr"
        RENDEZVOUS=(--nnodes "$NNODES" --node_rank "$NODE_RANK"
            --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-6787}")
    else
        RENDEZVOUS=(--standalone)
    fi
}

# job_option FLAG VALUE
job_option() {
    case $1 in
        --output-dir | --nnodes | --node-rank | --master-addr | --master-port)
            [ -n "$2" ] || usage_error "$1 needs a value"
            ;;
        *) usage_error "unknown option $1 (flags of train.py go after --)" ;;
    esac
    case $1 in
        --output-dir) OUTPUT_DIR=$(absolute "$2") ;;
        --nnodes)
            positive --nnodes "$2"
            NNODES=$2
            ;;
        --node-rank)
            [ "$2" = 0 ] || is_count "$2" || usage_error "--node-rank must be 0 or more, not '$2'"
            NODE_RANK=$2
            ;;
        --master-addr) MASTER_ADDR=$2 ;;
        --master-port)
            positive --master-port "$2"
            MASTER_PORT=$2
            ;;
    esac
}

# positive NAME VALUE
positive() {
    is_count "$2" || usage_error "$1 must be a positive whole number, not '$2'"
}

# find_gpus: set GPUS to how many PyTorch sees, 0 with --cpu.
find_gpus() {
    GPUS=0
    if [ -n "$FORCE_CPU" ]; then
        export CUDA_VISIBLE_DEVICES=
        return
    fi
    GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') ||
        die "PyTorch cannot be imported by $PYTHON"
    if [ "$GPUS" = 0 ] && command -v nvidia-smi >/dev/null && [ "${CUDA_VISIBLE_DEVICES-unset}" = unset ]; then
        say "nvidia-smi is here, but the PyTorch of $PYTHON sees no GPU: training on the CPU"
    fi
}

# require_gpus N: N processes are always possible on the CPU, on GPUs one a process.
require_gpus() {
    find_gpus
    if [ "$GPUS" -gt 0 ] && [ "$1" -gt "$GPUS" ]; then
        die "$1 GPUs asked for, $GPUS here: ask for $GPUS or fewer, or use --cpu for $1 processes on the CPU"
    fi
}

# launch MODEL N FLAG…: train on N processes of this node under torchrun.
launch() {
    local model=$1 processes=$2 cores
    shift 2
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    # Threads that spin while they wait halve the speed of training where other work needs the cores.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    supervise "$PYTHON" -m torch.distributed.run "${RENDEZVOUS[@]}" --nproc_per_node "$processes" \
        "$ROOT/$model/train.py" --num-gpus $((processes * NNODES)) "$@" ${EXTRA[@]+"${EXTRA[@]}"}
}

# stage NAME COMMAND…: one stage of a job; its failure is the job's.
stage() {
    local name=$1 status=0
    shift
    say "== $name"
    "$@" || status=$?
    [ "$status" -eq 0 ] || die "$name failed (exit status $status): the lines above say why" "$status"
}

# quick_job MODEL [ARG…]: the whole way from training to checked .et files; without a number of GPUs, on 1, 2
# and 4 of them as far as they are there.
quick_job() {
    local model=$1
    shift
    parse_job 2 "$@"
    positive num_gpus "${POSITIONAL[0]:-1}"
    STEPS=${POSITIONAL[1]:-10}
    positive max_steps "$STEPS"
    use_environment run
    if [ "${#POSITIONAL[@]}" -gt 0 ] || [ "$NNODES" -gt 1 ]; then
        require_gpus "${POSITIONAL[0]:-1}"
        trace_and_convert "$model" "${POSITIONAL[0]:-1}"
        return
    fi
    find_gpus
    if [ "$GPUS" -gt 0 ]; then
        sweep quick_run "$model" "1 2 4"
    else
        say "On the CPU, and so with 1 process. For 2 or 4: ./$SCRIPT ${FORCE_CPU:+--cpu }2, ./$SCRIPT ${FORCE_CPU:+--cpu }4"
        trace_and_convert "$model" 1
    fi
}

# quick_run MODEL N: a quick job of its own, with the options of this one.
quick_run() {
    supervise "$ROOT/run_$1_quick.sh" ${FORCE_CPU:+--cpu} --output-dir "$OUTPUT_DIR" "$2" "$STEPS" \
        ${EXTRA[@]+-- "${EXTRA[@]}"}
}

# trace_and_convert MODEL N: train on N processes of this node, repair, convert, check, report.
trace_and_convert() {
    local model=$1 processes=$2 steps=$STEPS world name active warmup wait_steps rank
    cd "$ROOT"

    world=$((processes * NNODES))
    name=${model}_${world}gpu_quick_trace
    # Three steps, to know how much they differ, once start-up is over if there are enough.
    active=$((steps > 3 ? 3 : steps > 1 ? steps - 1 : 1))
    warmup=$((steps - active > 2 ? 2 : steps - active))
    wait_steps=$((steps - active - warmup > 5 ? 5 : steps - active - warmup))
    # Full padding, so that every rank computes the same shapes.
    local size=(--batch-size 4 --max-seq-length 512 --padding max)
    [ "$GPUS" -gt 0 ] || size=(--batch-size 2 --max-seq-length 128 --padding max)

    stage "training $model on $world $([ "$GPUS" -gt 0 ] && echo 'GPU(s)' || echo 'CPU process(es)')" \
        launch "$model" "$processes" --max-steps "$steps" "${size[@]}" --skip-eval --report-to none \
        --save-steps 0 --save-dir "$ROOT/checkpoints/${model}_quick" --logging-steps 1 \
        --enable-tracing --no-convert --trace-output-dir "$OUTPUT_DIR" --trace-name "$name" \
        --trace-wait-steps "$wait_steps" --trace-warmup-steps "$warmup" --trace-active-steps "$active"
    if [ "$NODE_RANK" -ne 0 ]; then
        say "node $NODE_RANK is done; node 0 converts the traces of all ranks"
        return
    fi

    local host_traces=() traces=()
    for rank in "$OUTPUT_DIR/$name"_host.json "$OUTPUT_DIR/$name"_host.json.gz \
        "$OUTPUT_DIR/$name"_rank*_host.json "$OUTPUT_DIR/$name"_rank*_host.json.gz; do
        [ ! -e "$rank" ] || host_traces+=("$rank")
    done
    [ "${#host_traces[@]}" -gt 0 ] || die "training wrote no $name host trace into $OUTPUT_DIR"
    rank=0
    while [ "$rank" -lt "$world" ]; do
        traces+=("$OUTPUT_DIR/$name.$rank.et")
        rank=$((rank + 1))
    done
    stage "repairing host traces" supervise "$PYTHON" fix_host_traces.py "${host_traces[@]}"
    stage "converting" supervise "$PYTHON" convert_to_et.py --dir "$OUTPUT_DIR" --name "$name"
    stage "checking" supervise "$PYTHON" -m chakra_et validate "${traces[@]}"
    stage "reporting" supervise "$PYTHON" -m chakra_et report "$OUTPUT_DIR/$name"
}

# full_job MODEL [ARG…]: training with evaluation and checkpoints; a few early steps are traced, and converted at
# the end.
full_job() {
    local model=$1 processes
    shift
    parse_job 2 "$@"
    processes=${POSITIONAL[0]:-1}
    positive num_gpus "$processes"
    local size=()
    if [ "${#POSITIONAL[@]}" -gt 1 ]; then
        positive batch_size "${POSITIONAL[1]}"
        size=(--batch-size "${POSITIONAL[1]}")
    fi
    use_environment run
    require_gpus "$processes"
    cd "$ROOT"
    stage "training $model" launch "$model" "$processes" ${size[@]+"${size[@]}"} \
        --enable-tracing --trace-output-dir "$OUTPUT_DIR"
}

# sweep RUN "MODELS" "COUNTS": call RUN MODEL COUNT for all models and every count that the machine can run;
# name the others; end with a non-zero status if a run failed or none was possible.
sweep() {
    local run=$1 models=$2 counts=$3 model count impossible='' failed='' succeeded=''
    [ "$NNODES" -eq 1 ] || usage_error "this runs on one machine; use ./run_gpt2_quick.sh or ./run_gpt2.sh on several"
    for model in $models; do
        for count in $counts; do
            if [ -z "$FORCE_CPU" ] && [ "$count" -gt "$GPUS" ]; then
                impossible="$impossible $model×$count"
            elif "$run" "$model" "$count"; then
                succeeded="$succeeded $model×$count"
            else
                failed="$failed $model×$count"
            fi
        done
    done
    [ -z "$succeeded" ] || say "finished:$succeeded"
    [ -z "$impossible" ] || say "not run, as PyTorch sees $GPUS GPUs here:$impossible"
    [ -z "$failed" ] || die "failed:$failed"
    [ -n "$succeeded" ] || die "nothing can be run on $GPUS GPUs; --cpu trains with CPU processes instead"
}
