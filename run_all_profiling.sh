#!/usr/bin/env bash
# Trace both models on 1, 2 and 4 GPUs, and on 8 where there are 8: all the quick runs.
#
# Usage: ./run_all_profiling.sh [max_steps=10] [options] [-- flags of both train.py]
#
# Runs what this machine can run and names the rest. A run that fails does not stop the others.
#
#   --cpu             1, 2 and 4 CPU processes (gloo) instead of GPUs
#   --output-dir DIR  where traces and .et files go (default: outputs)

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"
# shellcheck source=scripts/jobs.sh
. "$ROOT/scripts/jobs.sh"

parse_job 1 "$@"
STEPS=${POSITIONAL[0]:-10}
positive max_steps "$STEPS"
use_environment run
find_gpus
counts="1 2 4"
[ "$GPUS" -lt 8 ] || counts="1 2 4 8"
sweep quick_run "gpt2 bert" "$counts"
