#!/usr/bin/env bash
# Start the Docker image with GPUs or without, its outputs, data and checkpoints kept in this folder.
#
# Usage: ./run.sh gpu|cpu [command …]
#
# Without a command: a shell. Example: ./run.sh gpu ./run_gpt2_quick.sh 2

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

case ${1:-} in
    -h | --help) show_help ;;
    gpu) devices=(--gpus all) ;;
    cpu) devices=(--env CUDA_VISIBLE_DEVICES=) ;;
    *) usage_error "say gpu or cpu" ;;
esac
shift
require_docker
mkdir -p "$ROOT/outputs" "$ROOT/checkpoints"

terminal=(--interactive)
[ ! -t 0 ] || terminal+=(--tty)
# --init passes signals on and reaps; PyTorch shares tensors through /dev/shm, 64 MB by default.
exec docker run --rm --init "${terminal[@]}" "${devices[@]}" --shm-size 8g \
    --volume "$ROOT/outputs:/workspace/mosim-llms/outputs" \
    --volume "$ROOT/data:/workspace/mosim-llms/data" \
    --volume "$ROOT/checkpoints:/workspace/mosim-llms/checkpoints" \
    "${IMAGE:-mosim-llms:latest}" "$@"
