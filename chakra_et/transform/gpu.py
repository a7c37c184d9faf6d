"""Another GPU: the kernels of each operator take what the operator takes there.

Per operator, not per kernel, since vendors' libraries split an operator into other kernels: what can be
compared is the sum of an operator's kernels. Attention and convolutions count as one operator with all that
they call.

``cost/operator_times`` models what an operator takes on the source and on the target. Where both run the same
code, as PyTorch's own kernels and GPUs of one vendor do, an operator keeps its efficiency: its time changes
as the modelled ones do (Williams, Waterman and Patterson, Roofline, CACM 2009). Matrix products, convolutions
and attention come from each vendor's libraries, and how well they suit a shape on one GPU tells nothing of
the other: there the modelled time of the target stands alone. How far off it is, on GPUs and models that it
wasn't fitted to: ``benchmarks/cost_accuracy.py`` and ``benchmarks/fit_gpus.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost import gpus, operator_times
from chakra_et.cost.operator_times import CLASSES, GpuModel, OperatorCall, gpu_model, item_bytes
from chakra_et.cost.operator_work import DEPTH, rule_of
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.node_attributes import parents
from chakra_et.simulate.run import Run, Setting, make_run
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.text import duration
from chakra_et.traces.fields import STRIDES
from chakra_et.transform.gpu_shapes import Shapes

BY_LIBRARIES = ("attention", "convolution", "matrix product")
"""Classes whose kernels come from each vendor's own libraries."""
_FURTHEST = 8.0
"""Beyond this factor between measured and modelled time, the operator is not what its shapes say."""
_SAME_VENDOR_ERROR, _UNTESTED_ERROR = 0.13, 0.3
"""One standard deviation: of products on a GPU that was left out (cost_accuracy.py), and, guessed, of what no
pair of traces has tested."""
# Of the names that CUDA and HIP report: "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2", "AMD Radeon Graphics".
_BRANDS = {
    "nvidia": re.compile(r"nvidia|tesla|geforce|quadro", re.I),
    "amd": re.compile(r"\bamd\b|radeon", re.I),
}
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
    ("reduction", r"^triton_(red|per)_|::reduce_kernel<"),
    ("attention", r"attn|fmha|attention|flash|cudnn::fusion::"),
    (
        "matrix product",
        r"(?<!fb)gemm|cijk_|cutlass|nvjet|matmul|fused_moe|moe_kernel|^(triton_(tem|mm|bmm)|bmm)_",
    ),
    ("convolution", r"xmma|(?<!reduce_)wgrad|dgrad|fprop|winograd|conv(?!ert)"),
    ("normalization", r"gammabetabackward"),
    ("copy", r"^memcpy\d"),  # as CUDA graphs copy
    ("memset", r"^memset\d"),
)
"""Classes of kernels whose operator isn't known or doesn't say: by their own names, before ``_CLASSES``.
TorchInductor's begin with what they are and end with all they do (torch/_inductor/codegen/triton.py)."""
_UNTESTED = re.compile(r"^(?!aten::)|batch_norm|::arg|_foreach_|_fused_adam")
"""Launchers that the fit doesn't use: not PyTorch's, batch normalization (several kernels in training),
argmax (bound by the few rows), and what works on lists of tensors, as optimizers do."""
_WITHIN = re.compile(r"DtoD|Device -> Device")
_TO_HOST = re.compile(r"_local_scalar_dense|::item$")
_WHOLE = (CLASSES.index("attention"), CLASSES.index("convolution"))
_COPY, _ELEMENTWISE = CLASSES.index("memory copy"), CLASSES.index("elementwise")
_OTHERS, _ANGLES = re.compile(r"^(?!aten::)"), re.compile(r"rotary|_rope_")
_MEMSET = re.compile(r"memset", re.I)
_TF32 = re.compile(r"tf32|tensorop_s1688")
_CUDNN = re.compile(r"^cudnn_generated_\w*_sdpa_")
_CUTLASS = re.compile(r"gemm_\w*_([nt])([nt])_align(\d+)")
"""Of its matrices, which lie by columns, the first is our second."""
_STRIDED = re.compile(r"(?<![a-z_])elementwise_kernel(_manual_unroll)?<")
_STRAIGHT = re.compile(r"(vectorized|unrolled)_elementwise_kernel")
_ROWS = re.compile(r"vectorized_gather_kernel")  # ATen/native/cuda/IndexKernelUtils.cu
_JOINED_TYPE = re.compile(r"CatArray\w+<(?:[^<>]*OpaqueType<(\d+)|(\w+(?:::\w+)?))")
_IDLE_NS = 3_000
"""A kernel that starts this much after the one before found an idle GPU: in a queue, within 2 µs."""


