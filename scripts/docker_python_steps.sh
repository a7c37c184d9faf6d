#!/usr/bin/env bash
# The Python steps of the Dockerfile, here so that they can be replayed in any clean environment.
#
# Usage: scripts/docker_python_steps.sh requirements|tools|tokenizers [FOLDER]
#
#   requirements       what the project needs, beside the PyTorch that is already there
#   tools              mlc-chakra, HolisticTraceAnalysis and et_replay
#   tokenizers FOLDER  the published tokenizers of GPT-2 and BERT, into FOLDER
#
# CONSTRAINTS names the file of pinned versions (default: constraints-image.txt). TOKENIZER_SOURCE
# names a folder that has gpt2/ and bert-base-uncased/ and takes the hub's place.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONSTRAINTS=${CONSTRAINTS:-constraints-image.txt}
# The commits that Chakra itself names for its trace linker.
PARAM=git+https://github.com/facebookresearch/param.git@7b19f586dd8b267333114992833a0d7e0d601630
HTA=git+https://github.com/facebookresearch/HolisticTraceAnalysis.git@d731cc2e2249976c97129d409a83bd53d93051f6

# The pins, with PyTorch held at what is there: the base image chose it, with its CUDA.
pins() {
    grep -v '^torch==' "$CONSTRAINTS"
    python -c 'from importlib.metadata import version; print("torch==" + version("torch"))'
}

install() {
    local status=0 file
    file=$(mktemp)
    pins >"$file"
    python -m pip install --no-input -c "$file" "$@" || status=$?
    rm -f "$file"
    return "$status"
}

case ${1:-} in
    requirements)
        install -r requirements.txt -r requirements-dev.txt
        ;;
    tools)
        install mlc-chakra==1.0.0 "HolisticTraceAnalysis @ $HTA" "et_replay @ $PARAM#subdirectory=et_replay"
        ;;
    tokenizers)
        python - "${2:?name the folder}" "${TOKENIZER_SOURCE:-}" <<'PYTHON'
import sys
from transformers import AutoTokenizer

folder, source = sys.argv[1:]
for owner, name in (("openai-community", "gpt2"), ("google-bert", "bert-base-uncased")):
    tokenizer = AutoTokenizer.from_pretrained(f"{source or owner}/{name}")
    tokenizer.save_pretrained(f"{folder}/{name}")
    print(f"{name}: {len(tokenizer)} tokens, in {folder}/{name}")
PYTHON
        ;;
    *)
        sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' "$0" >&2
        exit 2
        ;;
esac
