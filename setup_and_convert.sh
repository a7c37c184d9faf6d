#!/usr/bin/env bash
# Turn copied traces into Chakra .et files: one command for a laptop (Linux, macOS), no PyTorch.
#
# Usage: ./setup_and_convert.sh [DIR=outputs]
#
# Makes or reuses a small environment (chakra-venv), repairs the host traces in DIR, converts every
# host/device pair, checks the .et files and lists them.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

dir=$ROOT/outputs
[ $# -le 1 ] || usage_error "one folder at a time: $*"
case ${1:-} in
    -h | --help) show_help ;;
    -*) usage_error "unknown option $1" ;;
    ?*) dir=$(absolute "$1") ;;
esac
[ -d "$dir" ] || die "no folder $dir: copy the *_host.json and *_device.json files of a run there"

use_environment convert
cd "$ROOT"
problems=
say "== repairing host traces in $dir"
supervise "$PYTHON" fix_host_traces.py --dir "$dir" || problems="$problems repair"
say "== converting"
supervise "$PYTHON" convert_to_et.py --dir "$dir" || problems="$problems conversion"

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
