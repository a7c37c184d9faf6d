"""``chakra-et run``: trace a training script that can't be edited.

    CHAKRA_TRACE=outputs/my_run chakra-et run train.py --lr 3e-4
    CHAKRA_TRACE=outputs/my_run python -m chakra_et run -m package.train --lr 3e-4
    CHAKRA_TRACE=outputs/my_run torchrun --nproc_per_node 2 -m chakra_et run train.py --lr 3e-4

Runs the script as Python would, and traces it from the end of its first optimizer step on. A step ends when
the optimizer that stepped first has stepped again. These variables control the trace:
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chakra_et.capture.config import VARIABLES, TraceConfig, config_from_environment
from chakra_et.errors import TraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script under the tracer; returns or raises its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_module = words[:1] == ["-m"]
    target = words[1:] if is_module else words
    if not target or target[0] in ("-h", "--help"):
        print("usage: chakra-et run SCRIPT [ARGUMENT …]\n       chakra-et run -m MODULE [ARGUMENT …]\n")
        print((__doc__ or "").partition("\n\n")[2])
        width = max(map(len, VARIABLES))
        print("\n".join(f"  {name:{width}}  {variable.help}" for name, variable in VARIABLES.items()))
        return 0 if target else 2
    try:
        config = config_from_environment(os.environ)
    except ValueError as error:
        raise TraceError(str(error)) from None
    if not is_module and not Path(target[0]).is_file():
        raise TraceError(f"{target[0]}: no such script; give a Python file, or -m and a module.")
    return _run(target, is_module, config)


def _run(target: list[str], is_module: bool, config: TraceConfig) -> int:
    trace = _Trace(config)
    sys.argv = target
    sys.path[0] = os.getcwd() if is_module else str(Path(target[0]).resolve().parent)
    try:
        _after_each_step(trace.step)
        if is_module:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target[0], run_name="__main__")
    except SystemExit as end:
        trace.close(None if end.code in (None, 0) else end)
        raise
    except BaseException as error:
        trace.close(error)
        # Here, as the script's errors must not be taken for ours.
        traceback.print_exception(type(error), error, _of_the_script(error))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    trace.close(None)
    return 0


class _Trace:
    """The tracer of a script, started when its first optimizer has stepped once."""

    def __init__(self, config: TraceConfig):
        self.config = config
        self.optimizer: Any = None
        self.tracer: Any = None

    def step(self, optimizer: Any) -> None:
        """Count a step of ``optimizer``."""
        from chakra_et.capture.tracer import ChakraTracer

        if self.tracer is None:
            config = self.config
            self.optimizer = optimizer
            self.tracer = ChakraTracer(
                config.trace_output_dir,
                str(config.trace_name),
                config.trace_wait_steps,
                config.trace_warmup_steps,
                config.trace_active_steps,
                gzip=config.trace_gzip,
                memory=config.trace_memory,
                run_info={"command": sys.argv},
            )
            self.tracer.__enter__()
        elif optimizer is self.optimizer:
            self.tracer.step()

    def close(self, error: BaseException | None) -> None:
        """Finish the trace; ``error`` is what ended the script."""
        if self.tracer is not None:
            self.tracer.__exit__(type(error) if error else None, error, None)
        elif error is None:
            print("chakra-et: no trace was written: no PyTorch optimizer has stepped", file=sys.stderr)


def _after_each_step(call: Callable[[Any], None]) -> None:
    """Call ``call(optimizer)`` after each step of every optimizer that is created from now on."""
    from torch.optim import Optimizer

    hook: Any = Optimizer.profile_hook_step

    # A global post hook of PyTorch would run inside the optimizer's own annotation, which the end of a
    # recording would cut in two.
    def profile_hook_step(function: Any) -> Any:
        step = hook(function)

        @functools.wraps(step)
        def counted(self: Any, *values: Any, **options: Any) -> Any:
            result = step(self, *values, **options)
            call(self)
            return result

        return counted

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[method-assign, assignment]


def _of_the_script(error: BaseException) -> Any:
    """The traceback from the script's first frame on."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__") != "__main__":
        found = found.tb_next
    return found or error.__traceback__
