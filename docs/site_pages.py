"""Puts the guides of all folders into the site, laid out as in the repository, so that their links hold."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ("*.md", "docs/*.md", "docs/*.ipynb", "fasop/README.md", "megatron_lm/*.md")
BESIDE = ("LICENSE", "CITATION.cff", "docs/pictures/*", "benchmarks/*.svg")


def on_config(config: Any) -> Any:
    """Build from links to the pages; the notebook's outputs are those that it holds."""
    folder = tempfile.TemporaryDirectory(prefix="site-")
    config.extra["pages"] = folder  # deleted with the configuration
    for path in (found for pattern in GUIDES + BESIDE for found in ROOT.glob(pattern)):
        link = Path(folder.name, path.relative_to(ROOT))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    config.docs_dir = folder.name
    return config
