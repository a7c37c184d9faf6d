#!/usr/bin/env bash
# Run the simulation and count the ranks that finished: ASTRA-sim's exit status does not show it.
#   ./run.sh [@BINARY@]     or ASTRA_SIM=/path/to/the/binary ./run.sh
set -u
binary=${1:-${ASTRA_SIM:-@BINARY@}}
if ! binary=$(command -v "$binary"); then
  echo "error: no ASTRA-sim: give the path of @BINARY@" >&2
  exit 2
fi
binary=$(realpath "$binary")
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")" || exit 2
"$binary" \
  --workload-configuration=./@NAME@ \
  --comm-group-configuration=./@NAME@_comm_groups.json \
  --system-configuration=./system.json \
  --remote-memory-configuration=./memory.json \
  --network-configuration=./network.yml \
  --num-queues-per-dim=1 \
  --comm-scale=1 \
  --injection-scale=1 \
  --rendezvous-protocol=true \
  >astra.log 2>&1
status=$?
finished=$(grep -Eo 'sys\[[0-9]+\] finished' astra.log | sort -u | wc -l)
echo "$finished of @RANKS@ ranks finished (ASTRA-sim's exit status: $status); the log is astra.log"
[ "$finished" -eq @RANKS@ ]
