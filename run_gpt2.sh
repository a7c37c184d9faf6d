#!/usr/bin/env bash
# Train GPT-2 small in full, with evaluation and checkpoints; trace three early steps, and convert them at the end.
#
# Usage: ./run_gpt2.sh [num_gpus=1] [batch_size] [options] [-- flags of gpt2/train.py]
#
# batch_size counts one GPU. Without a GPU, num_gpus is the number of CPU processes (gloo).
#
#   --cpu             train on the CPU although there are GPUs
#   --output-dir DIR  where traces and .et files go (default: outputs)
#   --nnodes N --node-rank R --master-addr HOST [--master-port PORT]
#                     several machines: run it on each; num_gpus counts one machine
#
# Writes checkpoints/gpt2 and outputs/gpt2_<N>gpu_trace*. Without a trace: -- --no-enable-tracing
# Example: ./run_gpt2.sh 8 16 -- --num-epochs 3 --bf16

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"
# shellcheck source=scripts/jobs.sh
. "$ROOT/scripts/jobs.sh"
full_job gpt2 "$@"
