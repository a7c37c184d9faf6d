"""FASOP: plan how a transformer is spread over a cluster of mixed GPUs; ``fasop.api``: from Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasop.api import as_job, costs, plan
    from fasop.errors import PlanError

__all__ = ["PlanError", "as_job", "costs", "plan"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("fasop.errors" if name == "PlanError" else "fasop.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
