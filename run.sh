#!/usr/bin/env bash
# Start the Docker image with GPUs or without, its outputs, data and checkpoints kept in this folder.
#
# Usage: ./run.sh gpu|cpu [command …]
#
# Without a command: a shell. The container uses the host's network, so that several nodes can train
# together, and InfiniBand where there is one. What it downloads is kept in HF_HOME or, without that
# variable, in the Docker volume mosim-huggingface. Example: ./run.sh gpu ./run_gpt2_quick.sh 2

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

case ${1:-} in
    -h | --help) show_help ;;
    gpu) options=(--gpus all) ;;
    cpu) options=() ;;
    *) usage_error "say gpu or cpu" ;;
esac
device=$1
shift
require_docker
mkdir -p "$ROOT/outputs" "$ROOT/checkpoints"

[ ! -e /dev/infiniband ] || options+=(--device /dev/infiniband)
# Given by name, so that no token is in the list of processes. docker-compose.yml passes the same.
for name in CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME HF_DATASETS_OFFLINE HF_ENDPOINT HF_HUB_OFFLINE HF_TOKEN \
    HTTPS_PROXY HTTP_PROXY LOGLEVEL MASTER_ADDR MASTER_PORT NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_HCA \
    NCCL_SOCKET_IFNAME NO_PROXY OMP_NUM_THREADS WANDB_API_KEY; do
    [ -z "${!name+set}" ] || options+=(--env "$name")
done
[ "$device" = gpu ] || options+=(--env CUDA_VISIBLE_DEVICES=)
[ ! -t 0 ] || options+=(--tty)
# --init passes signals on and reaps. PyTorch shares tensors through /dev/shm, 64 MB by default; NCCL pins
# memory for InfiniBand, and its threads and PyTorch's want larger stacks.
exec docker run --rm --init --interactive ${options[@]+"${options[@]}"} --env "WANDB_MODE=${WANDB_MODE:-offline}" \
    --network host --shm-size 8g --ulimit memlock=-1 --ulimit stack=67108864 \
    --volume "$ROOT/outputs:/workspace/mosim-llms/outputs" \
    --volume "$ROOT/data:/workspace/mosim-llms/data" \
    --volume "$ROOT/checkpoints:/workspace/mosim-llms/checkpoints" \
    --volume "${HF_HOME:-mosim-huggingface}:/workspace/huggingface" \
    "${IMAGE:-mosim-llms:latest}" "$@"
