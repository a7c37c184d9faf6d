"""How long the log readers take on a large run: 1,000 ranks and 10,000 iterations.

    python benchmarks/log_benchmark.py [--ranks 1000] [--iterations 10000] [--folder DIR]

Writes the logs of the run (125 nodes of 8 ranks: every iteration's line, every rank's memory line, and every
rank's start and end of every iteration, in blocks of 10 iterations; a GPU log of one line a GPU and second,
1.4 s an iteration), reads them, and prints a table. The largest size needs about 2 GB of disk.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chakra_et.cli import parse
from megatron_lm.logs import records
from megatron_lm.results import view
from tests.megatron_lm import written_logs

RANKS_A_NODE, LOG_INTERVAL, SECONDS = 8, 10, 1.4


@dataclass(frozen=True)
class BenchmarkConfig:
    ranks: int = field(default=1000, metadata={"help": "of the run; a multiple of 8"})
    iterations: int = field(default=10_000, metadata={"help": "of the run; a multiple of 10"})
    folder: Path | None = field(default=None, metadata={"help": "where the logs are written for the while"})

    def __post_init__(self) -> None:
        if (
            self.ranks < 8
            or self.ranks % RANKS_A_NODE
            or self.iterations < 10
            or self.iterations % LOG_INTERVAL
        ):
            raise ValueError("--ranks must be a multiple of 8, --iterations of 10")


def main() -> int:
    config = parse(BenchmarkConfig, description=(__doc__ or "").splitlines()[0])
    folder = Path(tempfile.mkdtemp(prefix="log_benchmark-", dir=config.folder))
    try:
        write(folder, config)
        outputs, gpu_logs = sorted(folder.glob("*.out")), sorted(folder.glob("*.gpu"))
        print("| what is read | files | MB | found | seconds | CPU seconds |\n|---|---|---|---|---|---|")
        row("iteration lines", outputs, lambda data: len(records.iterations(data)))
        row("memory lines", outputs, lambda data: len(records.memory(data)))
        row("starts and ends of every iteration", outputs, timed_iterations)
        row(
            "GPU samples for a summary",
            gpu_logs,
            lambda data: len(records.gpu_samples(data, view.GPU_SAMPLES)),
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"\n{config.ranks} ranks, {config.iterations} iterations; peak memory {peak:.0f} MB")
    finally:
        shutil.rmtree(folder)
    return 0


def timed_iterations(data: bytes) -> int:
    return sum(len(lists.start) for lists in records.timers(data).values())


def row(what: str, paths: list[Path], count: Callable[[bytes], int]) -> None:
    start, start_cpu = time.perf_counter(), time.process_time()
    found = sum(count(records.read(path)) for path in paths)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    size = sum(path.stat().st_size for path in paths) / 1e6
    print(f"| {what} | {len(paths)} | {size:.0f} | {found:,} | {seconds:.1f} | {cpu:.1f} |", flush=True)


def write(folder: Path, config: BenchmarkConfig) -> None:
    nodes = config.ranks // RANKS_A_NODE
    line = written_logs.gpu_line(records.Gpu(0, "NVIDIA A10", 60, 97, 20000, 22731))
    second = "".join(f"[{gpu}]{line[3:]}\n" for gpu in range(RANKS_A_NODE))
    blocks = [_lists(start) for start in range(0, config.iterations, LOG_INTERVAL)]
    for node in range(nodes):
        last = node == nodes - 1
        with (folder / f"n{node}.out").open("w") as out:
            out.write(f"NODE_RANK: {node}\nMODEL: xl\nstart\n")
            for block, lists in enumerate(blocks):
                for rank in range(node * RANKS_A_NODE, (node + 1) * RANKS_A_NODE):
                    out.write(written_logs.timer_block(rank, lists))
                    if block == 0:
                        out.write(
                            written_logs.memory_line(records.Memory(rank, 10, 3035.1, 3869.2, 4020.0, 4020.0))
                        )
                for number in range(block * LOG_INTERVAL + 1, (block + 1) * LOG_INTERVAL + 1) if last else ():
                    out.write(written_logs.iteration_line(written_logs.simple_iteration(number, SECONDS)))
        (folder / f"n{node}.gpu").write_text(second * int(config.iterations * SECONDS))


def _lists(start: int) -> dict[str, Any]:
    starts = [1.7e9 + SECONDS * number for number in range(start, start + LOG_INTERVAL)]
    return {"forward-backward": (starts, [at + SECONDS - 0.01 for at in starts])}


if __name__ == "__main__":
    sys.exit(main())
