"""A callback for the Trainer of Hugging Face transformers.

    from chakra_et.capture.huggingface import ChakraCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[ChakraCallback("outputs", "my_run")])

A step is an optimizer step. In a loop of Accelerate use ``ChakraTracer`` directly, after ``Accelerator()``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from chakra_et.capture.tracer import ChakraTracer


class ChakraCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Traces a ``Trainer``; the arguments are those of ``ChakraTracer``.

    Unless ``run_info`` is given, the manifest has the model's class and size and the training arguments.
    """

    def __init__(self, output_dir: str | Path, trace_name: str, **options: Any):
        self.tracer = ChakraTracer(output_dir, trace_name, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start tracing."""
        model = objects.get("model")
        if model is not None:
            self.tracer.describe(model, args.to_sanitized_dict())
        # The Trainer has no hook for a training that ends in an exception: the tracer then ends at exit.
        self.tracer.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Count an optimizer step."""
        self.tracer.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Finish the trace of a training that ended early."""
        self.tracer.__exit__(None, None, None)
