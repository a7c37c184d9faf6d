#!/usr/bin/env bash
# Check on this machine that captures, predictions, kernel times, plans and verdicts are right.
#
# Usage: scripts/gpu_check.sh [--part NAME ...] [-o FOLDER] [--again] [--cpu]
#
# Needs no network and no environment of its own: the Python that is there (PYTHON, or python3) with PyTorch, and
# for what it lacks the wheels that scripts/gpu_wheels.sh put into gpu_wheels/. At most 9 minutes on one GPU; parts
# that are done are not run again. Without a GPU it is a rehearsal on the CPU. Results: FOLDER/doctor.json and
# doctor.md (default: gpu_check). Parts: capture, what-ifs, kernels, verdicts, training, planner, peers.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
python=${PYTHON:-python3}
site=$root/gpu_wheels/site
for package in msgspec tqdm yaml; do
    if ! PYTHONPATH=$site "$python" -c "import $package" 2>/dev/null; then
        name=${package/yaml/PyYAML}
        "$python" -m pip install --quiet --no-index --no-deps --find-links "$root/gpu_wheels" --target "$site" "$name" ||
            { echo "gpu_check.sh: $name is missing: run scripts/gpu_wheels.sh where there is a network" >&2; exit 2; }
    fi
done
export PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH}
case " $* " in *" -o "* | *" --output"*) ;; *) set -- "$@" -o gpu_check ;; esac
exec "$python" "$root/scripts/gpu_check.py" "$@"
