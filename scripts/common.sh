# shellcheck shell=bash
# What every script at the root shares. Sourced; works in bash 3.2 (macOS).

set -euo pipefail

SCRIPT=${0##*/}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CALLER_DIR=$PWD
CHILD=

say() { printf '%s\n' "$*"; }

# die SENTENCE [STATUS]
die() {
    printf '%s: %s\n' "$SCRIPT" "$1" >&2
    exit "${2:-1}"
}

usage_error() { die "$1; see ./$SCRIPT --help" 2; }

# The help of a script is the comment at its head.
show_help() {
    sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' "$ROOT/$SCRIPT"
    exit 0
}

is_count() {
    case $1 in
        '' | 0* | *[!0-9]* | ???????*) return 1 ;;
    esac
}

# absolute PATH: a path as the caller meant it, from wherever the script was called.
absolute() {
    case $1 in
        /*) printf '%s' "$1" ;;
        *) printf '%s' "$CALLER_DIR/$1" ;;
    esac
}

# The first Python that is new enough; shims that cannot run (pyenv) do not count.
find_python() {
    local name
    for name in "${VIRTUAL_ENV:-/none}/bin/python" "${CONDA_PREFIX:-/none}/bin/python" \
        python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# use_environment run|megatron|dev|mlcommons|convert: set PYTHON to an interpreter that has what is needed.
use_environment() {
    local base
    base=$(find_python) || die "Python 3.10 or newer is needed and none is on the PATH"
    PYTHON=$("$base" "$ROOT/scripts/environment.py" "$1") || exit $?
    export PYTHON PYTHONUNBUFFERED=1
}

require_docker() {
    docker info >/dev/null 2>&1 || die "Docker does not answer: install it, start its engine, or gain access to it"
}

# supervise COMMAND…: run it so that it ends when this script does; see scripts/supervise.py.
# In the background with wait, as bash handles a signal at once only there.
supervise() {
    local status=0
    "$PYTHON" "$ROOT/scripts/supervise.py" "$@" &
    CHILD=$!
    wait "$CHILD" || status=$?
    CHILD=
    return "$status"
}

stop() {
    trap '' INT TERM HUP
    if [ -n "$CHILD" ]; then
        kill -TERM "$CHILD" 2>/dev/null || true
        wait "$CHILD" || true
    fi
    printf '\n%s: stopped\n' "$SCRIPT" >&2
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
