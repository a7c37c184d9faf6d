# shellcheck shell=bash
# The settings of a run, sourced by the other scripts. Edit the defaults below, or override them for one run:
#   megatron_lm/_03_submit.sh --local MODEL=tiny          arguments
#   megatron_lm/_03_submit.sh --settings plan.conf        a file of NAME=VALUE lines
#   export MEGATRON_MODEL=tiny                            environment, with the prefix MEGATRON_
# Relative paths in arguments and in the environment start at the caller's folder, those below at this folder.

# All settings, in the order in which a launch prints them.
SETTINGS=(
    HOMOGENEOUS_CLUSTER MODEL NPROC_PER_NODE NNODES WORLD_SIZE GLOBAL_BATCH_SIZE MICRO_BATCH_SIZE
    TENSOR_MP_SIZE DP_SIZE PIPELINE_MP_SIZE PARTITION VIRTUAL_STAGES SEQUENCE_PARALLEL RECOMPUTE
    ATTENTION SHARDED_OPTIMIZER
    HIDDEN_SIZE NUM_LAYERS NUM_HEADS SEQ_LENGTH VOCAB_SIZE FFN KV_GROUPS SWIGLU NORMALIZATION POSITION
    ROTARY_BASE LINEAR_BIAS TIED_EMBEDDING
    TRAIN_ITERS LOG_INTERVAL PRECISION LR LR_DECAY_ITERS LR_WARMUP_FRACTION SEED DATA_PATH SPLIT
    STOP_ON_NAN SAVE SAVE_INTERVAL LOAD
    REPORT_TO PROFILE PROFILE_CHAKRA TRACE_OUTPUT_DIR NSYS NCU LOG_DIR
    MASTER_PORT SLURM_QUEUE MASTER_QUEUE SLAVE_QUEUE MASTER_NNODES GRES MASTER_GRES SLAVE_GRES CPUS_PER_TASK
    TIME_LIMIT ACCOUNT QOS CONSTRAINT NODELIST SBATCH_OPTIONS
    RELOAD_CONTAINER CONTAINER_IMAGE_PATH CONTAINER_PATH CONTAINER_NAME CONTAINER_PYTHON
)
# Start from the environment's MEGATRON_NAME only: other programs use some of these names without the prefix.
unprefixed=
for name in "${SETTINGS[@]}"; do
    prefixed=MEGATRON_$name
    if [ -n "${!name+set}" ] && [ -z "${!prefixed+set}" ]; then unprefixed="$unprefixed $name=${!name}"; fi
    unset "$name"
    if [ -n "${!prefixed+set}" ]; then printf -v "$name" '%s' "${!prefixed}"; fi
done

HOMOGENEOUS_CLUSTER="${HOMOGENEOUS_CLUSTER:-true}" # true: one job; false: a master and a slave job
MODEL="${MODEL:-xl}"                               # tiny | small | xl | llama-tiny | llama3-8b

# Processes, and how they share the work, by model
case "$MODEL" in
    tiny | llama-tiny)
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
    llama3-8b)
        NPROC_PER_NODE="${NPROC_PER_NODE:-8}" NNODES="${NNODES:-2}"
        GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
        TENSOR_MP_SIZE="${TENSOR_MP_SIZE:-4}" DP_SIZE="${DP_SIZE:-2}" PIPELINE_MP_SIZE="${PIPELINE_MP_SIZE:-2}"
        PARTITION="${PARTITION:-17-15}"
        ;;
    *)
        NPROC_PER_NODE="${NPROC_PER_NODE:-4}" NNODES="${NNODES:-8}"
        GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
        TENSOR_MP_SIZE="${TENSOR_MP_SIZE:-1}" DP_SIZE="${DP_SIZE:-4}" PIPELINE_MP_SIZE="${PIPELINE_MP_SIZE:-8}"
        PARTITION="${PARTITION:-0-11-8-8-8-8-5-0}" # transformer layers of each pipeline stage
        ;;
esac
WORLD_SIZE="${WORLD_SIZE:-}"                 # empty: NPROC_PER_NODE x NNODES
VIRTUAL_STAGES="${VIRTUAL_STAGES:-1}"        # chunks of layers per stage; above 1: interleaved schedule
SEQUENCE_PARALLEL="${SEQUENCE_PARALLEL:-false}" # with tensor parallelism: share layer norms along the sequence
RECOMPUTE="${RECOMPUTE:-none}"               # activations computed again: none | selective (attention) | full
ATTENTION="${ATTENTION:-unfused}"            # unfused | flash: one kernel that keeps no scores
SHARDED_OPTIMIZER="${SHARDED_OPTIMIZER:-false}" # optimizer states shared among the data-parallel ranks

