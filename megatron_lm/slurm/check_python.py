"""Checks that an interpreter has what the training needs; ``_01_run_inter.sh`` runs it with the chosen one.

Imports nothing heavy and nothing of this repository, because it also runs in containers.
"""

import importlib.metadata
import re
import sys

NEEDED = {
    "torch": (2, 6),
    "megatron-core": (0, 16),
    "numpy": (1,),
    "transformers": (4, 44),
    "msgspec": (0, 18),
    "tqdm": (4,),
}


def problem() -> str:
    """What is missing; empty if nothing is."""
    for name, least in NEEDED.items():
        wanted = ".".join(map(str, least))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed (needed: {wanted} or newer)"
        if tuple(int(part) for part in re.findall(r"\d+", found)[: len(least)]) < least:
            return f"{name} {found} is too old (needed: {wanted} or newer)"
    return ""


if __name__ == "__main__":
    lacking = problem()
    if lacking:
        print(
            f"megatron_lm: {sys.executable}: {lacking}; make the environment with 'python3 "
            "scripts/environment.py megatron', or see 'Containers' in megatron_lm/README.md.",
            file=sys.stderr,
        )
        sys.exit(1)
