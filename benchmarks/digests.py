"""What ``et_bytes`` and ``fasop_bytes`` share: digests of outputs, saved, and compared with others."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Config:
    """What is compared with what."""

    save: str = field(default="", metadata={"help": "write the digests to this file"})
    compare: str = field(default="", metadata={"help": "compare with the digests in this file"})

    def __post_init__(self) -> None:
        if bool(self.save) == bool(self.compare):
            raise ValueError("give either --save FILE or --compare FILE")


def saved_or_compared(config: Config, found: dict[str, Any], nodes_only: bool = False) -> int:
    """Save the digests of outputs by name, or print which differ from those saved; the exit status.

    nodes_only: compare .et files alone, and of each digest what follows the first.
    """
    print(f"{len(found)} files, of them {sum(name.endswith('.et') for name in found)} .et files")
    if config.save:
        Path(config.save).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    known = json.loads(Path(config.compare).read_text())
    if nodes_only:
        known, found = ({k: v[1:] for k, v in table.items() if k.endswith(".et")} for table in (known, found))
    differ = sorted(name for name in known | found if known.get(name) != found.get(name))
    print(f"{len(found) - len(set(differ) & set(found))} are the same, {len(differ)} differ")
    print("\n".join(f"  {name}" for name in differ))
    return 1 if differ else 0
