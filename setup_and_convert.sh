#!/usr/bin/env bash
# Turn copied traces into Chakra .et files: one command for a laptop (Linux, macOS), no PyTorch.
#
# Usage: ./setup_and_convert.sh [DIR=outputs] [--engine native|mlcommons]
#
# Makes or reuses a small environment (chakra-venv), repairs the host traces in DIR, converts every
# host/device pair, checks the .et files and lists them. --engine mlcommons does it with the upstream tools, in
# .venv (./install_chakra_tools.sh).

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

dir=
engine=native
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) show_help ;;
        --engine)
            case ${2:-} in native | mlcommons) engine=$2 ;; *) usage_error "--engine is native or mlcommons" ;; esac
            shift
            ;;
        -*) usage_error "unknown option $1" ;;
        *)
            [ -z "$dir" ] || usage_error "one folder at a time: $given $1"
            given=$1
            dir=$(absolute "$1")
            ;;
    esac
    shift
done
dir=${dir:-$ROOT/outputs}
[ -d "$dir" ] || die "no folder $dir: copy the *_host.json and *_device.json files of a run there"

kind=convert
if [ "$engine" = mlcommons ]; then
    kind=mlcommons
    "$ROOT/install_chakra_tools.sh" || exit $?
fi
use_environment "$kind"
cd "$ROOT"
problems=
say "== repairing host traces in $dir"
supervise "$PYTHON" fix_host_traces.py --dir "$dir" || problems="$problems repair"
say "== converting"
supervise "$PYTHON" convert_to_et.py --dir "$dir" --engine "$engine" || problems="$problems conversion"

# NAME.<rank>.et only: NAME.et is rank 0 again.
traces=()
for file in "$dir"/*.et; do
    rank=${file%.et}
    rank=${rank##*.}
    case $rank in *[!0-9]* | '') ;; *) [ ! -f "$file" ] || traces+=("$file") ;; esac
done
[ "${#traces[@]}" -gt 0 ] || die "no .et file came out of $dir: the lines above say why"
say "== checking"
supervise "$PYTHON" -m chakra_et validate "${traces[@]}" || problems="$problems check"
say "== .et files"
ls -l "$dir"/*.et
[ -z "$problems" ] || die "not everything went well, see above:$problems"
say "Next: give a simulator the prefix of a rank set, for example ${traces[0]%.*.et}"
