"""From PyTorch traces to Chakra execution traces: capture, repair, convert, check, replay.

The packages, in the order in which data passes through them: ``capture`` records a training process,
``traces`` reads what was recorded, ``repair`` mends damaged files, ``graph`` links both traces of a rank and
finds its dependencies, ``convert`` writes the .et files, ``et`` is their format, ``validate``, ``replay`` and
``info`` work on the result. ``ChakraTracer`` is loaded on first use, as it needs PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chakra_et.errors import TraceError

if TYPE_CHECKING:
    from chakra_et.capture.tracer import ChakraTracer

__all__ = ["ChakraTracer", "TraceError"]


def __getattr__(name: str) -> Any:
    if name == "ChakraTracer":
        from chakra_et.capture.tracer import ChakraTracer

        return ChakraTracer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
