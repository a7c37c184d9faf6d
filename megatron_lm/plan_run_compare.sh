#!/usr/bin/env bash
# Plan, run and compare on this machine: FASOP's plan of the tiny model, run, predicted against measured.
#
# Usage: megatron_lm/plan_run_compare.sh [--stages 2] [--global-batch 16] [--iterations 10] [--output DIR]
#
# Measures the model's parts in two short runs, plans with them, runs the plan, and prints predicted and
# measured times; DIR (plan_run_compare) gets the costs, the plan, its settings and a page.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
SCRIPT=megatron_lm/plan_run_compare.sh
case ${1:-} in -h | --help) show_help ;; esac
[ -n "${PYTHON:-}" ] || use_environment megatron
export PYTHON
supervise "$PYTHON" "$ROOT/megatron_lm" plan_run_compare "$@"
