"""``chakra-et measure-threads``: which part of the time of CPU operators threads share on this machine.

    chakra-et measure-threads --threads 2 --output threads.json
    chakra-et predict NAME --threads 2:1 --thread-fractions threads.json

Run it on the machine of the training, otherwise idle. Exit status: 0; 2 where there is nothing to measure.
"""

from __future__ import annotations

import json
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
from chakra_et.files import write_json
from chakra_et.predict.threads import Fractions

_FORMAT = "chakra-et thread fractions 1"


@dataclass
class MeasureThreadsConfig:
    """The command's arguments."""

    threads: int = field(default=2, metadata={"help": "threads that are compared with one"})
    repeats: int = field(default=21, metadata={"help": "times that each is measured; the median counts"})
    output: str = field(default="threads.json", metadata={"help": "JSON file to write"})

    def __post_init__(self) -> None:
        if self.threads < 2 or self.repeats < 1:
            raise ValueError("--threads must be at least 2 and --repeats at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = parse(
        MeasureThreadsConfig, argv, description="Time CPU operators with one thread and with several."
    )
    rows = [("operator", "1 thread µs", f"{config.threads} threads µs", "shared")]
    found: dict[str, list[float]] = {"product": [], "other": []}
    for name, (kind, operator) in _operators().items():
        one, several = _medians(operator, config)
        # t = 1 - p + p/n, solved for p.
        fraction = float(np.clip((1 - several / one) / (1 - 1 / config.threads), 0, 1))
        found[kind].append(fraction)
        rows.append((name, f"{one / 1e3:,.0f}", f"{several / 1e3:,.0f}", f"{fraction:.0%}"))
    print("\n".join(text.table(rows, right=range(1, 4))))
    parts = {kind: [float(np.mean(each)), float(np.std(each, ddof=1))] for kind, each in found.items()}
    write_json(Path(config.output), {"format": _FORMAT, "threads": config.threads, **parts})
    print(f"wrote {config.output}")
    return 0


def _operators() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Name → class and call, of sizes from a few grains to tens of MB."""
    import torch
    import torch.nn.functional as F

    found: dict[str, tuple[str, Callable[[], Any]]] = {}
    for size in (256, 512, 1024):
        found[f"mm {size}"] = "product", partial(torch.mm, *torch.ones(2, size, size))
        query = torch.ones(8, 8, size // 4, 64)
        attention = partial(F.scaled_dot_product_attention, query, query, query, is_causal=True)
        found[f"attention {size // 4}"] = "product", attention
    for power in (18, 20, 22):
        x, y = torch.ones(2, 1 << power)
        found[f"add_ 2^{power}"] = "other", partial(x.add_, y)
        found[f"gelu 2^{power}"] = "other", partial(F.gelu, x)
        found[f"layer_norm 2^{power}"] = "other", partial(F.layer_norm, x.view(-1, 256), [256])
    return found


def _medians(operator: Callable[[], Any], config: MeasureThreadsConfig) -> tuple[float, float]:
    """The median time with one thread and with several, ns, measured in turns."""
    import torch

    times: dict[int, list[int]] = {1: [], config.threads: []}
    before = torch.get_num_threads()
    try:
        for _ in range(config.repeats + 1):
            for threads, taken in times.items():
                torch.set_num_threads(threads)
                operator()
                begin = time.perf_counter_ns()
                operator()
                taken.append(time.perf_counter_ns() - begin)
    finally:
        torch.set_num_threads(before)
    one, several = (float(np.median(times[threads][1:])) for threads in (1, config.threads))
    return one, several


def read_fractions(path: str | Path) -> Fractions:
    """The fractions that the command wrote. Raises ``TraceError`` for any other file."""
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8"))
        if entry["format"] != _FORMAT:
            raise ValueError("its format is another")
        product, other = ((float(entry[kind][0]), float(entry[kind][1])) for kind in ("product", "other"))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TraceError(f"{path} isn't a file of chakra-et measure-threads: {error}") from None
    return Fractions(product, other, "measured")
