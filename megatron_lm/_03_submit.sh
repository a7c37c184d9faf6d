#!/usr/bin/env bash
# Submit a run with the settings of _00_conf.sh and print its job ids, or run it on this machine.
#
# Usage: megatron_lm/_03_submit.sh [NAME=VALUE …] [--local] [--dry-run] [more: --help] [-- options of sbatch]
#
# Example: megatron_lm/_03_submit.sh --local MODEL=tiny

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
SCRIPT=megatron_lm/_03_submit.sh
if [ -z "${PYTHON:-}" ]; then
    case " $*" in
        # Planning needs packages; for the rest any Python will do.
        *" --resume"*) use_environment megatron ;;
        *) PYTHON=$(find_python) || die "Python 3.10 or newer is needed and none is on the PATH" ;;
    esac
    # The jobs choose their own.
    python=$PYTHON
    unset PYTHON
fi
exec "${PYTHON:-$python}" "$ROOT/megatron_lm" submit "$@"
