#!/usr/bin/env bash
# Build ASTRA-sim's analytical binaries from public sources, by commit, for tests/astra and your own bundles.
#   scripts/build_astra_sim.sh [FOLDER]         default: astra-sim; the binaries come to lie in FOLDER/bin
#   ASTRA_SIM=astra-sim/bin/AstraSim_Analytical_Congestion_Unaware python -m pytest tests/astra
# It needs git, cmake, a C++17 compiler, protobuf with protoc, and a network; about ten minutes on two cores.
# On Debian: apt-get install git cmake g++ make protobuf-compiler libprotobuf-dev zlib1g-dev
set -euo pipefail
folder=${1:-astra-sim}
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
mkdir -p "$folder"
for tool in git cmake protoc c++; do
  command -v "$tool" >/dev/null || { echo "error: $tool isn't there: install it (see the head of this script)" >&2; exit 2; }
done

# FOLDER URL COMMIT: what the binaries that docs/SIMULATORS.md speaks of were built from.
get() {
  [ -d "$1/.git" ] || git clone --quiet "$2" "$1"
  git -C "$1" checkout --quiet "$3"
}
source=$folder/source github=https://github.com
get "$source" $github/astra-sim/astra-sim.git 518bd513
get "$source/extern/graph_frontend/chakra" $github/astra-sim/chakra.git f37c2bb
get "$source/extern/network_backend/analytical" $github/astra-sim/astra-network-analytical.git 599a047
get "$source/extern/remote_memory_backend/analytical" $github/astra-sim/astra-memory-analytical.git 641cce8
get "$source/extern/helper/spdlog" $github/gabime/spdlog.git v1.13.0
get "$source/extern/helper/fmt" $github/fmtlib/fmt.git 9.1.0

change() { sed "$2" "$1" >"$1.new" && mv "$1.new" "$1"; }
# The alias stands in front of the namespace that it names.
feeder=$(find "$source/extern/graph_frontend/chakra" -name et_feeder.h -path '*feeder_v3*' | head -1)
if ! tail -1 "$feeder" | grep -q 'using ETFeeder'; then
  change "$feeder" '/using ETFeeder = FeederV3::ETFeeder;/d'
  echo 'namespace Chakra { using ETFeeder = FeederV3::ETFeeder; }' >>"$feeder"
fi
# yaml-cpp comes by FetchContent; it must not be added twice.
change "$source/extern/network_backend/analytical/CMakeLists.txt" \
  's/^\( *\)\(add_subdirectory(.*yaml-cpp.*\)/\1# \2/'
schema=$source/extern/graph_frontend/chakra/schema/protobuf
protoc --proto_path="$schema" --cpp_out="$schema" "$schema/et_def.proto"

cmake -S "$source/build/astra_analytical" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILDTARGET=all
cmake --build "$folder/build" --parallel "${JOBS:-$(getconf _NPROCESSORS_ONLN)}"
mkdir -p "$folder/bin"
for kind in Unaware Aware; do
  find "$folder/build" "$source/build" -type f -name "AstraSim_Analytical_Congestion_$kind" -exec cp {} "$folder/bin/" \;
  [ -x "$folder/bin/AstraSim_Analytical_Congestion_$kind" ] || { echo "error: no binary for $kind was built" >&2; exit 1; }
done
ls -l "$folder/bin"
