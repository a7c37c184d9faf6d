"""Many mutated inputs, each in a process of its own with caps of time and memory.

    python -m tests.fuzz.campaign --inputs 20000 --workers 2
    python -m tests.fuzz.campaign --of commands --inputs 20000
    python -m tests.fuzz.campaign --only 1234 --keep /tmp/input

Prints how many ended how; the exit status is 1 if one was wrong, crashed, hung or went beyond a cap.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from tqdm import tqdm

from chakra_et import cli
from tests.fuzz import bases, commands, judge, mutations

PATIENCE = 20
"""Times its cap of CPU time that a run may take while it uses no processor, which counts as hung."""


@dataclass
class CampaignConfig:
    """The campaign's arguments."""

    of: Literal["traces", "commands"] = field(
        default="traces", metadata={"help": "traces to convert, or what the other commands read"}
    )
    inputs: int = field(default=20_000, metadata={"help": "how many inputs are mutated"})
    processes: float = field(
        default=4.0, metadata={"help": "%% of commands that run as processes of their own"}
    )
    first: int = field(default=0, metadata={"help": "number of the first"})
    seed: int = field(default=2026, metadata={"help": "of all random choices, together with the number"})
    workers: int = field(default=2, metadata={"help": "processes"})
    seconds: int = field(default=20, metadata={"help": "cap of one run's CPU time"})
    megabytes: int = field(default=1_024, metadata={"help": "cap of one run's memory, beyond the start's"})
    only: int = field(default=-1, metadata={"help": "do this one alone, in this process"})
    keep: str = field(default="", metadata={"help": "folder to leave the one run's files in"})

    def __post_init__(self) -> None:
        if self.inputs < 1 or self.workers < 1 or self.seconds < 1 or self.megabytes < 1:
            raise ValueError("--inputs, --workers, --seconds and --megabytes must be at least 1")


def make(seed: int, number: int, folder: Path) -> tuple[str, bool]:
    """Write input ``number`` to ``folder``; (what it is, whether the --allow flags are given)."""
    random = Random(f"{seed} {number}")
    name, run = bases.choose(random)
    run, done = mutations.mutate(random, run)
    for file, text in run.items():
        with contextlib.suppress(OSError, ValueError):  # a name that the file system does not take
            (folder / os.path.basename(file)).write_bytes(text)
    return f"{name}: {', '.join(done)}".replace("\n", "\\n"), random.random() < 0.6


def prepare(config: CampaignConfig, number: int, folder: Path) -> tuple[str, Callable[[], tuple[str, str]]]:
    """Input ``number``, made in ``folder``: what it is, and what judges it: (outcome, what is wrong)."""
    if config.of == "commands":
        random = Random(f"{config.seed} {number}")
        return commands.judge(random, folder, random.random() < config.processes / 100)
    what, allow = make(config.seed, number, folder)
    return what, lambda: judge.judge(folder, allow)


@dataclass
class _Input:
    """One that the process ``pid`` works on, until ``give_up`` at most."""

    number: int
    folder: tempfile.TemporaryDirectory
    pid: int
    give_up: float
    ticks: int = 0  # of CPU time, when it was last to be given up
    answer: bytes = b""


def _start(config: CampaignConfig, number: int) -> tuple[int, _Input]:
    """Fork a process that makes input ``number``, judges it and may die of it; and its answer's pipe."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(config, number, Path(folder.name), writing)
    os.close(writing)
    return reading, _Input(number, folder, pid, time.monotonic() + PATIENCE * config.seconds)


def _child(config: CampaignConfig, number: int, folder: Path, writing: int) -> None:
    outcome, wrong, what = "crashed", "no answer", "?"
    try:
        what, run = prepare(config, number, folder)
        os.write(writing, f"{what}\n".encode("utf-8", "backslashreplace"))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (config.megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + config.seconds, used + config.seconds))
        outcome, wrong = run()
        if "not enough memory" in wrong:
            outcome = "memory"
    except BaseException:  # whatever it is, it is the answer
        wrong = traceback.format_exc(limit=-6)
    os.write(writing, f"{outcome}\n{wrong}".encode("utf-8", "backslashreplace")[:60_000])
    os._exit(0)


def _ticks(pid: int) -> int:
    """CPU time of a process and of those that it started, in ticks of the system; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(map(int, fields[11:15])) + sum(_ticks(int(each)) for each in started)
    return 0


def _end(work: _Input) -> tuple[str, str, str]:
    """(outcome, what is wrong, what the input was)."""
    _, status = os.waitpid(work.pid, 0)
    work.folder.cleanup()
    what, _, answer = work.answer.decode("utf-8", "backslashreplace").partition("\n")
    outcome, _, wrong = answer.partition("\n")
    if os.WIFSIGNALED(status):
        by = os.WTERMSIG(status)
        return "hung" if by in (signal.SIGXCPU, signal.SIGKILL) else "crashed", f"ended by signal {by}", what
    return outcome or "crashed", wrong, what


def results(config: CampaignConfig) -> Iterator[tuple[int, str, str, str]]:
    """(number, outcome, what is wrong, what the input was) of each input, as they end."""
    bases.bases() if config.of == "traces" else commands.good()  # before anything is forked
    numbers = iter(range(config.first, config.first + config.inputs))
    running: dict[int, _Input] = {}
    with selectors.DefaultSelector() as waiting:
        while True:
            while len(running) < config.workers and (number := next(numbers, None)) is not None:
                pipe, work = _start(config, number)
                running[pipe] = work
                waiting.register(pipe, selectors.EVENT_READ)
            if not running:
                return
            for key, _ in waiting.select(timeout=1):
                piece = os.read(key.fd, 1 << 16)
                running[key.fd].answer += piece
                if not piece:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    work = running.pop(key.fd)
                    yield work.number, *_end(work)
            for work in running.values():
                if time.monotonic() < work.give_up:
                    continue
                if (used := _ticks(work.pid)) == work.ticks:
                    os.kill(work.pid, signal.SIGKILL)
                # On a busy machine, or stopped for a while, it goes on as long as it gets on.
                work.ticks, work.give_up = used, time.monotonic() + PATIENCE * config.seconds


def campaign(config: CampaignConfig) -> tuple[Counter[str], list[str]]:
    """Outcomes by count, and a line for each input that was not handled as it should be; of those that were
    judged until Ctrl-C."""
    outcomes: Counter[str] = Counter()
    wrongs = []
    bar = tqdm(results(config), total=config.inputs, disable=not sys.stderr.isatty())
    with contextlib.suppress(KeyboardInterrupt):
        for number, outcome, wrong, what in bar:
            outcomes[outcome] += 1
            if wrong or outcome in ("crashed", "hung", "memory"):
                outcomes["not as it should be"] += 1
                wrongs.append(f"{number} ({what}): {outcome}: {wrong}")
                print(wrongs[-1], file=sys.stderr, flush=True)
    return outcomes, wrongs


def main() -> int:
    config = cli.parse(CampaignConfig, description=__doc__.splitlines()[0])
    if config.only >= 0:
        folder = Path(config.keep or tempfile.mkdtemp(prefix="fuzz"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        what, run = prepare(config, config.only, folder)
        print(what, folder)
        print(*run(), sep="\n")
        return 0
    began = time.monotonic()
    outcomes, wrongs = campaign(config)
    judged = sum(outcomes.values()) - outcomes["not as it should be"]
    print(f"{config.of}, seed {config.seed}, {judged} of {config.inputs} inputs from {config.first} on, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    for outcome, count in sorted(outcomes.items()):
        print(f"  {outcome}: {count}")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
