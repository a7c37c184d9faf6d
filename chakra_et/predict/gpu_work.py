"""Which kernels each operator of a run launched, of which class they are, and what the operator works on.

Vendors' libraries split an operator into other kernels, with other names: what can be compared is the sum of
an operator's kernels. Attention and convolutions count as one operator with all that they call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.edges import rows_of
from chakra_et.graph.work import DEPTH, WITH_VALUES, operator_work, rule_of
from chakra_et.predict.gpu_times import CLASSES, Work, item_bytes
from chakra_et.predict.run import Run
from chakra_et.replay.shares import KINDS

_CLASSES = (
    ("attention", r"(?<!multi_head_)attention|flash|::f?mha"),
    ("convolution", r"conv(olution|[123]d|_depthwise)"),
    ("matrix product", r"::(_scaled_)?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot)$|^_?gemm"),
    ("softmax", r"softmax"),
    ("normalization", r"(?<!vector_)norm(?!al)"),
    ("copy", r"copy_|contiguous|clone|::cat$|::to$"),
    ("gather", r"index|gather|embedding|scatter"),
    ("reduction", r"::(sum|mean|amax|amin|max|min|any|all|arg\w+|linalg_\w+|var|std|prod)$"),
)
_KERNELS = (("attention", r"attn|fmha|attention|flash"), ("matrix product", r"gemm|cijk_|cutlass|nvjet"))
"""Classes of kernels whose operator isn't known: by their own names, before ``_CLASSES``."""
_WITHIN = re.compile(r"DtoD|Device -> Device")
_TO_HOST = re.compile(r"_local_scalar_dense|::item$")
_WHOLE = (CLASSES.index("attention"), CLASSES.index("convolution"))
_COPY = CLASSES.index("memory copy")
_SELECTS = ("aten::index_select", "aten::embedding", "aten::gather")
_IDLE_NS = 3_000
"""A kernel that starts this much after the one before found an idle GPU: in a queue, within 2 µs."""


@dataclass(frozen=True)
class Operators:
    """The K kernels and copies of a run, ``nodes[K]``, ``kind[K]`` (index into ``CLASSES``), and the O
    operators that launched them: ``of[K]`` int64; ``launcher[O]``: the operators' nodes, ``work``: O entries.
    A memory copy, and a kernel without operator, is its own.
    """

    nodes: np.ndarray
    kind: np.ndarray
    of: np.ndarray
    launcher: np.ndarray
    work: list[Work]


def device_work(run: Run) -> np.ndarray:
    """The nodes that are kernels, copies or memsets and not communication."""
    kinds = [KINDS.index("kernel"), KINDS.index("copy")]
    return np.flatnonzero(np.isin(run.kind, kinds) & ~run.is_communication)


def kernel_classes(run: Run) -> np.ndarray:
    """Index into ``CLASSES`` of each node, by the operator that launched it or else its name; int64[N]."""
    return _classes(run, _launchers(run))


def operators(run: Run) -> Operators:
    """All device work of a run by operator. Convolutions use TF32 where the GPU has it, unless PyTorch is
    told otherwise; of matrix products, names of kernels tell.
    """
    launcher = _launchers(run)
    nodes = device_work(run)
    kind = _classes(run, launcher)[nodes]
    alone = (launcher[nodes] < 0) | (kind == _COPY)
    key = np.where(alone, nodes + len(run.graph), launcher[nodes])
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    of = of.reshape(-1)
    idle = np.bincount(of, _found_idle(run, nodes), len(first)) * 2 > np.bincount(of)
    sums = [
        np.bincount(of, run.graph.attribute(name, 0)[nodes].astype(float), len(first))
        for name in ("num_ops", "tensor_size")
    ]
    named = np.array(["tf32" in name for name in run.names])[run.name_of[nodes]]
    tf32 = np.bincount(of, named, len(first)) > 0
    shapes = _Shapes(run)
    work = []
    for at, k in enumerate(first.tolist()):
        found = Work(CLASSES[kind[k]]) if alone[k] else shapes.work(CLASSES[kind[k]], int(launcher[nodes[k]]))
        if not found.known and found.kind != "gather":  # the attributes count the whole table
            found = replace(found, operations=float(sums[0][at]), moved=float(sums[1][at]))
        if found.type == "float" and (tf32[at] or found.kind == "convolution"):
            found = replace(found, type="tf32")
        work.append(replace(found, idle=bool(idle[at])))
    return Operators(nodes, kind, of, np.where(alone, nodes, launcher[nodes])[first], work)


