"""Stands in for the training script where only the scripts around it are tested: it computes nothing, and
prints what a rank of a 1F1B pipeline prints.

STAND_IN_SECONDS: how long an iteration takes. STAND_IN_FAIL: how rank STAND_IN_RANK (0) fails in the third
iteration, as one of ``FAILURES``; the failures are real ones. With SAVE it writes a checkpoint per iteration
that holds nothing but the iteration's number.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from megatron_lm import saved
from megatron_lm.logs import records
from megatron_lm.settings import from_environment
from tests.megatron_lm import written_logs


def print_out(text: str) -> None:
    os.write(1, text.encode())


def exit_with_a_message() -> None:
    print("_00_pretrain_gpt.py: rank 0 was asked to fail", file=sys.stderr)
    sys.exit(3)


def raise_an_exception() -> None:
    raise KeyError("decoder.layers.48.mlp.weight")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    ctypes.string_at(0)


def fill_a_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def use_memory() -> None:
    held = bytearray(3_000_000_000)
    time.sleep(60)
    print(len(held))


FAILURES = {
    "message": exit_with_a_message,
    "exception": raise_an_exception,
    "kill": be_killed,
    "crash": crash,
    "disk": fill_a_disk,
    "memory": use_memory,
}


def main() -> None:
    settings = from_environment()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    failing = int(os.environ.get("STAND_IN_RANK", "0"))
    failure = FAILURES.get(os.environ.get("STAND_IN_FAIL", ""))
    seconds = float(os.environ.get("STAND_IN_SECONDS", "0.05"))
    stage = rank // (settings.tensor_mp_size * settings.dp_size)
    found = saved.newest_first(Path(settings.load)) if settings.load else []
    if settings.save and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        found = saved.newest_first(Path(settings.save)) or found
    done = saved.read_meta(found[0])["iteration"] if found else 0
    if rank == 0:
        print_out(time.strftime("[before the start of training step] datetime: %Y-%m-%d %H:%M:%S \n"))
    for number in range(done + 1, settings.train_iters + 1):
        start = time.time()
        time.sleep(seconds)
        if failure and number == 3:
            if rank == failing:
                failure()
            # What a collective raises once a peer is gone, which takes a while where it fills the memory.
            time.sleep(60 if failure is use_memory else 8)
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        unit = seconds / 4 / (settings.micro_batches + settings.pipeline_mp_size)
        if settings.profile:
            args = (stage, settings.pipeline_mp_size, settings.micro_batches, start, unit)
            print_out(written_logs.timer_block(rank, written_logs.one_f_one_b(*args)))
        if number == 2:
            print_out(written_logs.memory_line(records.Memory(rank, number, 10.5, 20.25, 30.0, 40.0 + rank)))
        if rank == world - 1:
            batch, duration = settings.global_batch_size, time.time() - start
            line = written_logs.simple_iteration(number, duration, settings.train_iters, batch)
            print_out(written_logs.iteration_line(line))
            if settings.save:
                folder = saved.of_iteration(Path(settings.save), number)
                folder.mkdir(parents=True)
                (folder / saved.META).write_text(json.dumps({"iteration": number}))


main()
