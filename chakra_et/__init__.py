"""From PyTorch traces to Chakra execution traces, and from these to answers: see ``chakra_et.api``.

    import chakra_et as ce

    job = ce.load("outputs/gpt2_2gpu_quick_trace")
    print(ce.predict(job.scale(dp=8)).after_ms)

Everything is loaded on first use: ``ChakraTracer`` needs PyTorch, the rest NumPy and msgspec. ``predict`` and
``convert`` are packages too, called as the functions of ``chakra_et.api``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from chakra_et.errors import TraceError

if TYPE_CHECKING:
    from chakra_et.api import Job, convert, load, predict
    from chakra_et.capture.tracer import ChakraTracer
    from chakra_et.export.tables import Table

__all__ = ["ChakraTracer", "Job", "Table", "TraceError", "convert", "load", "predict"]
__version__ = "0.1.0"

_HOME = {"ChakraTracer": "capture.tracer", "Table": "export.tables", "Job": "api", "load": "api"}


def __getattr__(name: str) -> Any:
    if name in ("convert", "predict"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class CallablePackage(ModuleType):
    """A package that is called as the function of its name in ``chakra_et.api``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("chakra_et.api"), function)(*arguments, **options)


def make_callable(package: str) -> None:
    """Let ``chakra_et.PACKAGE(…)`` be called, although the import of the package hides the function."""
    sys.modules[package].__class__ = CallablePackage
