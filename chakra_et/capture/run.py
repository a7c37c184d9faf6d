"""``chakra-et run``: trace a training script that can't be edited.

    CHAKRA_TRACE=outputs/my_run chakra-et run train.py --lr 3e-4
    CHAKRA_TRACE=outputs/my_run python -m chakra_et run -m package.train --lr 3e-4
    CHAKRA_TRACE=outputs/my_run torchrun --nproc_per_node 2 -m chakra_et run train.py --lr 3e-4

Runs the script as Python would, and traces it from the end of its first step on; processes that it starts by
multiprocessing, too. A step ends when the optimizer that stepped first has stepped again. Without an
optimizer, it ends when the module that was first called without gradients returns; with --step-on NAME,
when a module of class NAME does. The exit status is the script's, but 1 if nothing was recorded. What was
recorded is kept when the script fails, is terminated or calls os._exit. These variables control the trace:
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from chakra_et.capture.config import VARIABLES, TraceConfig, config_from_environment
from chakra_et.errors import TraceError
from chakra_et.files import read_json
from chakra_et.names import RunFiles

_NO_STEPS = "no optimizer stepped, no module ran without gradients; name a module's class with --step-on NAME"
# Their processes don't train.
_NOT_FOLLOWED = ("torch.utils.data", "torch._inductor", "multiprocessing", "concurrent")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script under the tracer; returns or raises its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    step_on = words.pop(1) if words[:1] == ["--step-on"] and len(words) > 1 else ""
    words = words[1:] if step_on else words
    is_module = words[:1] == ["-m"]
    target = words[1:] if is_module else words
    if not target or target[0] in ("-h", "--help"):
        print("usage: chakra-et run [--step-on NAME] SCRIPT [ARGUMENT …]")
        print("       chakra-et run [--step-on NAME] -m MODULE [ARGUMENT …]\n")
        print((__doc__ or "").partition("\n\n")[2])
        width = max(map(len, VARIABLES))
        print(f"  {'CHAKRA_TRACE':{width}}  FOLDER/NAME of the trace files (required)")
        for name, field in VARIABLES.items():
            print(f"  {name:{width}}  {field.metadata['help']} (default: {field.default:d})")
        return 0 if target else 2
    try:
        config = config_from_environment(os.environ)
    except ValueError as error:
        raise TraceError(str(error)) from None
    if not is_module and not Path(target[0]).is_file():
        raise TraceError(f"{target[0]}: no such script; give a Python file, or -m and a module.")
    return _run(target, is_module, _RunTrace(config, step_on))


def _run(target: list[str], is_module: bool, trace: _RunTrace) -> int:
    sys.argv = target
    sys.path[0] = os.getcwd() if is_module else str(Path(target[0]).resolve().parent)
    began = time.time_ns()
    try:
        with trace.following():
            if is_module:
                runpy.run_module(target[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except BaseException as error:
        # Here, as the script's errors must not be taken for ours.
        traceback.print_exception(type(error), error, _of_the_script(error))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    manifest = RunFiles(Path(trace.config.trace_output_dir), str(trace.config.trace_name)).manifest_file
    if trace.tracer is not None and trace.tracer.written:
        return 0
    # Perhaps processes that the script started have.
    is_new = manifest.is_file() and manifest.stat().st_mtime_ns >= began
    if is_new and any(rank["files"] for rank in read_json(manifest)["ranks"]):
        return 0
    short = "no step was recorded, see above; a short script may need more steps, or --step-on NAME"
    why = short if trace.tracer else _NO_STEPS
    print(f"chakra-et: no trace was written: {why}", file=sys.stderr)
    return 1


class _RunTrace:
    """The tracer of a script, started when its first step has ended.

    ``step_on``: class of the module whose calls are steps; "": an optimizer's steps, or else the calls of the
    outermost module without gradients.
    """

    follows = False
    """Whether steps of this process are counted."""

    def __init__(self, config: TraceConfig, step_on: str):
        self.config, self.step_on = config, step_on
        self.stepping: Any = None
        self.tracer: Any = None

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Count the steps in this process and those that it starts, and finish the trace however it ends."""
        _RunTrace.follows = True
        handles = _after_each_call(self.step, self.step_on)
        if not self.step_on:
            _after_each_step(self.step, handles)
        create: Any = BaseProcess.__init__

        def create_followed(process: Any, *values: Any, **options: Any) -> None:
            create(process, *values, **options)
            work = process._target or type(process).run
            if not str(getattr(work, "__module__", "")).startswith(_NOT_FOLLOWED):
                process.run = functools.partial(_follow, process.run, self.config, self.step_on)

        BaseProcess.__init__ = create_followed  # type: ignore[method-assign, assignment]
        leave = os._exit

        def close_and_leave(status: int) -> None:
            self.close(SystemExit(status))
            leave(status)

        def terminate(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        os._exit = close_and_leave  # type: ignore[assignment]
        with contextlib.suppress(ValueError):  # outside the main thread
            for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, terminate)
        try:
            yield
        except BaseException as error:
            of_script = not isinstance(error, SystemExit) or error.code not in (None, 0)
            self.close(error if of_script else None)
            raise
        finally:
            os._exit = leave
        self.close(None)

    def step(self, stepping: Any) -> None:
        """Count a step of an optimizer or a module."""
        from torch.nn import Module
        from torch.optim import Optimizer

        from chakra_et.capture.tracer import ChakraTracer

        if _is_traced():
            return
        if self.tracer is None:
            self.stepping = stepping
            self.tracer = ChakraTracer(**self.config.arguments(), run_info={"command": sys.argv})
            self.tracer.__enter__()
        elif stepping is self.stepping or (
            isinstance(stepping, Optimizer) and isinstance(self.stepping, Module)
        ):
            self.stepping = stepping  # the module was called before the training
            self.tracer.step()

    def close(self, error: BaseException | None) -> None:
        """Finish the trace; ``error`` is what ended the script."""
        if self.tracer is not None:
            self.tracer.__exit__(type(error) if error else None, error, None)