@dataclass(frozen=True)
class OtherGpu:
    """The kernels of a run on GPU ``source`` take what they would take on GPU ``target``.

    Copies between host and GPU, the CPU's work and communication stay as they are.
    """

    source: str
    target: str

    def apply(self, run: Run, setting: Setting) -> Setting:
        source, target = gpu_model(self.source), gpu_model(self.target)
        flag, found = f"--gpu {self.source}→{self.target}", launched_operators(run)
        if not len(found.nodes):
            raise TraceError(f"{flag}: the run has no kernels")
        notes = _check_source(run, source.gpu, flag)
        taken = setting.own_ns[found.nodes].astype(float)
        total = np.bincount(found.of, taken, len(found.work)) / 1e3
        calls = list(zip(found.work, total.tolist(), strict=True))
        ratios, errors, guesses = zip(*(on_target(*call, source, target) for call in calls), strict=True)
        changed = taken * np.array(ratios)[found.of]
        own, doubt = setting.own_ns.copy(), np.zeros(len(run.graph))
        own[found.nodes] = np.rint(changed)
        doubt[found.nodes] = changed * np.array(errors)[found.of]
        notes.append(
            f"{flag}: {len(found.nodes):,} kernels and copies take {duration(changed.sum())} in place of "
            f"{duration(taken.sum())}; the rest, the host's CPU too, stays as it was"
        )
        for guess in sorted(set(guesses) - {""}):
            such = np.array([each == guess for each in guesses])[found.of]
            notes.append(f"{int(such.sum()):,} kernels ({taken[such].sum() / 1e6:,.3f} ms) {guess}")
        notes += [
            f"all kernels on {gpu.name} but matrix products are taken to reach the same shares of its rates "
            f"as on {like}"
            for gpu in (source, target)
            if (like := operator_times.LIKE[gpu.vendor]) != gpu.name
        ]
        setting = replace(setting, own_ns=own, notes=(*setting.notes, *notes))
        return setting.doubting(own_ns=doubt)  # how efficient kernels are there


