#!/usr/bin/env bash
# Check style and run the tests.
#
# Usage: ./run_tests.sh [--slow] [arguments of pytest]
#
# Makes or reuses the Python environment (.venv), then runs ruff check, ruff format --check and
# pytest. --slow also runs the tests that take long. Example: ./run_tests.sh tests/chakra_et -k link

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

case ${1:-} in -h | --help) show_help ;; esac

use_environment dev
cd "$ROOT"
problems=
supervise "$PYTHON" -m ruff check . || problems="$problems, ruff check"
supervise "$PYTHON" -m ruff format --check . || problems="$problems, ruff format"
supervise "$PYTHON" -m pytest "$@" || problems="$problems, pytest"
[ -z "$problems" ] || die "faults found by ${problems#, }: the lines above name them"
