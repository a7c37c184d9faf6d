"""The real training in which one rank fails on purpose, as a run fails in earnest.

FAULT: one of ``FAULTS``; FAULT_RANK: on which rank (the last one); FAULT_FROM, FAULT_TO: in which iterations
(from the 2nd on).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import distributed

RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))
FIRST, LAST = int(os.environ.get("FAULT_FROM", "2")), int(os.environ.get("FAULT_TO", "1000000"))
now = 0  # the iteration


def is_due() -> bool:
    return FIRST <= now <= LAST


def spoil(value: Any) -> Any:
    return value * float("nan") if is_due() else value


def outputs(chunks: list[Any]) -> None:
    chunks[0].module.decoder.register_forward_hook(lambda module, given, made: spoil(made))


def gradients(chunks: list[Any]) -> None:
    next(chunks[0].module.decoder.parameters()).register_hook(spoil)


def before(act: Any) -> Any:
    """A fault that happens once, in the forward pass of an iteration."""

    def plant(chunks: list[Any]) -> None:
        def hook(module: Any, given: Any) -> None:
            global LAST
            if is_due():
                LAST = 0
                act()

        chunks[0].module.decoder.register_forward_pre_hook(hook)

    return plant


FAULTS: dict[str, Any] = {
    "nan outputs": outputs,
    "nan gradients": gradients,
    "stop": before(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "sleep": before(lambda: time.sleep(10_000)),
}
AT_START = {"exit 0": lambda: os._exit(0), "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM)}


def main(world: Any, watch: Any) -> int:
    import importlib

    from megatron_lm.engine import model, training

    build, step = model.build, training.step

    def faulty_build(*args: Any) -> Any:
        chunks = build(*args)
        if fault in FAULTS and int(os.environ.get("FAULT_RANK", SIZE - 1)) == RANK:
            FAULTS[fault](chunks)
        return chunks

    def counted_step(*args: Any) -> Any:
        global now
        now = args[-1]
        return step(*args)

    model.build, training.step = faulty_build, counted_step
    done: int = importlib.import_module("megatron_lm._00_pretrain_gpt").main(world, watch)
    return done


if __name__ == "__main__":
    fault = os.environ["FAULT"]
    if fault in AT_START and int(os.environ.get("FAULT_RANK", SIZE - 1)) == RANK:
        AT_START[fault]()
    distributed.run(main, 120)
