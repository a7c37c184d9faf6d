"""Patterns of calls and operators in training programs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.generator.program import (
    Await,
    AwaitComm,
    Block,
    Busy,
    Comm,
    Instruction,
    Launch,
    Op,
    Post,
    Record,
    Stream,
    StreamWait,
    Tensor,
)

OPERATORS = ("aten::mm", "aten::add_", "aten::native_layer_norm", "aten::view", "aten::copy_", "aten::gelu")
# c10d operator, annotation of the backend, kernel name without its dialect.
COLLECTIVES = {
    "allreduce": ("c10d::allreduce_", "all_reduce", "AllReduce"),
    "_allgather_base": ("c10d::_allgather_base_", "_all_gather_base", "AllGather"),
    "all_gather": ("c10d::allgather_", "all_gather", "AllGather"),
    "_reduce_scatter_base": ("c10d::_reduce_scatter_base_", "_reduce_scatter_base", "ReduceScatter"),
    "reduce_scatter": ("c10d::reduce_scatter_", "reduce_scatter", "ReduceScatter"),
    "broadcast": ("c10d::broadcast_", "broadcast", "Broadcast"),
    "reduce": ("c10d::reduce_", "reduce", "Reduce"),
    "all_to_all": ("c10d::alltoall_", "all_to_all", "SendRecv"),
    "all_to_allv": ("c10d::alltoall_base_", "all_to_all", "SendRecv"),
    "barrier": ("c10d::barrier", "all_reduce_barrier", "AllReduce"),
    "gather": ("c10d::gather_", "gather", "SendRecv"),
    "scatter": ("c10d::scatter_", "scatter", "SendRecv"),
    "allreduce_coalesced": ("c10d::allreduce_coalesced_", "allreduce_coalesced", "AllReduce"),
    "send": ("c10d::send", "send", "SendRecv"),
    "recv": ("c10d::recv_", "recv", "SendRecv"),
}
KERNEL_NAMES = {
    "old": "ncclKernel_{0}_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
    "dev": "ncclDevKernel_{0}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "rccl": "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
}


@dataclass
class Parts:
    """Makes the patterns; every duration comes from ``random``, in multiples of ``resolution`` ns.

    ``tail``: ns that a launching call goes on after its work is on the queue; ``kernel_names`` is the
    dialect of the communication library.
    """

    random: random.Random
    resolution: int = 1
    tail: int = 0
    kernel_names: str = "dev"
    device: int = 0
    keys: int = 0
    sequence: int = 0
    storages: int = 100
    memory: str = "cuda:0"

    def ns(self, low: int, high: int) -> int:
        return max(self.random.randint(low, high) // self.resolution, 1) * self.resolution

    def key(self, what: str) -> str:
        self.keys += 1
        return f"{what} {self.keys}"

    def python(self) -> Busy:
        """Time outside of operators."""
        return Busy(self.ns(500, 30_000))

    def tensor(self, device: str = "") -> Tensor:
        self.storages += 1
        return Tensor(self.storages, self.random.randint(1, 4096), device=device or self.memory)

    def leaf(self) -> Op:
        """An operator that only works; its duration has a key."""
        name = self.random.choice(OPERATORS)
        return Op(name, [Busy(self.ns(500, 20_000), self.key("op"))], tensors=[self.tensor()])

    def operator(self, stream: Stream | None, depth: int) -> Op:
        """An operator with self time around others, which launch on ``stream`` (None: on a CPU)."""
        body: list[Instruction] = [Busy(self.ns(100, 5_000))]
        for _ in range(self.random.randint(1, 3)):
            if depth > 1 and self.random.random() < 0.5:
                body.append(self.operator(stream, depth - 1))
            elif stream is not None and self.random.random() < 0.7:
                body.append(self.launch(stream))
            else:
                body.append(self.leaf())
            if self.random.random() < 0.7:
                body.append(Busy(self.ns(100, 3_000)))
        self.sequence += 1
        return Op(self.random.choice(OPERATORS), body, tensors=[self.tensor()], sequence=self.sequence)

    def call(self, name: str, *body: Instruction, recorded: bool = True) -> Op:
        category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        return Op(name, [Busy(self.ns(300, 4_000)), *body], category, recorded=recorded)

    def launch(self, stream: Stream, comm: Comm | None = None, name: str = "", recorded: bool = True) -> Op:
        """One kernel, copy or memset."""
        kind = (
            "kernel"
            if comm or name
            else self.random.choices(("kernel", "gpu_memcpy", "gpu_memset"), (8, 1, 1))[0]
        )
        key = self.key("kernel" if comm is None else "comm")
        names = {
            "kernel": f"void {key.replace(' ', '_')}<float>(float*)",
            "gpu_memcpy": "Memcpy DtoD (Device -> Device)",
            "gpu_memset": "Memset (Device)",
        }
        call = {"gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}.get(kind, "")
        call = call or self.random.choice(("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel"))
        ns = self.ns(1_000, 80_000) if comm is None else self.ns(20_000, 300_000)
        work = Launch(name or names[kind], ns, stream, kind, comm, key=key)
        return self.call(call, work, *([Busy(self.tail)] if self.tail else []), recorded=recorded)

    def graph(self, stream: Stream, kernels: int, overlap: bool) -> Op:
        """cudaGraphLaunch of several kernels, the last of which overlaps the others if ``overlap``."""
        works = []
        for number in range(kernels):
            key = self.key("kernel")
            name = f"void {key.replace(' ', '_')}<graph>()"
            works.append(
                Launch(
                    name, self.ns(1_000, 20_000), stream, overlap=overlap and number == kernels - 1, key=key
                )
            )
        return self.call("cudaGraphLaunch", *works)

    def record(self, event: str, stream: Stream) -> Op:
        return self.call("cudaEventRecord", Record(event, stream))

    def stream_wait(self, event: str, stream: Stream) -> Op:
        return self.call("cudaStreamWaitEvent", StreamWait(event, stream))

    def synchronise(self, on: str, stream: Stream, event: str = "") -> Op:
        """cudaDeviceSynchronize or similar; all time before the wait belongs to the wait."""
        name = {
            "device": "cudaDeviceSynchronize",
            "stream": "cudaStreamSynchronize",
            "event": "cudaEventSynchronize",
        }
        return Op(name[on], [Block(on, stream, event), Busy(self.ns(200, 2_000))], "cuda_runtime")

    def item(self, stream: Stream) -> Op:
        """``tensor.item()``: a copy to the host, and a wait for it."""
        copy = Launch(
            "Memcpy DtoH (Device -> Pinned)",
            self.ns(500, 2_000),
            stream,
            "gpu_memcpy",
            key=self.key("kernel"),
        )
        body = [
            Busy(self.ns(100, 2_000)),
            self.call("cudaMemcpyAsync", copy),
            self.synchronise("stream", stream),
        ]
        return Op("aten::item", [Op("aten::_local_scalar_dense", body, tensors=[self.tensor()])])

    def blocking_copy(self, stream: Stream) -> Op:
        """A copy from pageable memory: the call returns when it is done."""
        copy = Launch(
            "Memcpy DtoH (Device -> Pageable)",
            self.ns(2_000, 9_000),
            stream,
            "gpu_memcpy",
            key=self.key("kernel"),
        )
        call = Op("cudaMemcpyAsync", [copy, Block("copy", stream), Busy(self.ns(200, 900))], "cuda_runtime")
        return Op("aten::copy_", [Busy(self.ns(100, 2_000)), call], tensors=[self.tensor()])

    def side_stream(self, stream: Stream, side: Stream, between: list[Instruction]) -> list[Instruction]:
        """Kernels on another stream between two event waits; ``between`` runs at the same time."""
        fork, join = self.key("event"), self.key("event")
        kernels = [self.launch(side) for _ in range(self.random.randint(1, 3))]
        return [
            self.record(fork, stream),
            self.stream_wait(fork, side),
            *kernels,
            self.record(join, side),
            *between,
            self.stream_wait(join, stream),
            self.launch(stream),
        ]

    def nccl(
        self, comm: Comm, stream: Stream, comm_stream: Stream, recorded: bool = True
    ) -> tuple[Op, list[Instruction]]:
        """A collective, send or receive on the GPU, and its ``work.wait()``."""
        operator, annotation, kernel = COLLECTIVES[comm.kind]
        before, after = self.key("event"), self.key("event")
        peers = {"send": f" {comm.source}->{comm.target}", "recv": f" {comm.target}<-{comm.source}"}.get(
            comm.kind, ""
        )
        body: list[Instruction] = [
            self.record(before, stream),
            self.stream_wait(before, comm_stream),
            self.launch(comm_stream, comm, KERNEL_NAMES[self.kernel_names].format(kernel), recorded),
            self.record(after, comm_stream),
        ]
        inner = Op(f"nccl:{annotation}{peers}", body, "user_annotation", [self._tensor_of(comm)], comm)
        described = Op("record_param_comms", [Busy(self.ns(200, 2_000)), inner], comm=comm)
        op = Op(operator, [Busy(self.ns(200, 2_000)), described, Busy(self.ns(200, 2_000))], comm=comm)
        return op, [self.stream_wait(after, stream)]

    def gloo(self, comm: Comm, late: list[Instruction] | None = None) -> list[Instruction]:
        """A collective on the CPU; its wait follows at once, or after ``late`` before its data is used."""
        operator, name, _ = COLLECTIVES[comm.kind]
        comm.asynchronous = late is not None
        self.storages += 1
        comm.storage = self.storages
        key = self.key("comm")
        backend = {"allreduce_coalesced": "all_reduce", "_allgather_base": "all_gather", "barrier": "barrier"}
        post = Post(f"gloo:{backend.get(comm.kind, name)}", self.ns(20_000, 300_000), comm, key)
        op = Op(operator, [Busy(self.ns(500, 4_000)), post], comm=comm)
        if late is None:
            return [op, AwaitComm(key), self.python()]
        user = Op("aten::mul_", [Busy(self.ns(500, 2_000))], tensors=[self._tensor_of(comm, "cpu")])
        return [op, *late, AwaitComm(key), user]

    def _tensor_of(self, comm: Comm, device: str = "") -> Tensor:
        return Tensor(comm.storage, comm.elements, comm.dtype, device or self.memory)

    def backward(
        self, operators: list[Op], more: list[Instruction], stream: Stream | None, thread: str
    ) -> list[Instruction]:
        """The backward pass of ``operators``; ``more`` (hooks) comes after half of it."""
        body: list[Instruction] = []
        for number, forward in enumerate(reversed(operators)):
            if number == len(operators) // 2:
                body += more
            work: list[Instruction] = [Busy(self.ns(200, 3_000))]
            work += [self.launch(stream)] if stream is not None else [self.leaf()]
            inner = Op(
                "MmBackward0", work, sequence=forward.sequence, forward=thread, tensors=[self.tensor()]
            )
            around = Op(
                "autograd::engine::evaluate_function: MmBackward0", [Busy(self.ns(100, 2_000)), inner]
            )
            around.sequence, around.forward = forward.sequence, thread
            # Nothing unseen at either end, where no trace could tell work from waiting.
            body += [Busy(self.ns(100, 1_000)), around] if number else [around]
        return body

    def accumulate(self, done: str) -> list[Instruction]:
        """A gradient that the engine accumulates on the thread that called backward()."""
        name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        return [Await(done), Op(name, [Busy(self.ns(300, 2_000)), self.leaf()])]
