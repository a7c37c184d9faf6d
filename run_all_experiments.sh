#!/usr/bin/env bash
# Train both models in full on 1, 2 and 8 GPUs.
#
# Usage: ./run_all_experiments.sh [batch_size] [options] [-- flags of both train.py]
#
# Runs what this machine can run and names the rest. A run that fails does not stop the others.
# Checkpoints go to checkpoints/<model>_<N>gpu, traces and .et files to outputs/<model>_<N>gpu_trace*.
#
#   --cpu             1, 2 and 8 CPU processes (gloo) instead of GPUs
#   --output-dir DIR  where traces and .et files go (default: outputs)

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"
# shellcheck source=scripts/jobs.sh
. "$ROOT/scripts/jobs.sh"

parse_job 1 "$@"
batch_size=${POSITIONAL[0]:-}
[ -z "$batch_size" ] || positive batch_size "$batch_size"
use_environment run
find_gpus

experiment() {
    supervise "$ROOT/run_$1.sh" ${FORCE_CPU:+--cpu} --output-dir "$OUTPUT_DIR" "$2" ${batch_size:+"$batch_size"} \
        -- --save-dir "$ROOT/checkpoints/$1_$2gpu" ${EXTRA[@]+"${EXTRA[@]}"}
}
sweep experiment "gpt2 bert" "1 2 8"
