#!/usr/bin/env bash
# Install the upstream Chakra tools: mlc-chakra, HolisticTraceAnalysis and et_replay. Optional: they
# serve "convert_to_et.py --engine mlcommons" and bring JupyterLab with them.
#
# Usage: ./install_chakra_tools.sh
#
# Takes the active environment if it has mlc-chakra and HolisticTraceAnalysis, else .venv. et_replay is not on
# PyPI and comes from its repository at the commit that Chakra names (pyproject.toml has all pins). Without a way to
# GitHub, copy that commit here by other means and say where it lies:  ET_REPLAY_SOURCE=/path/to/param/et_replay

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

case ${1:-} in
    -h | --help) show_help ;;
    ?*) usage_error "it takes no arguments" ;;
esac

use_environment mlcommons
say "chakra_converter, chakra_visualizer, chakra_jsonizer and HolisticTraceAnalysis: installed in ${PYTHON%/bin/*}"
"$PYTHON" -c 'import et_replay' 2>/dev/null && exit
source=${ET_REPLAY_SOURCE:-$("$PYTHON" "$ROOT/scripts/environment.py" list et-replay)}
say "installing $source"
"$PYTHON" -m pip install --no-input "$source" >"$ROOT/install.log" 2>&1 ||
    die "et_replay could not be installed, so chakra_trace_link does not run (the log is $ROOT/install.log): where GitHub
can be reached, download ${source#* @ }, unpack it here, and run ET_REPLAY_SOURCE=/path/to/param-…/et_replay ./install_chakra_tools.sh"
say "et_replay: installed; convert_to_et.py --engine mlcommons is ready"
