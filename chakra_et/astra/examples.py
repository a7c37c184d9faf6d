"""``chakra-et fetch-example NAME``: unpack one of the small sets that come with the package, bundle and all.

No network is needed. Each example is a folder that ASTRA-sim runs; benchmarks/make_examples.py makes them
from real runs and from a plan.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et import text
from chakra_et.cli import option, parse
from chakra_et.errors import TraceError
from chakra_et.files import scratch_folder

FOLDER = Path(__file__).with_name("data")


@dataclass
class FetchConfig:
    name: str = option("the example; without it all are listed", "", positional=True)
    output: str = option("the folder in which NAME/ appears", ".", short="-o")


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(FetchConfig, argv, description="Unpack a small example, a folder that ASTRA-sim runs.")
    known = examples()
    if not config.name:
        rows = [("example", "ranks", "what")]
        rows += [(name, str(about["ranks"]), str(about["about"])) for name, about in known.items()]
        print("\n".join(text.table(rows)))
        return 0
    if config.name not in known:
        raise TraceError(f"no example {config.name!r}: use one of {', '.join(known)}")
    folder = fetch(config.name, Path(config.output))
    print(f"{folder}: {known[config.name]['about']}; see {folder / 'README.md'}")
    return 0


def examples() -> dict[str, dict[str, object]]:
    """Name → {"about", "ranks"} of the examples."""
    return json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))


def fetch(name: str, output: Path) -> Path:
    """Unpack example ``name`` as ``output``/``name``. Raises ``TraceError`` where that is there already."""
    folder = output / name
    if folder.exists():
        raise TraceError(f"{folder}: is there already: remove it, or choose another -o")
    output.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder) as scratch, tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        # Pythons from before the filter have none to name.
        options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(scratch, **options)
        scratch.rename(folder)
    return folder
