#!/usr/bin/env bash
# Install the upstream Chakra tools: mlc-chakra, HolisticTraceAnalysis and et_replay. Optional: they
# serve "convert_to_et.py --engine mlcommons" and bring JupyterLab with them.
#
# Usage: ./install_chakra_tools.sh
#
# Installs into the active virtual or conda environment, else into .venv. et_replay is not on PyPI and
# comes from its repository at the commit that Chakra names. Without a way to GitHub, copy that commit
# here by other means and say where it lies:  ET_REPLAY_SOURCE=/path/to/param/et_replay

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

CHAKRA=mlc-chakra==1.0.0
HTA=HolisticTraceAnalysis==0.5.0
PARAM_COMMIT=7b19f586dd8b267333114992833a0d7e0d601630
PARAM_URL=https://github.com/facebookresearch/param

case ${1:-} in
    -h | --help) show_help ;;
    ?*) usage_error "it takes no arguments" ;;
esac

base=$(find_python) || die "Python 3.10 or newer is needed and none is on the PATH"
if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    PYTHON=$base
else
    use_environment run
fi
install_package() { "$base" "$ROOT/scripts/environment.py" install "$PYTHON" "$@"; }

say "installing $CHAKRA and $HTA into ${PYTHON%/bin/*}"
install_package "$CHAKRA" "$HTA" || die "$CHAKRA and $HTA could not be installed; the log is $ROOT/install.log"
say "  chakra_converter, chakra_visualizer, chakra_jsonizer …: installed"

et_replay=${ET_REPLAY_SOURCE:-$PARAM_URL/archive/$PARAM_COMMIT.zip#subdirectory=et_replay}
say "installing et_replay from $et_replay"
if "$PYTHON" -c 'import et_replay' 2>/dev/null || install_package "$et_replay"; then
    say "  chakra_trace_link: installed; convert_to_et.py --engine mlcommons is ready"
else
    say "  missing: et_replay, so chakra_trace_link does not run (chakra_converter does; the log is $ROOT/install.log)."
    say "  To get it: download $PARAM_URL/archive/$PARAM_COMMIT.zip where GitHub can be reached, unpack it here, and run"
    say "  ET_REPLAY_SOURCE=/path/to/param-$PARAM_COMMIT/et_replay ./install_chakra_tools.sh"
fi
