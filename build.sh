#!/usr/bin/env bash
# Build the Docker image mosim-llms:latest.
#
# Usage: ./build.sh [options of docker build]
#
# Example: ./build.sh --build-arg BASE_IMAGE=pytorch/pytorch:<tag> --build-arg LOCK=locks/dev.txt

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

case ${1:-} in -h | --help) show_help ;; esac
require_docker
commit=${PROJECT_COMMIT:-$(git -C "$ROOT" describe --always --abbrev=40 --exclude '*' --dirty 2>/dev/null || true)}
exec docker build --tag "${IMAGE:-mosim-llms:latest}" --build-arg "PROJECT_COMMIT=$commit" "$@" "$ROOT"