def _launchers(run: Run) -> np.ndarray:
    """The node of the operator that launched each node: the outermost one that is attention or a
    convolution, or else the innermost one; -1 for none; int64[N].
    """
    of_name = np.array([_class(name) if _is_operator(name) else -1 for name in run.names], np.int64)
    found = []
    for at, trace in enumerate(run.graph.traces):
        first, last = run.graph.first[at], run.graph.first[at + 1]
        node = np.empty(len(trace), np.int64)
        node[run.graph.row[first:last]] = np.arange(first, last)
        parent = rows_of(trace.ids, trace.column("parent", -1).clip(0).astype(np.uint64))
        parent[trace.column("parent", -1) < 0] = -1
        kind = np.empty(len(trace), np.int64)
        kind[run.graph.row[first:last]] = of_name[run.name_of[first:last]]
        launcher, around = parent.copy(), parent.copy()
        for _ in range(DEPTH):
            whole = (around >= 0) & np.isin(kind[around], _WHOLE)
            launcher = np.where(whole, around, launcher)
            around = np.where(around >= 0, parent[around], -1)
        launcher[(launcher >= 0) & (kind[launcher] < 0)] = -1
        found.append(np.where(launcher >= 0, node[launcher], -1))
    return run.graph.gather(found)


def _classes(run: Run, launcher: np.ndarray) -> np.ndarray:
    of_name = np.array([_class(name) for name in run.names], np.int64)
    of_kernel = np.array([_kernel_class(name) for name in run.names], np.int64)
    known = launcher >= 0
    found = np.where(known, of_name[run.name_of[launcher]], of_kernel[run.name_of])
    copies = run.kind == KINDS.index("copy")
    is_set = np.array(["memset" in name.lower() for name in run.names])[run.name_of]
    within = np.array([bool(_WITHIN.search(name)) for name in run.names])[run.name_of]
    to_host = np.array([bool(_TO_HOST.search(name)) for name in run.names])[run.name_of]
    within &= ~((launcher >= 0) & to_host[launcher])  # AMD's tools call small copies to the host so too
    found[copies & ~is_set & ~within] = _COPY
    found[copies & is_set & ~known] = CLASSES.index("memset")
    found[copies & within & ~known] = CLASSES.index("copy")
    result: np.ndarray = found
    return result


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith("autograd::")


def _class(name: str) -> int:
    short = name.lower()
    found = next((kind for kind, pattern in _CLASSES if re.search(pattern, short)), "elementwise")
    return CLASSES.index(found)


def _kernel_class(name: str) -> int:
    short = name.lower()
    for kind, pattern in _KERNELS:
        if re.search(pattern, short):
            return CLASSES.index(kind)
    return _class(name)


def _found_idle(run: Run, nodes: np.ndarray) -> np.ndarray:
    """Whether the GPU did nothing just before each of ``nodes``, as measured; bool[K]."""
    order = nodes[np.lexsort((run.start_ns[nodes], run.graph.trace_of[nodes]))]
    idle = np.ones(len(run.graph), bool)
    for at in range(len(run.graph.traces)):
        own = order[run.graph.trace_of[order] == at]
        if len(own):
            ended = np.maximum.accumulate(run.end_ns[own])
            idle[own[1:]] = run.start_ns[own[1:]] - ended[:-1] > _IDLE_NS
    found: np.ndarray = idle[nodes]
    return found