def parse_gpu(text: str) -> OtherGpu:
    """``H100→MI300X``, also with ``->`` or ``:``. Raises ``ValueError``."""
    parts = [part.strip() for part in re.split(r"→|->|:", text)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--gpu {text!r}: write FROM→TO or FROM:TO, as H100:MI300X")
    return OtherGpu(*parts)


def _check_source(run: Run, of: gpus.Gpu, flag: str) -> list[str]:
    """A note where the files don't confirm that the run is ``of`` this GPU. Raises ``TraceError`` where
    they name another GPU."""
    source, names = of.name, gpus.names()
    for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
        name = str(trace.metadata.get("device_name") or run.devices.get(rank, ""))
        vendor = next((each for each, brand in _BRANDS.items() if brand.search(name)), of.vendor)
        named = gpus.by_driver(name)
        other = named if source in names and named not in (None, source) else None
        if other or vendor != of.vendor:
            known = f": write --gpu {other}:TO" if other else f", which is not among {', '.join(names)}"
            raise TraceError(f"{flag}: rank {rank} ran on {name!r}, not on {source}{known}")
        if named != source:
            called = f"the run's GPU is called {name!r}" if name else "the files don't name the run's GPU"
            return [f"{called}: that it is {source} is taken from --gpu"]
    return []


def resized_kernels(trace: ExecutionTrace, made: ExecutionTrace) -> np.ndarray:
    """What each kernel of a rank takes on its own GPU where its operators have the shapes of ``made``, µs
    float64[rows]; NaN where nothing says so: the GPU, or what the operator works on, isn't known. Tensors are
    taken to lie in one piece, as strides of other shapes aren't known.

    An operator keeps its efficiency, but for matrix products, which are as efficient as all of the rank's:
    how well the library suits one shape tells nothing of another (correlation 0 to 0.2 on four GPUs).
    """
    found = np.full(len(trace), np.nan)
    if (name := gpus.by_driver(trace.metadata_str("device_name"))) is None:
        return found
    runs = []
    for each in (trace, made):
        known = {of: column for of, column in each.attributes.items() if of != STRIDES}
        runs.append(make_run("", [replace(each, attributes=known)], [0], apart=True))
    model, (old, new) = gpu_model(name), map(launched_operators, runs)
    rows = runs[0].graph.row[old.nodes]
    taken = np.bincount(old.of, trace.duration_micros[rows], len(old.work))
    before, after = (
        np.array([model.micros(w) if w.known and w.kind != "memory copy" else 0.0 for w in each.work])
        for each in (old, new)
    )
    told = (before / _FURTHEST < taken) & (taken < before * _FURTHEST) & (after > 0)
    products = told & np.array([each.product is not None for each in old.work])
    ratio = np.full(len(taken), np.nan)
    ratio[told] = after[told] / before[told]
    ratio[products] = after[products] / taken[products] * taken[products].sum() / before[products].sum()
    ratio[told & np.array([one == two for one, two in zip(old.work, new.work, strict=True)])] = 1.0
    found[rows] = trace.duration_micros[rows] * ratio[old.of]
    return found


def on_target(
    work: OperatorCall, micros: float, source: GpuModel, target: GpuModel
) -> tuple[float, float, str]:
    """The ratio of an operator's times on ``target`` to those on ``source``, where it took ``micros``; one
    standard deviation of the predicted time, as a part of it; and what was guessed of the call, as the end of
    a sentence, "" for nothing.
    """
    if work.kind == "memory copy" or micros <= 0:
        return 1.0, 0.0, ""
    (least, rate), (new_least, new_rate) = source.limits(work), target.limits(work)
    known = operator_times.ERRORS if source.vendor != target.vendor else {}
    error: float = known.get(work.kind, _SAME_VENDOR_ERROR)
    before = source.micros(work) if work.known else 0.0
    if not before / _FURTHEST < micros < before * _FURTHEST:
        # Beyond what the smallest kernel takes, it changes as its class's rate does. Nothing tells whether
        # arithmetic or bytes bound it: in doubt is half of what lies between these.
        changed = new_least / least
        if micros > least:
            changed = (new_least + (micros - least) * rate / new_rate) / micros
        product, stream = (
            target.limits(OperatorCall(kind))[1] / source.limits(OperatorCall(kind))[1]
            for kind in ("matrix product", "elementwise")
        )
        what = (
            f"took over {_FURTHEST:g} times longer or shorter than their shapes say"
            if work.known
            else "have no recorded operations or bytes"
        )
        error = max(error, abs(math.log(product / stream)) / 2)
        return changed, error, f"{what}: they change as kernels of their class do"
    guess, after = "", target.micros(work)
    if not work.tested or (work.kind in BY_LIBRARIES and item_bytes(work.type) != 2):
        error = max(error, _UNTESTED_ERROR)
        guess = (
            "are of operators or types of number that no pair of traces has tested: their uncertainty, "
            f"±{_UNTESTED_ERROR:.0%}, is a guess"
        )
    if work.kind in BY_LIBRARIES and work.shaped and source.vendor != target.vendor:
        return after / micros, error, guess
    # What the source took beyond or below its model the target takes too: as much if little but the launch
    # takes time, as with latencies, else in proportion to the work.
    launch = source.of(work.kind, "launch")
    share = (max(after - new_least, 0.0) + launch) / (max(before - least, 0.0) + launch)
    return max(after + (micros - before) * share, after / _FURTHEST) / micros, error, guess


@dataclass(frozen=True)
class Launchers:
    """The K kernels and copies of a run, ``nodes[K]``, ``kind[K]`` (index into ``CLASSES``), and the O
    operators that launched them: ``of[K]`` int64, ``work``: O entries. A memory copy, and a kernel without
    operator, is its own."""

    nodes: np.ndarray
    kind: np.ndarray
    of: np.ndarray
    work: list[OperatorCall]


def kernel_kinds(run: Run) -> np.ndarray:
    """Index into ``CLASSES`` of each node, by the operator that launched it or else its name; int64[N]."""
    return _classes(run, _launchers(run))


def launched_operators(run: Run) -> Launchers:
    """All device work of a run by operator. Convolutions use TF32 where the GPU has it, unless PyTorch is
    told otherwise; of matrix products, names of kernels tell.
    """
    launcher = _launchers(run)
    nodes = np.flatnonzero(run.on_devices)
    kind = _classes(run, launcher)[nodes]
    alone = (launcher[nodes] < 0) | (kind == _COPY)
    key = np.where(alone, nodes + len(run.graph), launcher[nodes])
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    of = of.reshape(-1)
    idle = np.bincount(of, _found_idle(run, nodes), len(first)) * 2 > np.bincount(of)
    is_set = run.named(_MEMSET.search)[nodes]
    counts = ~is_set | (np.bincount(of, ~is_set, len(first)) == 0)[of]  # not what a product clears first
    sums = [
        np.bincount(of, counts * run.graph.attribute(name, 0)[nodes].astype(float), len(first))
        for name in ("num_ops", "tensor_size")
    ]
    tf32, strided, straight, library, rows = (
        np.bincount(of, run.named(pattern.search)[nodes], len(first)) > 0
        for pattern in (_TF32, _STRIDED, _STRAIGHT, _CUDNN, _ROWS)
    )
    mixed = np.bincount(of, kind != kind[first][of], len(first)) > 0
    shapes = Shapes(run)
    work = []
    for at, k in enumerate(first.tolist()):
        of_kind = CLASSES[kind[k]]
        name = run.names[run.name_of[nodes[k] if alone[k] else launcher[nodes[k]]]]
        # Of another library's operator, tensors don't say what products or attention compute, what kernels
        # of several classes do, nor how much of a table of angles is read.
        foreign = not alone[k] and _OTHERS.search(name) and not rule_of(name)
        opaque = foreign and (of_kind in BY_LIBRARIES or mixed[at] or _ANGLES.search(name))
        found = OperatorCall(of_kind) if alone[k] or opaque else shapes.work(of_kind, int(launcher[nodes[k]]))
        # The attributes count the whole table, and of a list without shapes what an operator around it has.
        if not (found.known or opaque or found.kind == "gather" or name.endswith("::cat")):
            found = replace(found, operations=float(sums[0][at]), moved=float(sums[1][at]))
        if found.type == "float" and (tf32[at] or found.kind == "convolution"):
            found = replace(found, type="tf32")
        match = _CUTLASS.search(run.names[run.name_of[nodes[k]]])
        if match and found.kind == "matrix product":  # addresses aren't recorded, nor strides in some traces
            by = int(match[3]) * item_bytes(found.type)
            aligned = found.aligned if (by < 16) == (min(found.aligned) < 16) else (by,) * 3
            found = replace(found, aligned=aligned, along=(match[2] == "n", match[1] == "t"))
        if strided[at] or straight[at]:  # strides may not be recorded
            found = replace(found, strided=bool(strided[at]))
        if rows[at] and found.kind == "gather":
            found = replace(found, operations=0.0)
        if found.joins:
            match = _JOINED_TYPE.search(run.names[run.name_of[nodes[k]]])
            size = 2 if match is None else int(match[1]) if match[1] else item_bytes(match[2])
            found = replace(found, moved=2.0 * found.operations * size)
        tested = not _UNTESTED.search(name)
        work.append(replace(found, tested=tested, idle=bool(idle[at]), library=bool(library[at])))
    return Launchers(nodes, kind, of, work)


def _launchers(run: Run) -> np.ndarray:
    """The node of the operator that launched each node: the outermost one that is attention or a
    convolution, or else the innermost one; -1 for none; int64[N].
    """
    called = ["::" in name and not name.startswith("autograd::") for name in run.names]
    of_name = np.where(called, [_class(name) for name in run.names], -1)
    found = []
    nodes, kinds = map(run.graph.scatter, (np.arange(len(run.graph)), of_name[run.name_of]))
    for trace, node, kind in zip(run.graph.traces, nodes, kinds, strict=True):
        parent = np.where(trace.column("parent", -1) < 0, -1, parents(trace))
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
    of_kernel = np.array([CLASSES.index(kernel_class(name)) for name in run.names])
    known = launcher >= 0
    found = np.where(known, of_name[run.name_of[launcher]], of_kernel[run.name_of])
    # What another library's operator doesn't say its kernels may, without their templates' arguments.
    by_stem = np.array([_class(re.split(r"[<(]", name)[0], _KERNELS) for name in run.names])
    silent = known & run.named(_OTHERS.search)[launcher] & (found == _ELEMENTWISE)
    found[silent] = by_stem[run.name_of[silent]]
    copies = run.kind == KINDS.index("copy")
    is_set, within = run.named(_MEMSET.search), run.named(_WITHIN.search)
    within &= ~(known & run.named(_TO_HOST.search)[launcher])  # by AMD's tools small ones to the host too
    found[copies & ~is_set & ~within] = _COPY
    found[copies & is_set & ~known] = CLASSES.index("memset")
    found[copies & within & ~known] = CLASSES.index("copy")
    return np.asarray(found)


def kernel_class(name: str) -> str:
    """The one of ``CLASSES`` that a kernel is of by its own name, where its operator isn't known."""
    return CLASSES[_class(name, (*_KERNELS, *_CLASSES))]


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
