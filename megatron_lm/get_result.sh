#!/usr/bin/env bash
# Show how a run goes: what is wrong first, its last messages, settings, iteration times and speed.
#
# Usage: megatron_lm/get_result.sh JOBID [JOBID2] [--watch]
#
# A heterogeneous run has two job ids and shows as one; either of them is enough. --watch: again every 2 s
# until the run has ended, as tables where rich is installed; then the run's page is written.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
SCRIPT=megatron_lm/get_result.sh
case ${1:-} in -h | --help) show_help ;; esac
[ -n "${PYTHON:-}" ] || use_environment megatron
exec "$PYTHON" "$ROOT/megatron_lm" get_result "$@"
