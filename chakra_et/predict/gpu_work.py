"""Which kernels each operator of a run launched, of which class they are, and what the operator works on.

Vendors' libraries split an operator into other kernels, with other names: what can be compared is the sum of
an operator's kernels. Attention and convolutions count as one operator with all that they call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost.operator_times import CLASSES, OperatorCall, item_bytes
from chakra_et.cost.operator_work import DEPTH
from chakra_et.et.node_attributes import parents
from chakra_et.predict.gpu_shapes import Shapes
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS

_CLASSES = (
    ("attention", r"(?<!multi_head_)attention|flash|::f?mha"),
    ("convolution", r"conv(olution|[123]d|_depthwise)"),
    ("matrix product", r"::(_scaled_)?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot)$|^_?gemm"),
    ("softmax", r"softmax"),
    ("normalization", r"(?<!vector_)norm(?!al)"),
    ("copy", r"copy_|contiguous|clone|::cat$|::to$"),
    ("gather", r"index|gather|(?<!rotary_)embedding|scatter"),
    ("reduction", r"::(sum|mean|amax|amin|max|min|any|all|arg\w+|linalg_\w+|var|std|prod)$"),
)
_KERNELS = (
    ("elementwise", r"^triton_poi_"),
    ("reduction", r"^triton_(red|per)_"),
    ("attention", r"attn|fmha|attention|flash"),
    ("matrix product", r"gemm|cijk_|cutlass|nvjet|matmul|fused_moe|^triton_(tem|mm|bmm)_"),
)
"""Classes of kernels whose operator isn't known: by their own names, before ``_CLASSES``. TorchInductor's
begin with what they are, and go on with all that they do (torch/_inductor/codegen/triton.py)."""
_UNTESTED = re.compile(r"^(?!aten::)|batch_norm|::arg")
"""Launchers that the fit doesn't use: not PyTorch's, batch normalization (several kernels in training), and
argmax (bound by the few rows)."""
_WITHIN = re.compile(r"DtoD|Device -> Device")
_TO_HOST = re.compile(r"_local_scalar_dense|::item$")
_WHOLE = (CLASSES.index("attention"), CLASSES.index("convolution"))
_COPY = CLASSES.index("memory copy")
_MEMSET = re.compile(r"memset", re.I)
_TF32 = re.compile(r"tf32|tensorop_s1688")
_STRIDED = re.compile(r"(?<![a-z_])elementwise_kernel(_manual_unroll)?<")
_STRAIGHT = re.compile(r"(vectorized|unrolled)_elementwise_kernel")
_JOINED_TYPE = re.compile(r"CatArray\w+<(?:[^<>]*OpaqueType<(\d+)|(\w+(?:::\w+)?))")
_IDLE_NS = 3_000
"""A kernel that starts this much after the one before found an idle GPU: in a queue, within 2 µs."""


@dataclass(frozen=True)
class Launchers:
    """The K kernels and copies of a run, ``nodes[K]``, ``kind[K]`` (index into ``CLASSES``), and the O
    operators that launched them: ``of[K]`` int64; ``launcher[O]``: the operators' nodes, ``work``: O entries.
    A memory copy, and a kernel without operator, is its own.
    """

    nodes: np.ndarray
    kind: np.ndarray
    of: np.ndarray
    launcher: np.ndarray
    work: list[OperatorCall]


def device_work(run: Run) -> np.ndarray:
    """The nodes that are kernels, copies or memsets and not communication."""
    kinds = [KINDS.index("kernel"), KINDS.index("copy")]
    return np.flatnonzero(np.isin(run.kind, kinds) & ~run.is_communication)


def kernel_kinds(run: Run) -> np.ndarray:
    """Index into ``CLASSES`` of each node, by the operator that launched it or else its name; int64[N]."""
    return _classes(run, _launchers(run))


def launched_operators(run: Run) -> Launchers:
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
    is_set = _named(run, _MEMSET)[nodes]
    counts = ~is_set | (np.bincount(of, ~is_set, len(first)) == 0)[of]  # not what a product clears first
    sums = [
        np.bincount(of, counts * run.graph.attribute(name, 0)[nodes].astype(float), len(first))
        for name in ("num_ops", "tensor_size")
    ]
    tf32, strided, straight = (
        np.bincount(of, _named(run, pattern)[nodes], len(first)) > 0
        for pattern in (_TF32, _STRIDED, _STRAIGHT)
    )
    shapes = Shapes(run)
    work = []
    for at, k in enumerate(first.tolist()):
        found = (
            OperatorCall(CLASSES[kind[k]])
            if alone[k]
            else shapes.work(CLASSES[kind[k]], int(launcher[nodes[k]]))
        )
        if not found.known and found.kind != "gather":  # the attributes count the whole table
            found = replace(found, operations=float(sums[0][at]), moved=float(sums[1][at]))
        if found.type == "float" and (tf32[at] or found.kind == "convolution"):
            found = replace(found, type="tf32")
        if strided[at] or straight[at]:  # strides may not be recorded
            found = replace(found, strided=bool(strided[at]))
        if found.joins:
            match = _JOINED_TYPE.search(run.names[run.name_of[nodes[k]]])
            size = 2 if match is None else int(match[1]) if match[1] else item_bytes(match[2])
            found = replace(found, moved=2.0 * found.operations * size)
        name = run.names[run.name_of[nodes[k] if alone[k] else launcher[nodes[k]]]]
        work.append(replace(found, idle=bool(idle[at]), tested=not _UNTESTED.search(name)))
    return Launchers(nodes, kind, of, np.where(alone, nodes, launcher[nodes])[first], work)


def _named(run: Run, pattern: re.Pattern[str]) -> np.ndarray:
    """bool[N]: whose name has a match."""
    found: np.ndarray = np.array([bool(pattern.search(name)) for name in run.names])[run.name_of]
    return found


def _launchers(run: Run) -> np.ndarray:
    """The node of the operator that launched each node: the outermost one that is attention or a
    convolution, or else the innermost one; -1 for none; int64[N].
    """
    called = ["::" in name and not name.startswith("autograd::") for name in run.names]
    of_name = np.where(called, [_class(name) for name in run.names], -1)
    found = []
    for at, trace in enumerate(run.graph.traces):
        first, last = run.graph.first[at], run.graph.first[at + 1]
        node = np.empty(len(trace), np.int64)
        node[run.graph.row[first:last]] = np.arange(first, last)
        parent = np.where(trace.column("parent", -1) < 0, -1, parents(trace))
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
    of_name = np.array([_class(name) for name in run.names])
    of_kernel = np.array([_class(name, (*_KERNELS, *_CLASSES)) for name in run.names])
    known = launcher >= 0
    found = np.where(known, of_name[run.name_of[launcher]], of_kernel[run.name_of])
    copies = run.kind == KINDS.index("copy")
    is_set, within = _named(run, _MEMSET), _named(run, _WITHIN)
    within &= ~(known & _named(run, _TO_HOST)[launcher])  # AMD's tools call small copies to the host so too
    found[copies & ~is_set & ~within] = _COPY
    found[copies & is_set & ~known] = CLASSES.index("memset")
    found[copies & within & ~known] = CLASSES.index("copy")
    return np.asarray(found)


def _class(name: str, patterns: Sequence[tuple[str, str]] = _CLASSES) -> int:
    short = name.lower()
    return CLASSES.index(next((kind for kind, of in patterns if re.search(of, short)), "elementwise"))


def _found_idle(run: Run, nodes: np.ndarray) -> np.ndarray:
    """Whether the GPU did nothing just before each of ``nodes``, as measured; bool[K]."""
    trace = run.graph.trace_of
    order = nodes[np.lexsort((run.start_ns[nodes], trace[nodes]))]
    idle = np.ones(len(run.graph), bool)
    bounds = np.flatnonzero(np.diff(trace[order], prepend=-1))
    for own in np.split(order, bounds[1:]):
        ended = np.maximum.accumulate(run.end_ns[own])
        idle[own[1:]] = run.start_ns[own[1:]] - ended[:-1] > _IDLE_NS
    return np.asarray(idle[nodes])
