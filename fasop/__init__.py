"""FASOP: plan how a transformer is spread over a cluster of mixed GPUs; ``fasop.api``: from Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fasop.errors import PlanError

if TYPE_CHECKING:
    from fasop.api import as_job, costs, plan

__all__ = ["PlanError", "as_job", "costs", "plan"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("fasop.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
