"""Made-up pipeline-parallel jobs whose step times are known, written as Parquet traces.

The schedule of Megatron-LM (1F1B, interleaved for several model chunks) gives the dependencies, messages are
matched by model chunk and microbatch, and ``Made.solve`` computes when each operation starts and ends.
Nothing here reads the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

# (data-parallel rank, stage, type, number)
Key = tuple[int, int, str, int]
WORK = {
    "forward-compute": 0.100, "backward-compute": 0.200, "forward-send": 0.002, "forward-recv": 0.002,
    "backward-send": 0.003, "backward-recv": 0.003, "params-all-gather": 0.030, "grads-reduce-scatter": 0.040,
    "separate-grads-all-reduce": 0.010, "gc": 0.001, "layernorm-grads-all-reduce": 0.004,
    "embedding-grads-all-reduce": 0.012, "optimizer-clip-main-grad": 0.005, "optimizer": 0.050,
}  # fmt: skip
BY_MEAN = ("forward-compute", "backward-compute", "gc", "optimizer")
# A message that was recorded without a peer.
UNLAUNCHED_S = 1e-5


@dataclass
class Operation:
    after: list[Key]
    mc: int = -1
    gmc: int = -1
    microbatch: int = -1
    # What it ends together with.
    meets: Hashable = None
    launched: bool = True


@dataclass
class Made:
    """``works[step][key]``: seconds that the operation takes by itself."""

    dp: int
    pp: int
    vpp: int
    operations: dict[Key, Operation] = field(default_factory=dict)
    works: list[dict[Key, float]] = field(default_factory=list)

    @cached_property
    def order(self) -> list[list[Key]]:
        """The operations that end together, those that they wait for first."""
        groups: dict[Hashable, list[Key]] = {}
        for key, operation in self.operations.items():
            groups.setdefault(key if operation.meets is None else operation.meets, []).append(key)
        done: set[Key] = set()
        order, waiting = [], list(groups.values())
        while waiting:
            left = []
            for members in waiting:
                if any(earlier not in done for key in members for earlier in self.operations[key].after):
                    left.append(members)
                else:
                    order.append(members)
                    done.update(members)
            assert len(left) < len(waiting), "the made-up job waits for itself"
            waiting = left
        return order

    def solve(self, work: dict[Key, float]) -> dict[Key, tuple[float, float]]:
        """Start and end of each operation."""
        times: dict[Key, tuple[float, float]] = {}
        for members in self.order:
            starts = {
                key: max((times[earlier][1] for earlier in self.operations[key].after), default=0.0)
                for key in members
            }
            latest = max(starts.values())
            times |= {key: (starts[key], latest + work[key]) for key in members}
        return times

    def step_time(self, work: dict[Key, float]) -> float:
        return max(end for key, (_, end) in self.solve(work).items() if key[2] == "optimizer")

    def typical(self) -> dict[Key, float]:
        """Mean or median by type over all steps of the launched operations; 0 for the others."""
        by_type: dict[str, list[float]] = {}
        for work in self.works:
            for key, seconds in work.items():
                if self.operations[key].launched:
                    by_type.setdefault(key[2], []).append(seconds)
        value = {name: fmean(all_) if name in BY_MEAN else _median(all_) for name, all_ in by_type.items()}
        return {key: value[key[2]] if each.launched else 0.0 for key, each in self.operations.items()}

    def slowdown(self, keeps: Callable[[Key], bool]) -> float:
        """Mean step time against the ideal, if only these operations keep their recorded work."""
        ideal = self.typical()
        times = [
            self.step_time({key: work[key] if keeps(key) else ideal[key] for key in ideal})
            for work in self.works
        ]
        return fmean(times) / self.step_time(ideal)

    def write(self, folder: Path, rows: list[dict[str, Any]] | None = None) -> tuple[Path, Path]:
        """``trace.parquet`` (of other ``rows`` if given) and ``meta.yaml``."""
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(self.rows() if rows is None else rows)
        parquet.write_table(table, folder / "trace.parquet")
        meta = {"trial_name": "made", "run_id": 0, "dp_size": self.dp, "dsp_size": 1, "pp_size": self.pp}
        meta |= {"tp_size": 1, "vpp_size": self.vpp, "world_size": self.dp * self.pp}
        lines = [f"{name}: {value}\n" for name, value in meta.items()]
        (folder / "meta.yaml").write_text("".join(lines))
        return folder / "trace.parquet", folder / "meta.yaml"

    def rows(self) -> list[dict[str, Any]]:
        """One row per operation; steps are sampled, so their numbers have gaps."""
        rows = []
        for step, work in enumerate(self.works):
            for key, (start, end) in self.solve(work).items():
                dp, stage, optype, number = key
                operation = self.operations[key]
                rows.append(
                    {
                        "dp_rank": dp, "stage": stage, "rank": stage * self.dp + dp,
                        "step": 10 + 7 * step, "optype": optype, "start_ts": start, "duration": end - start,
                        "seq_id": number, "mb_id": operation.microbatch, "mc": operation.mc,
                        "gmc": operation.gmc,
                    }
                )  # fmt: skip
        return rows


def make_job(
    dp: int = 2,
    pp: int = 4,
    vpp: int = 1,
    microbatches: int = 8,
    steps: int = 3,
    overlap: bool = False,
    factor: Callable[[int, Key], float] = lambda step, key: 1.0,
) -> Made:
    """``factor(step, key)`` multiplies the ``WORK`` of an operation."""
    made = Made(dp, pp, vpp)
    for rank in range(dp):
        for stage in range(pp):
            _add_stage(made, rank, stage, microbatches, overlap)
    for step in range(steps):
        made.works.append(
            {
                key: WORK[key[2]] * factor(step, key) if operation.launched else UNLAUNCHED_S
                for key, operation in made.operations.items()
            }
        )
    return made


def _add_stage(made: Made, rank: int, stage: int, microbatches: int, overlap: bool) -> None:
    pp, vpp = made.pp, made.vpp
    count = microbatches * vpp
    warm_up = pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp
    warm_up = min(warm_up, count)
    order = ["forward"] * warm_up
    order += ["forward", "backward"] * (count - warm_up) + ["backward"] * warm_up

    def add(optype: str, number: int, after: list[Key | None], **rest: Any) -> Key:
        key = (rank, stage, optype, number)
        made.operations[key] = Operation([each for each in after if each is not None], **rest)
        return key

    gathered: dict[int, Key] = {}
    stream: Key | None = None
    for chunk in range(vpp):
        stream = gathered[chunk] = add(
            "params-all-gather", chunk, [stream], mc=chunk, meets=("gather", stage, chunk)
        )
    latest: Key | None = None
    done: dict[str, list[Key]] = {"forward": [], "backward": []}
    last_of: dict[str, Key | None] = {}
    computed: list[Key] = []
    last_backward: dict[int, Key] = {}
    for direction in order:
        number = len(done[direction])
        place = (number % (pp * vpp)) // pp if vpp > 1 else 0
        chunk = place if direction == "forward" else vpp - 1 - place
        batch = (number // (pp * vpp)) * pp + number % pp if vpp > 1 else number
        gmc = chunk * pp + stage
        before = done[direction][-1] if done[direction] else None
        into, out = (gmc - 1, gmc + 1) if direction == "forward" else (gmc + 1, gmc - 1)
        is_first_backward = direction == "backward" and not number
        last_but_one = computed[-2] if is_first_backward and len(computed) > 1 else None
        needed: list[Key | None] = [latest]
        chunks_so_far = {made.operations[key].mc for key in done["forward"]}
        if direction == "forward" and chunk not in chunks_so_far:
            needed.append(gathered[chunk])
        launched = 0 <= into < pp * vpp
        if launched or (vpp > 1 and number):
            stream_of = f"{direction}-recv"
            after = [before, last_but_one] + ([last_of.get(stream_of)] if launched else [])
            meets = (rank, direction, into, gmc, batch) if launched else None
            recv = add(stream_of, number, after, microbatch=batch, meets=meets, launched=launched)
            if launched:
                needed.append(recv)
                last_of[stream_of] = recv
        latest = add(f"{direction}-compute", number, needed, mc=chunk, gmc=gmc, microbatch=batch)
        computed.append(latest)
        done[direction].append(latest)
        if direction == "backward":
            last_backward[chunk] = latest
        launched = 0 <= out < pp * vpp
        if launched or (vpp > 1 and number < count - 1):
            stream_of = f"{direction}-send"
            after = [latest] + ([last_of.get(stream_of)] if launched else [])
            meets = (rank, direction, gmc, out, batch) if launched else None
            send = add(stream_of, number, after, microbatch=batch, meets=meets, launched=launched)
            if launched:
                last_of[stream_of] = send
    end = add("gc", 0, [latest])
    end = add("layernorm-grads-all-reduce", 0, [end])
    if stage in (0, pp - 1):
        end = add("embedding-grads-all-reduce", 0, [end], meets=("embedding", rank))
    scattered: Key = stream or end
    for chunk in reversed(range(vpp)):
        after = [scattered, last_backward[chunk]] if overlap else [scattered, end]
        scattered = add(
            "grads-reduce-scatter", vpp - 1 - chunk, after, mc=chunk, meets=("scatter", stage, chunk)
        )
        end = end if overlap else scattered
    if overlap:
        end = add("separate-grads-all-reduce", 0, [end], meets=("separate", stage))
    end = add("optimizer-clip-main-grad", 0, [end], meets="clip")
    add("optimizer", 0, [end])


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
