#!/usr/bin/env bash
# Fetch the wheels that scripts/gpu_check.sh needs on a machine without network, into gpu_wheels/ (under 40 MB).
#
# Usage: scripts/gpu_wheels.sh [PYTHON_VERSION=3.12]

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
"${PYTHON:-python3}" -m pip download --quiet --only-binary :all: --no-deps --python-version "${1:-3.12}" \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform any \
    -d "$root/gpu_wheels" msgspec tqdm PyYAML
du -sh "$root/gpu_wheels"
