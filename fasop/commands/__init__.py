"""The commands of ``python -m fasop``, each a module with ``main(argv) -> status``."""

from dataclasses import MISSING, field
from typing import Any


def flag(text: str, default: Any = MISSING, **more: Any) -> Any:
    """A field of a command's config: its line of help, its default, and further metadata of ``cli``."""
    return field(default=default, metadata={"help": text, **more})