def _follow(work: Callable[[], None], config: TraceConfig, step_on: str) -> None:
    """Do the work of a process that the script has started, with the same trace."""
    # A forked process has the hooks of its parent.
    with contextlib.nullcontext() if _RunTrace.follows else _RunTrace(config, step_on).following():
        work()


def _uncompiled(call: Callable[[Any], None]) -> Callable[[Any], None]:
    """``call`` for use within a function that is compiled. The compiler, which takes seconds to load, is not
    loaded for this."""
    import torch

    return torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call


def _is_traced() -> bool:
    """Whether what runs is only traced: by torch.jit.trace, torch.export or make_fx."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    return torch.jit.is_tracing() or bool(modes & {"FakeTensorMode", "ProxyTorchDispatchMode"})


def _after_each_call(call: Callable[[Any], None], name: str) -> list[Any]:
    """Call ``call(module)`` after each outermost call of a module: of class ``name`` or, if that is empty,
    without gradients. Returns the handles of the hooks."""
    import torch
    from torch.nn.modules import module as modules

    inside: list[Any] = []

    def enter(module: Any, inputs: Any) -> None:
        if type(module).__name__ == name if name else not torch.is_grad_enabled():
            inside.append(module)

    def leave(module: Any, inputs: Any, outputs: Any) -> None:
        if inside and inside[-1] is module:
            inside.pop()
            if not inside:
                _uncompiled(call)(module)

    handles = [
        modules.register_module_forward_pre_hook(enter),
        modules.register_module_forward_hook(leave, always_call=True),
    ]
    every: Any = modules._global_forward_pre_hooks, modules._global_forward_hooks
    exports: Any = torch.export
    export = exports.export

    @functools.wraps(export)
    def export_without_hooks(*values: Any, **options: Any) -> Any:
        # With strict=True it traces how modules are called, and fails where all of them have hooks.
        pairs = zip(every, handles, strict=True)
        kept = [(hooks, each.id, hooks.pop(each.id)) for hooks, each in pairs if each.id in hooks]
        try:
            return export(*values, **options)
        finally:
            for hooks, at, hook in kept:
                hooks[at] = hook

    exports.export = export_without_hooks
    return handles


def _after_each_step(call: Callable[[Any], None], handles: list[Any]) -> None:
    """Call ``call(optimizer)`` after each step of every optimizer that is created from now on. The first one
    removes the hooks of ``handles``."""
    from torch.optim import Optimizer

    hook: Any = Optimizer.profile_hook_step

    # A global post hook of PyTorch would run inside the optimizer's own annotation, which the end of a
    # recording would cut in two.
    def profile_hook_step(function: Any) -> Any:
        step = hook(function)
        for handle in handles:
            handle.remove()

        @functools.wraps(step)
        def counted(self: Any, *values: Any, **options: Any) -> Any:
            result = step(self, *values, **options)
            _uncompiled(call)(self)
            return result

        return counted

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[method-assign, assignment]


def _of_the_script(error: BaseException) -> Any:
    """The traceback from the script's first frame on."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__") != "__main__":
        found = found.tb_next
    return found or error.__traceback__
