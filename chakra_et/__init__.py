"""From PyTorch traces to Chakra execution traces: capture, repair, convert, check, replay.

The packages in the order of the data flow: ``capture`` records a training process, ``traces`` reads the
recorded files, ``repair`` mends damaged ones, ``graph`` links both traces of a rank and finds dependencies,
``convert`` writes .et files, ``et`` is their format, and ``validate``, ``replay`` and ``info`` read them.
``ChakraTracer`` is loaded on first use, as it needs PyTorch.
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