class _Shapes:
    """The recorded arguments of operators, by node."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.place: list[dict[int, int]] = [
            {} if trace.inputs is None else {row: k for k, row in enumerate(trace.inputs.rows.tolist())}
            for trace in run.graph.traces
        ]
        self.seen: dict[tuple[str, bytes, bytes, bytes], Work] = {}

    def work(self, kind: str, node: int) -> Work:
        """What the operator of ``node`` works on; without operations and bytes if that isn't recorded."""
        trace_of = int(self.run.graph.trace_of[node])
        trace: ExecutionTrace = self.run.graph.traces[trace_of]
        at = self.place[trace_of].get(int(self.run.graph.row[node]))
        if at is None or trace.inputs is None:
            return Work(kind)
        name = self.run.names[int(self.run.name_of[node])]
        values = trace.inputs.values[at] if rule_of(name) in WITH_VALUES else b"[]"
        key = (name, values, trace.inputs.shapes[at], trace.inputs.types[at])
        if key not in self.seen:
            self.seen[key] = described(kind, *key)
        return self.seen[key]


def described(kind: str, name: str, values: bytes, shapes: bytes, types: bytes) -> Work:
    """What a call of operator ``name`` works on, from the JSON texts of its arguments."""
    counted = operator_work(name, values, shapes, types, b"[]", b"[]")
    try:
        dims, types_ = msgspec.json.decode(shapes), msgspec.json.decode(types)
    except (msgspec.DecodeError, RecursionError):
        return Work(kind)
    if counted is None or not isinstance(dims, list) or not isinstance(types_, list):
        return Work(kind)
    tensors = [d for d, t in zip(dims, types_, strict=False) if str(t).startswith("Tensor(")]
    of_type = next((str(t)[7:-1] for t in types_ if str(t).startswith("Tensor(")), "")
    work = Work(kind, float(counted[0]), float(counted[1]), type=of_type)
    backward = "backward" in name
    if kind == "matrix product":
        return replace(work, product=_product(tensors[-2:] if "add" in name else tensors[:2]))
    if kind == "attention":
        return _attention(work, tensors[1:] if backward else tensors, "scaled_dot_product" in name)
    if kind == "softmax" and tensors and tensors[0]:
        return replace(work, row=tensors[0][-1])
    if kind == "convolution" and len(tensors) > 1 + backward and len(tensors[backward]) > 1:
        return replace(work, channels=tensors[backward][1])
    if kind == "gather":
        return _gathered(work, name, tensors)
    return work


def _product(pair: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """Batch, M, N and K of a product of two tensors."""
    if len(pair) != 2 or len(pair[0]) < 2 or len(pair[1]) < 2 or pair[0][-1] != pair[1][-2]:
        return None
    a, b = pair
    if len(b) == 2:  # a batch of rows
        return 1, math.prod(a[:-1]), b[-1], a[-1]
    return math.prod(a[:-2]), a[-2], b[-1], a[-1]


def _gathered(work: Work, name: str, tensors: Sequence[Any]) -> Work:
    """The selected rows or elements, not the whole table; unknown where the index isn't a tensor argument."""
    if len(tensors) < 2 or not tensors[0] or name not in _SELECTS:
        return Work(work.kind, type=work.type)
    each = 1 if name.endswith("gather") else tensors[0][-1]
    made = float(math.prod(tensors[1]) * each)
    return replace(work, operations=made, moved=2 * made * item_bytes(work.type))


def _attention(work: Work, tensors: Sequence[Any], heads_first: bool) -> Work:
    """With queries and keys. PyTorch's flash and efficient operators have tokens before heads."""
    if len(tensors) < 2 or len(tensors[0]) != 4 or len(tensors[1]) != 4:
        return work
    tokens, heads = (2, 1) if heads_first else (1, 2)
    query, key = tensors[0], tensors[1]
    return replace(work, keys=key[tokens], batch=query[0] * query[heads], queries=query[tokens])