# Model; empty: that of MODEL
HIDDEN_SIZE="${HIDDEN_SIZE:-}"
NUM_LAYERS="${NUM_LAYERS:-}"
NUM_HEADS="${NUM_HEADS:-}"
SEQ_LENGTH="${SEQ_LENGTH:-}"
VOCAB_SIZE="${VOCAB_SIZE:-}"
FFN="${FFN:-}"                               # width of the MLP
KV_GROUPS="${KV_GROUPS:-}"                   # key-value heads; fewer than NUM_HEADS: grouped queries
SWIGLU="${SWIGLU:-}"                         # true: gated MLP; false: GELU
NORMALIZATION="${NORMALIZATION:-}"           # layernorm | rmsnorm
POSITION="${POSITION:-}"                     # learned | rope
ROTARY_BASE="${ROTARY_BASE:-}"
LINEAR_BIAS="${LINEAR_BIAS:-}"
TIED_EMBEDDING="${TIED_EMBEDDING:-}"         # true: the output layer shares the embedding's weights

# Training
TRAIN_ITERS="${TRAIN_ITERS:-50}"
LOG_INTERVAL="${LOG_INTERVAL:-10}"
PRECISION="${PRECISION:-fp16}"               # fp16 | bf16 | fp32; without CUDA, fp16 becomes fp32
LR="${LR:-1.5e-4}"                           # cosine, after a warm-up of LR_WARMUP_FRACTION
LR_DECAY_ITERS="${LR_DECAY_ITERS:-320000}"
LR_WARMUP_FRACTION="${LR_WARMUP_FRACTION:-.01}"
SEED="${SEED:-1234}"
DATA_PATH="${DATA_PATH:-}"                   # prefix of .bin and .idx; empty: the sample in data/
SPLIT="${SPLIT:-100,0,0}"                    # training, validation, test
STOP_ON_NAN="${STOP_ON_NAN:-50}"             # end after as many iterations in a row that are not finite; 0: never
SAVE="${SAVE:-}"                             # folder for checkpoints; empty: none
SAVE_INTERVAL="${SAVE_INTERVAL:-0}"          # iterations between checkpoints; 0: only after the last one
LOAD="${LOAD:-}"                             # checkpoint to continue from, of any partition

# What is recorded
REPORT_TO="${REPORT_TO:-}"                   # tensorboard (in the log folder) | wandb; empty: the log alone
PROFILE="${PROFILE:-false}"                  # timers with start and end times, for the picture
PROFILE_CHAKRA="${PROFILE_CHAKRA:-false}"    # host and device traces of every rank, for chakra_et
TRACE_OUTPUT_DIR="${TRACE_OUTPUT_DIR:-../outputs}"
NSYS="${NSYS:-false}"                        # under nsys profile, reports in ../log-nsys
NCU="${NCU:-false}"                          # under ncu, reports in ../log-ncu
LOG_DIR="${LOG_DIR:-../log2}"

# Cluster
MASTER_PORT="${MASTER_PORT:-6787}"           # if it is taken, the next free one, unless it was set for this run
SLURM_QUEUE="${SLURM_QUEUE:-}"               # sbatch --partition; empty: the cluster's default
MASTER_QUEUE="${MASTER_QUEUE:-}"             # heterogeneous: --partition of the master job
SLAVE_QUEUE="${SLAVE_QUEUE:-}"               # heterogeneous: --partition of the slave job
MASTER_NNODES="${MASTER_NNODES:-1}"          # heterogeneous: nodes of the master job
GRES="${GRES-gpu:$NPROC_PER_NODE}"           # sbatch --gres; empty: none
MASTER_GRES="${MASTER_GRES-$GRES}"           # heterogeneous: of the master job, such as gpu:a100:4
SLAVE_GRES="${SLAVE_GRES-$GRES}"             # heterogeneous: of the slave job
CPUS_PER_TASK="${CPUS_PER_TASK:-8}"
TIME_LIMIT="${TIME_LIMIT:-}"                 # sbatch --time
ACCOUNT="${ACCOUNT:-}"                       # sbatch --account
QOS="${QOS:-}"                               # sbatch --qos
CONSTRAINT="${CONSTRAINT:-}"                 # sbatch --constraint
NODELIST="${NODELIST:-}"                     # node names in the order of their ranks; empty: Slurm's choice
SBATCH_OPTIONS="${SBATCH_OPTIONS:-}"         # any other options of sbatch

# Container, where enroot is installed
RELOAD_CONTAINER="${RELOAD_CONTAINER:-false}" # true: delete it and create it anew
CONTAINER_IMAGE_PATH="${CONTAINER_IMAGE_PATH:-}"
CONTAINER_PATH="${CONTAINER_PATH:-}"          # folder that containers are unpacked in
CONTAINER_NAME="${CONTAINER_NAME:-megatron-lm}"
CONTAINER_PYTHON="${CONTAINER_PYTHON:-python3}" # interpreter in the container

# Check the settings, fill in those that follow from others, and pass all of them on.
[ -n "$WORLD_SIZE" ] || unset WORLD_SIZE MEGATRON_WORLD_SIZE
for name in "${SETTINGS[@]}"; do
    if [ -n "${!name+set}" ]; then export "MEGATRON_$name=${!name}"; fi
done
derived=$(UNPREFIXED=$unprefixed "${SETTINGS_PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/settings") || return 2 2>/dev/null || exit 2
eval "$derived"
for name in "${SETTINGS[@]}"; do export "MEGATRON_$name=${!name}"; done
unset name prefixed unprefixed derived
