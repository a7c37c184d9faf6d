"""The import path that users of this repository know: ``from utils.chakra_tracer import ChakraTracer``."""

from __future__ import annotations

from chakra_et.capture.tracer import ChakraTracer, TraceConfig, check_trace_name

__all__ = ["ChakraTracer", "TraceConfig", "check_trace_name"]
