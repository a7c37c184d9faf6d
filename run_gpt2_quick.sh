#!/usr/bin/env bash
# Train GPT-2 small for a few steps, trace every rank, and convert the traces to Chakra .et files.
#
# Usage: ./run_gpt2_quick.sh [num_gpus] [max_steps=10] [options] [-- flags of gpt2/train.py]
#
# Makes or reuses the Python environment (.venv), trains under torchrun, repairs and converts the
# traces, checks the .et files, and prints what was written. Without num_gpus: three runs, on 1, 2 and 4
# GPUs, as far as the machine has them. Without a GPU, num_gpus is the number of CPU processes (gloo,
# default 1), and the sequences are short: about two minutes on two cores.
#
#   --cpu             train on the CPU although there are GPUs
#   --output-dir DIR  where traces and .et files go (default: outputs)
#   --nnodes N --node-rank R --master-addr HOST [--master-port PORT]
#                     several machines: run it on each; num_gpus counts one machine
#
# Writes outputs/gpt2_<N>gpu_quick_trace*: host and device trace of each rank, .et files, manifest.
# Example: ./run_gpt2_quick.sh 2 10 -- --batch-size 4 --trace-gzip

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"
# shellcheck source=scripts/jobs.sh
. "$ROOT/scripts/jobs.sh"
quick_job gpt2 "$@"
