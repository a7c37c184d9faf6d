"""A callback for the Trainer of PyTorch Lightning.

    from chakra_et.capture.lightning import ChakraCallback

    trainer = Trainer(max_steps=10, callbacks=[ChakraCallback("outputs", "my_run")])

A step is a batch at whose end an optimizer has stepped.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from chakra_et.capture.tracer import ChakraTracer

# Both packages have the same content but classes of their own: take the one that the program uses.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    imported = [name for name in PACKAGES if name in sys.modules]
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    return importlib.import_module([*imported, *installed, PACKAGES[0]][0]).Callback


class ChakraCallback(_callback_class()):  # type: ignore[misc]
    """Traces a Lightning ``Trainer``; the arguments are those of ``ChakraTracer``.

    Unless ``run_info`` is given, the manifest has the module's class and size, and its hyperparameters.
    """

    def __init__(self, output_dir: str | Path, trace_name: str, **options: Any):
        super().__init__()
        self.tracer = ChakraTracer(output_dir, trace_name, **options)
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start tracing."""
        self.tracer.describe(pl_module, dict(pl_module.hparams))
        self._steps = trainer.global_step
        self.tracer.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count an optimizer step, if this batch completed one."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.tracer.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish the trace of a training that ended early."""
        self.tracer.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the trace of a training that failed."""
        self.tracer.__exit__(type(exception), exception, None)
