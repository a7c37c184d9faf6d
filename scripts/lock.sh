#!/usr/bin/env bash
# Write locks/*.txt anew from pyproject.toml: what was tested together, with hashes. Needs uv.
#
# Usage: scripts/lock.sh [options of uv pip compile, such as --upgrade]
#
# PyTorch and the CUDA packages that its builds name are left out: it is the user's own. The files are whole, and
# installed without dependencies.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
options=(--quiet --generate-hashes --no-header --no-annotate "$@")
extra=$(mktemp)
trap 'rm -f "$extra"' EXIT

# lock NAME "MORE REQUIREMENTS" ARGUMENT…
lock() {
    local file=locks/$1.txt
    echo "${2// /$'\n'}" >"$extra"
    shift 2
    uv pip compile "${options[@]}" "$@" --output-file "$file.new" pyproject.toml "$extra"
    awk '/^[a-z0-9]/ { drop = $0 ~ /^(torch|triton|(nvidia|cuda)-[a-z0-9-]+)==/ && $0 !~ /^nvidia-ml-py/ } !drop' \
        "$file.new" >"$file"
    rm "$file.new"
}

python3 scripts/environment.py list dependencies train | LC_ALL=C sort -f |
    sed '1i # What training, tracing and conversion need, from pyproject.toml. Tested together: locks/run.txt.' >requirements.txt
everywhere=(--universal --python-version 3.10)
torch=torch==2.13.0
lock convert "" "${everywhere[@]}"
lock run $torch "${everywhere[@]}" --extra train
lock megatron $torch "${everywhere[@]}" --extra train --extra megatron
# mlc-chakra serves the tests by its protobuf classes; the tools below would bring JupyterLab.
lock dev $torch "${everywhere[@]}" --extra train --extra megatron --group dev --excludes <(echo HolisticTraceAnalysis)
lock mlcommons $torch "${everywhere[@]}" --extra train --extra mlcommons
# The image: Python 3.11, PyTorch 2.4.0, and what is of its time.
lock image "torch==2.4.0 transformers==4.44.2 numpy<2 pandas<3" --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --extra train --extra mlcommons --group dev
