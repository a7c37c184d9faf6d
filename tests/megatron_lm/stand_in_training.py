"""Stands in for the training script where only the scripts around it are tested: it computes nothing, and
writes the lines that a rank of a 1F1B pipeline writes. STAND_IN_FAIL=1 makes rank 0 fail after the second
iteration; STAND_IN_SECONDS is how long an iteration takes.
"""

from __future__ import annotations

import os
import sys
import time

from megatron_lm.logs import records
from megatron_lm.settings import from_environment
from tests.megatron_lm import written_logs


def say(text: str) -> None:
    os.write(1, text.encode())


def main() -> None:
    settings = from_environment()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = float(os.environ.get("STAND_IN_SECONDS", "0.05"))
    stage = rank // (settings.tensor_mp_size * settings.dp_size)
    if rank == 0:
        say(time.strftime("[before the start of training step] datetime: %Y-%m-%d %H:%M:%S \n"))
    for number in range(1, settings.train_iters + 1):
        start = time.time()
        time.sleep(seconds)
        if os.environ.get("STAND_IN_FAIL") and number == 3:
            if rank == 0:
                print("_00_pretrain_gpt.py: rank 0 was asked to fail", file=sys.stderr)
                sys.exit(3)
            time.sleep(60)
        unit = seconds / 4 / (settings.micro_batches + settings.pipeline_mp_size)
        if settings.profile:
            args = (stage, settings.pipeline_mp_size, settings.micro_batches, start, unit)
            say(written_logs.timer_block(rank, written_logs.one_f_one_b(*args)))
        if number == 2:
            say(written_logs.memory_line(records.Memory(rank, number, 10.5, 20.25, 30.0, 40.0 + rank)))
        if rank == world - 1:
            batch = settings.global_batch_size
            say(
                written_logs.iteration_line(
                    written_logs.simple_iteration(number, time.time() - start, settings.train_iters, batch)
                )
            )


main()
