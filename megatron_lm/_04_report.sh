#!/usr/bin/env bash
# Print a run's logs of one kind, or write its summary as a page.
#
# Usage: megatron_lm/_04_report.sh JOBID [JOBID2 …] out|err|gpu|summary
#
# summary: problems, loss, speed, memory by rank, GPU use, nodes, events and settings, into summary.html in the
# run's log folder; prints its path. Several runs beside each other: comparison.html.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
SCRIPT=megatron_lm/_04_report.sh
case ${1:-} in -h | --help) show_help ;; esac
[ -n "${PYTHON:-}" ] || use_environment megatron
exec "$PYTHON" "$ROOT/megatron_lm" report "$@"
