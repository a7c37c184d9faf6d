"""Ranks of simulated machines, node by node, with the names that frameworks and vendors give."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chakra_et.cli import parse
from chakra_et.diagnose.verdict import diagnose
from chakra_et.et.columns import ExecutionTrace
from chakra_et.predict.command import PredictConfig, changes
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run, make_run, together
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send

GEMM = "ampere_bf16_s16816gemm_bf16_256x128"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
HIP = {"call": "hipLaunchKernel"}


class Rank:
    """One rank: a thread, and streams by number. Times in µs."""

    def __init__(self, call: str = "cudaLaunchKernel", launch: int = 5) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.call, self.launch = call, launch
        self.thread: tuple[int, ...] = ()
        self.streams: dict[int, tuple[int, ...]] = {}

    def _add(
        self, make: Callable[..., dict], length: int, deps: Sequence[int], *more: Any, **given: Any
    ) -> int:
        unique = tuple(dict.fromkeys(deps))
        self.nodes.append(make(len(self.nodes) + 1, length, *more, unique, **given))
        return len(self.nodes)

    def host(
        self, name: str, length: int, kind: str = "operator", after: Sequence[int] = (), **more: Any
    ) -> int:
        self.thread = (self._add(cpu, length, (*self.thread, *after), name=name, kind=kind, **more),)
        return self.thread[0]

    def gloo(self, length: int) -> int:
        """An all-reduce on a thread of gloo; returns it, as nothing waits for it yet."""
        times = {"transfer_micros": length, "wait_micros": 0, "is_cpu_op": 1, "tid": 99, "lane": 99}
        return self._add(collective, length, self.thread, name="gloo:all_reduce", **times)

    def step(self, number: int) -> None:
        self.host(f"ProfilerStep#{number}", 0, "annotation")

    def annotation(self, name: str, length: int) -> None:
        """An annotation with Python in it, as a conversion writes it: two nodes of one event."""
        event = len(self.nodes) + 1
        self.host(name, 0, "annotation", rf_id=event)
        self.host("host-overhead", length, "host-overhead", rf_id=event)

    def kernel(
        self,
        name: str,
        length: int,
        after: Sequence[int] = (),
        stream: int = 7,
        kind: str = "kernel",
        **more: Any,
    ) -> int:
        launch = self.host(self.call, self.launch, "runtime")
        deps = (launch, *self.streams.get(stream, ()), *after)
        self.streams[stream] = (self._add(kernel, length, deps, name=name, kind=kind, stream=stream, **more),)
        return self.streams[stream][0]

    def after(self, launch: int, name: str, length: int, stream: int = 7) -> None:
        """A kernel of a graph that ``launch`` has launched."""
        deps = (launch, *self.streams.get(stream, ()))
        self.streams[stream] = (self._add(kernel, length, deps, name=name, kind="kernel", stream=stream),)

    def collective(self, length: int, stream: int = 9, name: str = NCCL, **more: Any) -> int:
        """After all that the compute stream has so far."""
        launch = self.host(self.call, self.launch, "runtime")
        deps = (launch, *self.streams.get(stream, ()), *self.streams.get(7, ()))
        times = {
            "transfer_micros": length,
            "wait_micros": 0,
            "is_cpu_op": 0,
            "stream": stream,
            "lane": stream,
        }
        self.streams[stream] = (self._add(collective, length, deps, name=name, **times, **more),)
        return self.streams[stream][0]

    def message(self, make: Callable[..., dict], peer: int, tag: int, length: int = 5) -> int:
        """Sent after all that the compute stream has so far; received beside it."""
        sends = make is send
        stream = 21 if sends else 20
        launch = self.host(self.call, self.launch, "runtime")
        deps = (launch, *self.streams.get(stream, ()), *(self.streams.get(7, ()) if sends else ()))
        more = {"is_cpu_op": 0, "stream": stream, "lane": stream, "comm_tag": tag, "transfer_micros": length}
        named = {"name": "ncclDevKernel_SendRecv", "kind": "p2p", "pg_name": "1"}
        found = self._add(make, length, deps, peer, **named, **more)
        self.streams[stream] = (found,)
        return found

    def wait(self) -> None:
        ends = [end for stream in self.streams.values() for end in stream]
        self.thread = (
            self._add(cpu, 1, (*self.thread, *ends), name="cudaDeviceSynchronize", kind="runtime"),
        )

    def trace(self, rank: int, ranks: int, begin: int) -> ExecutionTrace:
        end: dict[int, int] = {}
        lane: dict[object, int] = {}
        for node in self.nodes:
            on = node.get("lane", node.get("stream", "host"))
            start = max([begin, lane.get(on, 0), *(end[each] for each in node["deps"])])
            node["start"] = start
            end[node["id"]] = lane[on] = start + node["duration"]
        return make_trace(*self.nodes, rank=rank, world_size=ranks, clock_domain="one", trace_start_ns=0)


Work = Callable[[Rank, int, int], None]


def steady(*kernels: tuple[str, int], times: int = 10, before: Work | None = None, reduce: int = 0) -> Work:
    """``times`` times these kernels of so many µs, after what comes ``before``, and an all-reduce."""

    def work(rank: Rank, number: int, step: int) -> None:
        if before:
            before(rank, number, step)
        for name, length in kernels * times:
            rank.kernel(name, length)
        if reduce:
            rank.collective(reduce)

    return work


def machine(ranks: int, steps: int, work: Work, begins: Sequence[int] = (), **how: Any) -> Run:
    """A run in which each step of each rank is ``work(rank's machine, rank, step)``."""
    traces = []
    for number in range(ranks):
        rank = Rank(**how)
        for step in range(steps):
            rank.step(step)
            work(rank, number, step)
            rank.wait()
        traces.append(rank.trace(number, ranks, begins[number] if begins else 0))
    return make_run("machine", traces, range(ranks), {"1": list(range(ranks))})


def one_f_one_b(stages: int, batches: int, *slow: int, by: float = 2) -> Run:
    """Pipeline stages on GPUs, one forward and one backward in turn; ``slow`` take ``by`` times as long."""

    def work(rank: Rank, stage: int, step: int) -> None:
        times = by if stage in slow else 1

        def one_pass(length: int, source: int, target: int, tag: int) -> None:
            got = [rank.message(recv, source, tag)] if 0 <= source < stages else []
            rank.kernel(GEMM, round(length * times), got)
            if 0 <= target < stages:
                rank.message(send, target, tag)

        warm = min(stages - 1 - stage, batches)
        order = [True] * warm + [True, False] * (batches - warm) + [False] * warm
        done = {True: 0, False: 0}
        for forward in order:
            tag = (2 * step + forward) * batches + done[forward]
            done[forward] += 1
            if forward:
                one_pass(100, stage - 1, stage + 1, tag)
            else:
                one_pass(200, stage + 1, stage - 1, tag)

    return machine(stages, 2, work)


def as_recorded(run: Run, *ranks: int) -> Run:
    """The run as its ranks would record it: communication lasts from a rank's arrival to the end, without a
    word on which part of it is waiting; ``ranks``: the files that are there (default: all)."""
    traces = []
    times = zip(run.graph.traces, *map(run.graph.scatter, (run.start_ns, run.end_ns)), strict=True)
    for trace, start, end in times:
        attributes = {name: each for name, each in trace.attributes.items() if not name.endswith("_micros")}
        micros = {"start_micros": start // 1000 + 1, "duration_micros": (end - start) // 1000}
        times_of = {name: values.astype(np.uint64) for name, values in micros.items()}
        traces.append(replace(trace, attributes=attributes, **times_of))
    kept = list(ranks) or run.graph.ranks
    return make_run("recorded", [traces[rank] for rank in kept], kept, run.comm_groups)


Machines = dict[str, tuple[Callable[[], Run], str, int | None]]
"""What it is → its run, what bounds it, and the slowest rank."""


def check_verdict(machines: Machines, name: str) -> None:
    """The verdict is right, and what ``predict`` computes for the flags of each proposal is its gain."""
    make, bound, slow = machines[name]
    run = make()
    found = diagnose(run)
    assert (found.bound, found.slow_rank) == (bound, slow), found.lines()
    for each in found.proposals:
        if each.flags:
            config = parse(PredictConfig, [run.name, *shlex.split(each.flags)])
            told = predict(together(run) if config.starts == "together" else run, changes(config, run))
            assert 1 - told.after_ms / told.before_ms == pytest.approx(each.gain, abs=1e-6), each
