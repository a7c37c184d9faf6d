#!/usr/bin/env bash
# The Python steps of the Dockerfile, here so that they can be replayed in any clean environment.
#
# Usage: scripts/docker_python_steps.sh requirements|tools|tokenizers [FOLDER]
#
#   requirements       what the project needs, beside the PyTorch that is already there
#   tools              mlc-chakra, HolisticTraceAnalysis and et_replay
#   tokenizers FOLDER  the published tokenizers of GPT-2 and BERT, into FOLDER
#
# LOCK names the file of pinned versions (default: locks/image.txt). PyTorch is in none: the base image chose it, with
# its CUDA. TOKENIZER_SOURCE names a folder that has gpt2/ and bert-base-uncased/ and takes the hub's place.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    requirements)
        python -m pip install --no-input --no-deps -r "${LOCK:-locks/image.txt}"
        ;;
    tools)
        torch=$(python -c 'from importlib.metadata import version; print("torch==" + version("torch"))')
        python -m pip install --no-input -c <(echo "$torch") -r <(python scripts/environment.py list mlcommons et-replay)
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
