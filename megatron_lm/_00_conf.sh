# shellcheck shell=bash
# Every setting of a run, sourced by the other scripts. Each can be overridden from the environment:
#   MODEL=tiny megatron_lm/_03_submit.sh --local
# Checked at the end, before anything starts.

HOMOGENEOUS_CLUSTER="${HOMOGENEOUS_CLUSTER:-true}" # true: one job; false: a master and a slave job
MODEL="${MODEL:-xl}"                               # tiny | small (1024 hidden, 24 layers) | xl (1600, 48)

# How many processes there are, and how they share the work, by model.
case "$MODEL" in
    tiny)
        NPROC_PER_NODE="${NPROC_PER_NODE:-2}" NNODES="${NNODES:-1}"
        GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-8}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
        TENSOR_MP_SIZE="${TENSOR_MP_SIZE:-1}" DP_SIZE="${DP_SIZE:-1}" PIPELINE_MP_SIZE="${PIPELINE_MP_SIZE:-2}"
        PARTITION="${PARTITION:-2-2}"
        ;;
    small)
        NPROC_PER_NODE="${NPROC_PER_NODE:-4}" NNODES="${NNODES:-8}"
        GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
        TENSOR_MP_SIZE="${TENSOR_MP_SIZE:-1}" DP_SIZE="${DP_SIZE:-4}" PIPELINE_MP_SIZE="${PIPELINE_MP_SIZE:-8}"
        PARTITION="${PARTITION:-0-5-4-4-4-4-3-0}"
        ;;
    *)
        NPROC_PER_NODE="${NPROC_PER_NODE:-4}" NNODES="${NNODES:-8}"
        GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
        TENSOR_MP_SIZE="${TENSOR_MP_SIZE:-1}" DP_SIZE="${DP_SIZE:-4}" PIPELINE_MP_SIZE="${PIPELINE_MP_SIZE:-8}"
        PARTITION="${PARTITION:-0-11-8-8-8-8-5-0}" # transformer layers of each pipeline stage
        ;;
esac
WORLD_SIZE="${WORLD_SIZE:-$((NPROC_PER_NODE * NNODES))}" # DP_SIZE x TENSOR_MP_SIZE x PIPELINE_MP_SIZE

# Training
TRAIN_ITERS="${TRAIN_ITERS:-50}"
LOG_INTERVAL="${LOG_INTERVAL:-10}"
PRECISION="${PRECISION:-fp16}"               # fp16 | bf16 | fp32; without CUDA always fp32
LR="${LR:-1.5e-4}"                           # cosine, after a warm-up of LR_WARMUP_FRACTION
LR_DECAY_ITERS="${LR_DECAY_ITERS:-320000}"
LR_WARMUP_FRACTION="${LR_WARMUP_FRACTION:-.01}"
SEED="${SEED:-1234}"
DATA_PATH="${DATA_PATH:-}"                   # prefix of .bin and .idx; empty: the sample in data/
SPLIT="${SPLIT:-100,0,0}"                    # train, validation, test
SAVE="${SAVE:-}"                             # folder of checkpoints; empty: none
SAVE_INTERVAL="${SAVE_INTERVAL:-0}"          # iterations between checkpoints; 0: only the last
LOAD="${LOAD:-}"                             # checkpoint to go on from, of any partition

# What is recorded
PROFILE="${PROFILE:-false}"                  # timers with start and end times, for the picture
PROFILE_CHAKRA="${PROFILE_CHAKRA:-false}"    # host and device traces of every rank, for chakra_et
TRACE_OUTPUT_DIR="${TRACE_OUTPUT_DIR:-../outputs}"
NSYS="${NSYS:-false}"                        # under nsys profile, reports in ../log-nsys
NCU="${NCU:-false}"                          # under ncu, reports in ../log-ncu
LOG_DIR="${LOG_DIR:-../log2}"                # relative to megatron_lm

# Cluster
MASTER_PORT="${MASTER_PORT:-6000}"
SLURM_QUEUE="${SLURM_QUEUE:-}"               # sbatch --partition; empty: the cluster's default
MASTER_QUEUE="${MASTER_QUEUE:-}"             # heterogeneous: of the master job
SLAVE_QUEUE="${SLAVE_QUEUE:-}"               # heterogeneous: of the slave job
MASTER_NNODES="${MASTER_NNODES:-1}"          # heterogeneous: nodes of the master job
GRES="${GRES-gpu:$NPROC_PER_NODE}"           # empty: none
CPUS_PER_TASK="${CPUS_PER_TASK:-8}"

# Container, where enroot is installed
RELOAD_CONTAINER="${RELOAD_CONTAINER:-false}" # true: delete it and create it anew
CONTAINER_IMAGE_PATH="${CONTAINER_IMAGE_PATH:-}"
CONTAINER_PATH="${CONTAINER_PATH:-}"
CONTAINER_NAME="${CONTAINER_NAME:-megatron-lm}"

# All of the above, in the order in which a launch says them.
SETTINGS=(
    HOMOGENEOUS_CLUSTER MODEL NPROC_PER_NODE NNODES WORLD_SIZE GLOBAL_BATCH_SIZE MICRO_BATCH_SIZE
    TENSOR_MP_SIZE DP_SIZE PIPELINE_MP_SIZE PARTITION TRAIN_ITERS LOG_INTERVAL PRECISION LR LR_DECAY_ITERS
    LR_WARMUP_FRACTION SEED DATA_PATH SPLIT SAVE SAVE_INTERVAL LOAD PROFILE PROFILE_CHAKRA TRACE_OUTPUT_DIR
    NSYS NCU LOG_DIR MASTER_PORT SLURM_QUEUE MASTER_QUEUE SLAVE_QUEUE MASTER_NNODES GRES CPUS_PER_TASK
    RELOAD_CONTAINER CONTAINER_IMAGE_PATH CONTAINER_PATH CONTAINER_NAME
)
export "${SETTINGS[@]}"
python3 "$(dirname "${BASH_SOURCE[0]}")/settings" || return 2 2>/dev/null || exit 2
