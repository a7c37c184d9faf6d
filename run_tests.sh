#!/usr/bin/env bash
# Check style and types, and run the tests.
#
# Usage: ./run_tests.sh [--slow] [arguments of pytest]
#
# Makes or reuses the Python environment (.venv), then runs ruff check, ruff format --check, mypy and
# pytest with one process per core (-n 0: all tests in one process). --slow also runs the tests that
# take long. Example: ./run_tests.sh tests/convert -k link

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

case ${1:-} in -h | --help) show_help ;; esac

use_environment dev
cd "$ROOT"
problems=
supervise "$PYTHON" -m ruff check . || problems="$problems, ruff check"
supervise "$PYTHON" -m ruff format --check . || problems="$problems, ruff format"
supervise "$PYTHON" -m mypy || problems="$problems, mypy"
# Tests start hundreds of Python processes, and without bytecode each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
# Tests of one file share set-ups that take up to minutes, so a file stays in one process.
supervise "$PYTHON" -m pytest -n logical --dist loadfile "$@" || problems="$problems, pytest"
[ -z "$problems" ] || die "faults found by ${problems#, }: the lines above name them"
