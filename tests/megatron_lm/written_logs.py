"""Logs as a run writes them, for tests: what goes in is known, so what is read can be compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_lm.logs import records

SPEC_LINES = """\
NODE_RANK: 1
PARTITION: 0-11-8-8-8-8-5-0
[before the start of training step] datetime: 2023-06-14 16:08:12 
[Rank 24] (after 20 iterations) memory (MB) | allocated: 3035.10107421875 | max allocated: 3869.255859375 | reserved: 4020.0 | max reserved: 4020.0
 iteration       30/      50 | consumed samples:         1920 | elapsed time per iteration (ms): 1423.8 | learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | loss scale: 262144.0 | grad norm: 16.666 | number of skipped iterations:   0 | number of nan iterations:   0 |
[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |
times across ranks (ms):
  forward-compute:
     rank  0: 123.45
 forward-compute start time lst:  1686726501.12 1686726501.15
 forward-compute end time lst:  1686726501.14 1686726501.17
"""  # noqa: E501, W291


def iteration_line(it: records.Iteration) -> str:
    loss = "" if it.loss is None else f" lm loss: {it.loss:.6E} |"
    norm = "" if it.grad_norm is None else f" grad norm: {it.grad_norm:.3f} |"
    return (
        f" iteration {it.number:8d}/{it.total:8d} | consumed samples:            0 | "
        f"elapsed time per iteration (ms): {it.seconds * 1000:.1f} | learning rate: {it.learning_rate:.3E} | "
        f"global batch size: {it.global_batch_size:5d} |{loss} loss scale: 1.0 |{norm} "
        f"number of skipped iterations: {it.skipped:3d} | number of nan iterations:   0 |\n"
    )


def simple_iteration(
    number: int, seconds: float = 1.5, total: int = 50, batch: int = 64
) -> records.Iteration:
    return records.Iteration(number, total, seconds, 1e-4, batch, 10.0, 2.0, 0)


def memory_line(m: records.Memory) -> str:
    return (
        f"[Rank {m.rank}] (after {m.after} iterations) memory (MB) | allocated: {m.allocated} | "
        f"max allocated: {m.max_allocated} | reserved: {m.reserved} | max reserved: {m.max_reserved}\n"
    )


def timer_block(rank: int, lists: dict[str, tuple[list[float], list[float]]]) -> str:
    """What one rank writes at one log interval: each timer's milliseconds and its two lists."""
    parts = ["times across ranks (ms):\n"]
    for name, (starts, ends) in lists.items():
        milliseconds = 1000 * sum(end - start for start, end in zip(starts, ends, strict=True))
        parts.append(f"  {name}:\n     rank {rank:2d}: {milliseconds:.2f}\n")
        for word, times in (("start", starts), ("end", ends)):
            parts.append(f" {name} {word} time lst:  {' '.join(f'{time:.6f}' for time in times)}\n")
    return "".join(parts)


def one_f_one_b(
    stage: int, stages: int, micro_batches: int, zero: float, unit: float = 0.01
) -> dict[str, tuple[list[float], list[float]]]:
    """Timers of one iteration of a 1F1B pipeline of equal stages, backward twice as long as forward and
    messages that take no time: the bubble is (stages - 1) / (micro_batches + stages - 1)."""
    forward_end = [[0.0] * micro_batches for _ in range(stages)]
    backward_end = [[0.0] * micro_batches for _ in range(stages)]
    free = [0.0] * stages
    left = [_order(i, stages, micro_batches) for i in range(stages)]
    while any(left):
        for i in range(stages):
            while left[i]:
                kind, j = left[i][0]
                if kind == "f":
                    ready = forward_end[i - 1][j] if i else 1e-12
                else:
                    ready = backward_end[i + 1][j] if i + 1 < stages else forward_end[i][j]
                if not ready:
                    break
                end = max(free[i], ready) + (unit if kind == "f" else 2 * unit)
                (forward_end if kind == "f" else backward_end)[i][j] = free[i] = end
                left[i].pop(0)
    ends = {"forward-compute": forward_end[stage], "backward-compute": backward_end[stage]}
    length = {"forward-compute": unit, "backward-compute": 2 * unit}
    found = {
        name: ([zero + end - length[name] for end in of_stage], [zero + end for end in of_stage])
        for name, of_stage in ends.items()
    }
    whole = max(max(of_stage) for of_stage in backward_end)
    if stage:
        found["forward-recv"] = (
            [start - unit / 10 for start in found["forward-compute"][0]],
            found["forward-compute"][0],
        )
    if stage + 1 < stages:
        found["backward-recv"] = (
            [start - unit / 10 for start in found["backward-compute"][0]],
            found["backward-compute"][0],
        )
    found["forward-backward"] = ([zero - unit / 5], [zero + whole])
    found["optimizer"] = ([zero + whole], [zero + whole + unit])
    found["grads-all-reduce"] = ([zero + whole - unit / 2], [zero + whole])
    return found


def write_node(folder: Path, name: str, **kinds: str | Iterable[str]) -> None:
    """<folder>/<name>.<kind> for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, text in kinds.items():
        (folder / f"{name}.{kind}").write_text(text if isinstance(text, str) else "".join(text))


def _order(stage: int, stages: int, m: int) -> list[tuple[str, int]]:
    warm = min(stages - 1 - stage, m)
    steady = [item for j in range(m - warm) for item in (("f", warm + j), ("b", j))]
    return [*(("f", j) for j in range(warm)), *steady, *(("b", j) for j in range(m - warm, m))]


def gpu_line(gpu: records.Gpu) -> str:
    """The line of one GPU, without its line break."""
    celsius, percent, used, total = (
        "?" if number is None else str(number) for number in (gpu.celsius, gpu.percent, gpu.used, gpu.total)
    )
    use = f"{celsius:>2}'C, {percent:>3} % | {used:>5} / {total:>5} MB"
    return f"[{gpu.index}] {gpu.name:<16} | {use} |"
