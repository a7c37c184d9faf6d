"""Runs of which it is known by construction what bounds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chakra_et.et.columns import ExecutionTrace
from chakra_et.simulate.run import Run, make_run
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send

STEPS, LAUNCHES = 3, 20
GEMM, ADD = "ampere_bf16_s16816gemm_bf16_256x128", "vectorized_elementwise_kernel"


@dataclass(frozen=True)
class Step:
    """Times in µs: of a launch on the host, of each kernel, of one all-reduce at the end of the step that all
    wait for (0: none). ``loading``: of the input data before the step; ``compiling``, ``allocating``: of such
    calls in each step; ``moved``: bytes per operation of the kernels."""

    launch: int = 10
    kernel: int = 100
    reduce: int = 0
    name: str = GEMM
    loading: int = 0
    compiling: int = 0
    allocating: int = 0
    num_ops: int = 4_000_000
    tensor_size: int = 10_000

    def trace(self, rank: int, ranks: int, begin: int = 0) -> ExecutionTrace:
        """One rank's steps, with the start times that they have by themselves from ``begin`` on."""
        nodes: list[dict] = []

        def add(make, length: int, deps: tuple[int, ...], **more) -> int:
            nodes.append(make(len(nodes) + 1, length, deps, **more))
            return len(nodes)

        last: tuple[int, ...] = ()
        for number in range(STEPS):
            last = (add(cpu, 0, last, name=f"ProfilerStep#{number}", kind="annotation"),)
            for name, length in (
                ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", self.loading),
                ("_compile.compile_inner (dynamo_timed)", self.compiling),
                ("cudaMalloc", self.allocating),
            ):
                if length:
                    kind = "runtime" if name == "cudaMalloc" else "operator"
                    last = (add(cpu, length, last, name=name, kind=kind),)
            device: tuple[int, ...] = ()
            for _ in range(LAUNCHES):
                last = (add(cpu, self.launch, last, name="cudaLaunchKernel", kind="runtime"),)
                work = {"num_ops": self.num_ops, "tensor_size": self.tensor_size}
                device = (add(kernel, self.kernel, last, name=self.name, kind="kernel", **work),)
            if self.reduce:
                # All ranks have the same transfer; waits are in nobody's times.
                times = {"transfer_micros": self.reduce, "wait_micros": 0, "is_cpu_op": 0}
                device = (
                    add(collective, self.reduce, device, name="ncclDevKernel_AllReduce", lane=9, **times),
                )
            last = (add(cpu, 1, (*last, *device), name="cudaDeviceSynchronize", kind="runtime"),)
        self._start(nodes, begin)
        return make_trace(*nodes, rank=rank, world_size=ranks, clock_domain="one", trace_start_ns=0)

    def _start(self, nodes: list[dict], begin: int) -> None:
        end: dict[int, int] = {}
        lane: dict[object, int] = {}
        for node in nodes:
            on = node.get("lane", node.get("stream", "host"))
            start = max([begin, lane.get(on, 0), *(end[each] for each in node["deps"])])
            node["start"] = start
            end[node["id"]] = lane[on] = start + node["duration"]


def made_run(*steps: Step, begins: Sequence[int] = ()) -> Run:
    """One rank for each of ``steps``; they begin at ``begins``."""
    traces = [
        step.trace(rank, len(steps), begin)
        for rank, (step, begin) in enumerate(zip(steps, begins or [0] * len(steps), strict=True))
    ]
    return make_run("made", traces, range(len(steps)), {"1": list(range(len(steps)))})


def pipeline(stages: int, batches: int, work: int = 100) -> Run:
    """A forward pass in stages: each computes a micro-batch once it has come from the stage before."""
    traces = []
    for stage in range(stages):
        nodes: list[dict] = [cpu(1, 0, name="ProfilerStep#0", kind="annotation", start=0)]
        for batch in range(batches):
            behind: tuple[int, ...] = (len(nodes),)
            if stage:
                nodes.append(
                    recv(len(nodes) + 1, 1, stage - 1, behind, name="gloo:recv", comm_tag=batch, start=0)
                )
                behind = (len(nodes),)
            nodes.append(cpu(len(nodes) + 1, work, behind, name="aten::mm", kind="operator", start=0))
            if stage + 1 < stages:
                nodes.append(
                    send(
                        len(nodes) + 1, 1, stage + 1, (len(nodes),), name="gloo:send", comm_tag=batch, start=0
                    )
                )
        traces.append(make_trace(*nodes, rank=stage, world_size=stages))
    return make_run("pipeline", traces, range(stages))
