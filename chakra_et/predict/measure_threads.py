"""``chakra-et measure-threads``: which part of the time of CPU operators threads share on this machine.

    chakra-et measure-threads --threads 2 --output threads.json
    chakra-et predict NAME --threads 2:1 --thread-fractions threads.json

Run it on the machine of the training, otherwise idle. Exit status: 0; 2 where there is nothing to measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et import text
from chakra_et.cli import parse
from chakra_et.errors import TraceError
from chakra_et.files import read_json, write_json
from chakra_et.transform.threads import CLASSES, Fractions, Shared

_FORMAT = "chakra-et thread fractions 2"


@dataclass
class MeasureThreadsConfig:
    """The command's arguments."""

    threads: int = field(default=2, metadata={"help": "threads that are compared with one"})
    repeats: int = field(default=21, metadata={"help": "times that each is measured; the median counts"})
    output: str = field(default="threads.json", metadata={"short": "-o", "help": "JSON file to write"})

    def __post_init__(self) -> None:
        if self.threads < 2 or self.repeats < 1:
            raise ValueError("--threads must be at least 2 and --repeats at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = parse(
        MeasureThreadsConfig, argv, description="Time CPU operators with one thread and with several."
    )
    rows = [("operator", "1 thread µs", f"{config.threads} threads µs", "shared")]
    found: dict[str, dict[int, list[float]]] = {kind: {} for kind in CLASSES}
    operators = _operators()
    times = _times({name: operator for name, (_, _, operator) in operators.items()}, config)
    for name, (kind, operations, _) in operators.items():
        one, several = np.median(times[name], axis=0)
        # Each repeat by itself: what else the machine does for some seconds makes both calls longer.
        ratio = float(np.median(times[name][:, 1] / times[name][:, 0]))
        # t = 1 - p + p/n, solved for p.
        fraction = float(np.clip((1 - ratio) / (1 - 1 / config.threads), 0, 1))
        found[kind].setdefault(operations, []).append(fraction)
        rows.append((name, f"{one / 1e3:,.0f}", f"{several / 1e3:,.0f}", f"{fraction:.0%}"))
    print("\n".join(text.table(rows, right=range(1, 4))))
    parts = {}
    for kind, of_size in found.items():
        sizes = sorted(of_size)
        means = [float(np.mean(of_size[size])) for size in sizes]
        off = [each - mean for size, mean in zip(sizes, means, strict=True) for each in of_size[size]]
        parts[kind] = {"operations": list(map(float, sizes)), "fraction": means, "spread": float(np.std(off))}
    write_json(Path(config.output), {"format": _FORMAT, "threads": config.threads, **parts})
    print(f"wrote {config.output}")
    return 0


def _operators() -> dict[str, tuple[str, int, Callable[[], Any]]]:
    """Name → class, operations (as ``cost.operator_work`` counts them) and call; from a few grains to tens of
    MB."""
    import torch
    import torch.nn.functional as F

    found: dict[str, tuple[str, int, Callable[[], Any]]] = {}
    for size in (128, 256, 512, 1024):
        a, b = torch.ones(2, size, size)
        found[f"mm {size}"] = "product", 2 * size**3, partial(torch.mm, a, b)
        # As for the gradient of a weight.
        found[f"mm {size} transposed"] = "product", 2 * size**3, partial(torch.mm, a.t(), b)
    for tokens in (32, 64, 128, 256):
        # As models have it: part of a projection to queries, keys and values.
        projected = torch.ones(8, tokens, 3, 8, 64)
        query, key, value = (projected[:, :, part].transpose(1, 2) for part in range(3))
        for causal in (False, True):
            attention = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
            name = f"attention {tokens}{' causal' if causal else ''}"
            found[name] = "attention", 4 * 8 * 8 * tokens**2 * 64, attention
    for power in (16, 18, 20, 22):
        x, y = torch.ones(2, 1 << power)
        rows = x.view(-1, 256)
        for name, operator in {
            "add": partial(torch.add, x, y),
            "add_": partial(x.add_, y),
            "copy_": partial(x.copy_, y),
            "gelu": partial(F.gelu, x),
            "layer_norm": partial(F.layer_norm, rows, [256]),
            "softmax": partial(F.softmax, rows, -1),
        }.items():
            found[f"{name} 2^{power}"] = "other", 1 << power, operator
    return found


def _times(operators: dict[str, Callable[[], Any]], config: MeasureThreadsConfig) -> dict[str, np.ndarray]:
    """The times of each with one thread and with several; (repeats, 2), ns.

    All take turns. So what one reads isn't in a cache only because it has just run, as in a training step,
    and what else the machine does for some seconds doesn't meet all repeats of one.
    """
    import torch

    found = {name: np.zeros((config.repeats, 2)) for name in operators}
    first = next(iter(operators.values()))
    before = torch.get_num_threads()
    try:
        for repeat in range(config.repeats):
            for at, threads in enumerate((1, config.threads)):
                torch.set_num_threads(threads)
                first()  # wakes the threads
                for name, operator in operators.items():
                    begin = time.perf_counter_ns()
                    operator()
                    found[name][repeat, at] = time.perf_counter_ns() - begin
    finally:
        torch.set_num_threads(before)
    return found


def read_fractions(path: str | Path) -> Fractions:
    """The fractions that the command wrote. Raises ``TraceError`` for any other file."""
    try:
        entry = read_json(path)
        if entry["format"] != _FORMAT:
            raise ValueError("its format is another")
        parts = {}
        for kind in CLASSES:
            operations, fraction = (tuple(map(float, entry[kind][of])) for of in ("operations", "fraction"))
            if not operations or len(operations) != len(fraction) or list(operations) != sorted(operations):
                raise ValueError("its sizes don't match its fractions")
            parts[kind] = Shared(operations, fraction, float(entry[kind]["spread"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TraceError(f"{path} isn't a file of chakra-et measure-threads: {error}") from None
    return Fractions(**parts, source="measured")
