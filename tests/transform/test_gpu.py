"""Another GPU: which kernels belong to which operator, and what operators take."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import fit_gpus
from benchmarks.fit_gpus import Sample, class_errors, fit, fit_all, left_out, read_all
from benchmarks.gpu_priors import GPUS, PRIORS
from chakra_et.cost import gpus, operator_times
from chakra_et.cost.operator_times import CLASSES, GpuModel, OperatorCall, gpu_model
from chakra_et.et.columns import TensorInfo
from chakra_et.predict.predict import Prediction, predict
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.gpu import OtherGpu, kernel_kinds, launched_operators, on_target, resized_kernels
from chakra_et.transform.gpu_shapes import described
from tests.shared import shared_path
from tests.simulate.replay_traces import cpu, kernel, make_trace

A100, H100, MI300X = map(gpu_model, ("A100", "H100", "MI300X"))
ADD = OperatorCall("elementwise", operations=2e7, moved=335e6, idle=True)
PRODUCT = OperatorCall("matrix product", 2 * 4096**3, 3 * 2 * 4096**2, product=(1, 4096, 4096, 4096))


def run_of(nodes: list[dict], arguments: dict[int, tuple[list, str]] | None = None) -> Run:
    """The nodes as a run; ``arguments``: shapes and type of the tensors that operators (by id) are given."""
    trace = make_trace(*nodes)
    rows = [row for row, node in enumerate(nodes) if node["id"] in (arguments or {})]
    given = [(arguments or {})[nodes[row]["id"]] for row in rows]
    shapes = [json.dumps(shape).encode() for shape, _ in given]
    types = [json.dumps([f"Tensor({kind})"] * len(shape)).encode() for shape, kind in given]
    tensors = TensorInfo(np.array(rows, np.int64), [b"[]"] * len(rows), shapes, types)
    return make_run("gpu", [replace(trace, inputs=tensors)], [0])


def after(prediction: Prediction) -> list[float]:
    """µs of each node."""
    return (prediction.after.setting.own_ns / 1e3).tolist()


def two_operators() -> Run:
    """A product of two kernels and a memset, an addition, a kernel of its own and a copy to the host."""
    return run_of(
        [
            cpu(1, 1, name="ProfilerStep#1"),
            cpu(2, 1, (1,), name="aten::mm"),
            kernel(3, 200, (2,), kind="kernel", name="sm90_gemm", parent=2),
            kernel(4, 3, (3,), kind="memset", name="Memset (Device)", parent=2),
            kernel(5, 10, (4,), kind="kernel", name="splitKreduce", parent=2),
            cpu(6, 1, (2,), name="aten::add"),
            kernel(7, 250, (5,), kind="kernel", name="vectorized", parent=6),
            kernel(8, 9, (7,), kind="kernel", name="mine"),
            cpu(9, 1, (6,), name="aten::copy_"),
            kernel(
                10, 50, (8,), kind="memcpy", name="Memcpy DtoH (Device -> Pageable)", parent=9, num_ops=10
            ),
        ],
        {
            2: ([[4096, 4096], [4096, 4096]], "c10::BFloat16"),
            6: ([[8192, 8192], [8192, 8192]], "c10::BFloat16"),
            9: ([[10], [10]], "float"),
        },
    )


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    run = two_operators()
    kinds = [CLASSES[kind] for kind in kernel_kinds(run)]
    assert [kinds[at] for at in (2, 3, 4, 6, 7, 9)] == [
        *("matrix product",) * 3,
        "elementwise",
        "elementwise",
        "memory copy",
    ]
    found = launched_operators(run)
    assert len(found.work) == 4
    work = {each.kind: each for each in found.work if each.known}
    assert work["matrix product"].product == (1, 4096, 4096, 4096)
    assert work["elementwise"].moved == 3 * 2 * 8192**2


def test_a_library_s_operator_takes_what_the_other_library_s_does() -> None:
    before, changed = two_operators(), after(predict(two_operators(), [OtherGpu("H100", "MI300X")]))
    product = launched_operators(before).work[0]
    whole = MI300X.micros(product)
    assert changed[2] + changed[3] + changed[4] == pytest.approx(whole, rel=1e-3)
    assert changed[2] == pytest.approx(whole * 200 / 213, rel=1e-3)
    assert changed[9] == 50  # a copy to the host


def test_other_sizes_take_what_the_model_of_the_run_s_gpu_says() -> None:
    """Products as efficient as all of the run's are, other kernels as each was; nothing on a GPU that isn't
    known, and where the work isn't."""
    (trace,) = two_operators().graph.traces
    trace.metadata["device_name"] = "NVIDIA H100 80GB HBM3"
    assert trace.inputs is not None
    texts = [text.replace(b"4096", b"512").replace(b"8192", b"4096") for text in trace.inputs.shapes]
    smaller = resized_kernels(trace, replace(trace, inputs=replace(trace.inputs, shapes=texts)))
    product = OperatorCall("matrix product", 2 * 512**3, 3 * 2 * 512**2, product=(1, 512, 512, 512))
    own = 213 / H100.micros(launched_operators(two_operators()).work[0])
    assert smaller[2:5].sum() == pytest.approx(H100.micros(product) * own, rel=1e-3)
    adds = [OperatorCall("elementwise", size**2, 6 * size**2, idle=True) for size in (4096, 8192)]
    assert smaller[6] == pytest.approx(250 * H100.micros(adds[0]) / H100.micros(adds[1]), rel=0.03)
    assert np.isnan(smaller[[0, 1, 5, 7, 9]]).all()
    assert resized_kernels(trace, trace)[2:5].tolist() == [200, 3, 10]
    trace.metadata["device_name"] = "mine"
    assert np.isnan(resized_kernels(trace, trace)).all()


def test_pytorch_s_own_kernels_keep_their_efficiency() -> None:
    slow = on_target(ADD, 2 * H100.micros(ADD), H100, MI300X)[0]
    usual = on_target(ADD, H100.micros(ADD), H100, MI300X)[0]
    assert slow == pytest.approx(usual, rel=0.02)
    assert usual == pytest.approx(MI300X.micros(ADD) / H100.micros(ADD))


@pytest.mark.parametrize("factor", (0.01, 0.5, 1, 2, 100))
@pytest.mark.parametrize(
    "work", (ADD, PRODUCT, OperatorCall("elementwise", 100, 600), OperatorCall("gather"))
)
def test_the_same_gpu_is_no_change(work: OperatorCall, factor: float) -> None:
    micros = (H100.micros(work) if work.known else 3.0) * factor
    assert on_target(work, micros, H100, H100)[0] == pytest.approx(1)


def test_what_a_small_kernel_takes_longer_it_takes_on_the_other_gpu_too() -> None:
    """A latency doesn't grow with the launch, which takes MI300X longer."""
    tiny = OperatorCall("elementwise", 100, 600)
    assert on_target(tiny, H100.micros(tiny) + 1, H100, MI300X)[0] * (H100.micros(tiny) + 1) == pytest.approx(
        MI300X.micros(tiny) + 1, rel=0.01
    )


def test_a_gpu_of_the_vendor_and_back_is_no_change() -> None:
    there = predict(two_operators(), [OtherGpu("H100", "B200"), OtherGpu("B200", "H100")])
    assert after(there) == pytest.approx(after(predict(two_operators(), [])), rel=1e-3)
    assert any("B200" in note and "H100" in note for note in there.notes)
    assert any("no recorded operations" in note for note in there.notes)


def test_attention_counts_with_all_that_it_calls() -> None:
    """One vendor's library has one kernel for it, the other falls back to products and a softmax."""
    shape = [[2, 8, 256, 64]] * 3
    run = run_of(
        [
            cpu(1, 1, name="aten::scaled_dot_product_attention"),
            cpu(2, 1, (1,), name="aten::_scaled_dot_product_attention_math", parent=1),
            cpu(3, 1, (2,), name="aten::bmm", parent=2),
            kernel(4, 10, (3,), kind="kernel", name="gemm", parent=3),
            cpu(5, 1, (3,), name="aten::_softmax", parent=2),
            kernel(6, 8, (5,), kind="kernel", name="softmax_warp_forward", parent=5),
        ],
        {1: (shape, "c10::Half"), 3: ([[16, 256, 64], [16, 64, 256]], "c10::Half")},
    )
    found = launched_operators(run)
    assert [CLASSES[kind] for kind in found.kind] == ["attention", "attention"]
    (work,) = found.work
    assert (work.batch, work.queries, work.keys) == (16, 256, 256)
    assert sum(after(predict(run, [OtherGpu("H100", "MI300X")]))[at] for at in (3, 5)) == pytest.approx(
        MI300X.micros(work), rel=1e-3
    )


def test_kernels_in_a_queue_take_longer_on_amd_than_on_an_idle_gpu() -> None:
    tiny = OperatorCall("elementwise", 100, 600)
    idle = replace(tiny, idle=True)
    assert MI300X.micros(tiny) > 1.5 * MI300X.micros(idle)
    assert H100.micros(tiny) == pytest.approx(H100.micros(idle), rel=0.1)


def test_rows_that_are_not_aligned_make_products_slow() -> None:
    odd = replace(PRODUCT, product=(16, 4095, 4095, 64), operations=2 * 16 * 4095**2 * 64, moved=5.4e8)
    odd, even = replace(odd, aligned=(16, 16, 2)), odd
    assert H100.micros(odd) > 2 * H100.micros(even)
    assert H100.micros(even) < H100.micros(replace(odd, aligned=(16, 16, 4))) < H100.micros(odd)
    single = [replace(work, type="float") for work in (odd, even)]
    assert H100.micros(single[0]) == H100.micros(single[1])


def test_odd_rows_that_lie_along_k_are_loaded_in_more_lines() -> None:
    """A warp's loads lie in 8 rows instead of 4 lines; more tiles than two per multiprocessor take a further
    round of two.
    """
    odd = OperatorCall("matrix product", 1, 1, product=(66, 256, 128, 4096), aligned=(2, 16, 16), idle=True)
    across, along = (H100.micros(replace(odd, along=(each, each))) for each in (False, True))
    assert 1.5 < along / across < 2
    times = [H100.micros(replace(odd, product=(batch, 128, 128, 4096))) for batch in (265, 397, 529)]
    assert times[0] == pytest.approx(times[1], rel=0.03) and times[2] > 1.4 * times[1]


def test_copies_past_the_registers_take_as_long_in_both_directions() -> None:
    """TF32 has kernels for rows at multiples of 16 and of 4 bytes, none for 8."""
    odd = OperatorCall("matrix product", 1, 1, product=(1, 4096, 4096, 4096), type="tf32", idle=True)
    times = [
        A100.micros(replace(odd, aligned=(aligned,) * 3, along=(along, along)))
        for aligned in (4, 8)
        for along in (False, True)
    ]
    assert times == pytest.approx([times[0]] * 4)
    assert times[0] > 1.3 * A100.micros(odd)


def test_the_name_of_a_kernel_tells_how_its_matrices_lie() -> None:
    """Strides may not be recorded, and addresses never are."""
    name = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align1>(Params)"
    shapes = [[8192, 512], [512, 8192]]
    run = run_of(
        [cpu(1, 1, name="aten::mm"), kernel(2, 1251, (1,), kind="kernel", name=name, parent=1)],
        {1: (shapes, "float")},
    )
    (work,) = launched_operators(run).work
    assert (work.type, work.aligned, work.along) == ("tf32", (4, 4, 4), (False, False))


def test_cat_of_one_large_tensor_has_half_of_an_nvidia_gpu() -> None:
    """PyTorch gives each tensor of the list as many blocks there, whatever its size."""
    even = OperatorCall("copy", 4e7, 1.6e8, joins=20_000_000, idle=True)
    uneven = replace(even, joins=39_999_000)
    assert H100.micros(uneven) > 1.8 * H100.micros(even)
    assert MI300X.micros(uneven) == MI300X.micros(even)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_scaled_dot_product_attention_view_3", "elementwise"),
        ("triton_red_fused_native_layer_norm_0", "reduction"),
        ("triton_tem_fused_mm_1", "matrix product"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "matrix product"),
        ("fused_moe_kernel", "matrix product"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "elementwise"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "elementwise"),
        ("a_kernel_of_my_own", "elementwise"),
    ],
)
def test_kernels_without_an_operator_are_classed_by_name(name: str, kind: str) -> None:
    run = run_of([cpu(1, 1, name="step"), kernel(2, 50, (1,), kind="kernel", name=name)])
    (found,) = launched_operators(run).kind
    assert CLASSES[found] == kind
    made = predict(run, [OtherGpu("MI300X", "H100")])
    assert any(note.startswith("1 kernels (0.050 ms) have no recorded operations") for note in made.notes)
    ((doubt, _),) = made.after.setting.doubts
    assert doubt[1] > 0.25 * made.after.setting.own_ns[1]


def product_of(micros: int, kind: str = "c10::BFloat16", name: str = "aten::mm") -> Run:
    return run_of(
        [
            cpu(1, 1, name=name),
            kernel(2, micros, (1,), kind="kernel", name="gemm", parent=1),
            kernel(3, 3, (2,), kind="memset", name="Memset (Device)", parent=1),
        ],
        {1: ([[4096, 4096], [4096, 4096]], kind)},
    )


@pytest.mark.parametrize(
    ("run", "warning", "least"),
    [
        (product_of(200), "", 0.1),
        (product_of(9_000), "2 kernels (9.003 ms) took over 8 times longer", 0.25),
        (product_of(2_500, "float"), "2 kernels (2.503 ms) are of operators or types of number", 0.3),
        (product_of(200, name="my::mm"), "2 kernels (0.203 ms) are of operators or types", 0.3),
    ],
)
def test_what_is_guessed_is_a_warning_and_less_certain(run: Run, warning: str, least: float) -> None:
    made = predict(run, [OtherGpu("H100", "MI300X")])
    assert any(note.startswith(warning) for note in made.notes if "--gpu" not in note) == bool(warning)
    ((doubt, _),) = made.after.setting.doubts
    share = doubt[1] / made.after.setting.own_ns[1]
    assert least <= share + 1e-3 and (least > 0.1) == (share > 0.2)


def test_what_a_kernel_clears_first_is_not_its_work() -> None:
    """Without shapes, the bytes of a memset alone made a convolution known, as one of the launch's time."""
    nodes = [
        cpu(1, 1, name="aten::convolution_backward"),
        kernel(2, 2, (1,), kind="memset", name="Memset (Device)", parent=1) | {"tensor_size": 1_480_000},
        kernel(3, 400, (2,), kind="kernel", name="dgrad", parent=1),
    ]
    (work,) = launched_operators(run_of(nodes)).work
    assert not work.known
    (alone,) = launched_operators(run_of([nodes[1] | {"parent": None, "deps": ()}])).work
    assert alone.moved == 1_480_000


def test_kernels_of_another_library_s_operator_are_classed_by_name_where_it_says_nothing() -> None:
    """Templates' arguments don't count, and an operator's tensors don't say what several classes work on."""
    names = ("bmm_Bfloat16_E2m1", "void fbgemm_gpu::sort<int>", "void finalize<cutlass::half_t>")
    nodes = [kernel(at, 90, (1,), kind="kernel", name=name, parent=1) for at, name in enumerate(names, 2)]
    shapes = {1: ([[888, 3072], [888, 128]], "c10::BFloat16")}
    found = launched_operators(run_of([cpu(1, 1, name="vllm::moe_forward"), *nodes], shapes))
    assert [CLASSES[kind] for kind in found.kind] == ["matrix product", "elementwise", "elementwise"]
    assert not found.work[0].known
    own = launched_operators(run_of([cpu(1, 1, name="aten::mul"), *nodes[:1]], shapes))
    assert CLASSES[own.kind[0]] == "elementwise" and own.work[0].known


def test_tensors_without_recorded_shapes_are_not_joined_by_the_work_of_an_operator_around() -> None:
    """By its attributes, a concatenation in an A100's trace moved 10 TB/s."""
    moved = {"num_ops": 200_000_000, "tensor_size": 1_600_000_000}
    known = []
    for name in ("aten::cat", "aten::copy_"):
        nodes = [cpu(1, 1, name=name), kernel(2, 156, (1,), kind="kernel", name="Copy", parent=1) | moved]
        (work,) = launched_operators(run_of(nodes)).work
        known.append(work.known)
    assert known == [False, True]


def test_one_matrix_that_is_not_aligned_slows_cublas_more_than_amd_s_libraries() -> None:
    """cuBLAS has no kernels of mixed alignment."""
    result, all_three = (
        OperatorCall("matrix product", 1, 1, product=(1, 4096, 4095, 512), aligned=aligned)
        for aligned in ((16, 16, 2), (2, 2, 2))
    )
    assert H100.micros(result) == H100.micros(all_three)
    assert MI300X.micros(result) < 0.6 * MI300X.micros(all_three)


def test_tensors_that_do_not_lie_in_one_piece_are_copied_slowly() -> None:
    straight = OperatorCall("copy", 2e7, 8e7, idle=True)
    strided = replace(straight, strided=True)
    for model in (H100, MI300X):
        assert model.micros(strided) > 1.2 * model.micros(straight)
        assert model.micros(replace(strided, apart=4096)) > 2 * model.micros(strided)
        assert model.micros(replace(strided, apart=2)) < 1.2 * model.micros(strided)


def test_a_gpu_that_is_like_another_has_its_clock() -> None:
    slower = 1830 / 1410
    assert gpu_model("A100").of("elementwise", "launch") == pytest.approx(
        slower * H100.of("elementwise", "launch")
    )
    assert gpu_model("A100").of("strided", "elements") == pytest.approx(
        H100.of("strided", "elements") / slower
    )
    assert gpu_model("A100").of("elementwise", "memory") == H100.of("elementwise", "memory")


def test_attention_of_few_blocks_waits_for_its_keys() -> None:
    """Until each unit has a block, more heads cost nothing; four blocks each take longer than one."""
    few, more, full = (
        OperatorCall("attention", 4.0 * heads * 2048 * 2048 * 64, 1, batch=heads, queries=2048, keys=2048)
        for heads in (1, 8, 33)
    )
    assert H100.micros(few) == H100.micros(more) < 0.7 * H100.micros(full)
    assert H100.micros(replace(full, masked=True)) > 1.3 * H100.micros(full)


@pytest.mark.parametrize(
    ("gpu", "kind", "rate"),
    [
        ("H100", "float", 67e12),
        ("H100", "tf32", 495e12),
        ("H100", "c10::Half", 989e12),
        ("H100", "Float8_e4m3fn", 1979e12),
        ("MI300X", "tf32", 163.4e12),
        ("V100", "tf32", 15.7e12),
        ("A100", "Float8_e4m3fn", 312e12),
    ],
)
def test_the_type_of_numbers_decides_the_peak(gpu: str, kind: str, rate: float) -> None:
    assert gpu_model(gpu).peak(kind) == rate


def test_every_gpu_of_the_table_has_what_the_model_needs() -> None:
    for name in gpus.names():
        model = gpu_model(name)
        assert set(model.parameters) == set(PRIORS), name
        for kind in CLASSES:
            if kind != "memory copy":
                assert model.micros(dataclasses.replace(ADD, kind=kind)) > 0, (name, kind)


def trace_of(model: operator_times.GpuModel, sizes: list[float]) -> list[Sample]:
    works = [OperatorCall("elementwise", size / 6, size, idle=True) for size in sizes]
    return [Sample(work, model.micros(work), 3) for work in works]


def test_the_fit_finds_what_a_gpu_s_kernels_reach() -> None:
    sizes = np.geomspace(1e4, 1e9, 12).tolist()
    truth = gpu_model("MI300X", dict(MI300X.parameters) | {"elementwise.memory": 0.6})
    found = fit("MI300X", [trace_of(truth, sizes)] * 20)  # enough to outweigh the prior of 0.78
    assert found.parameters["elementwise.memory"] == pytest.approx(0.6, rel=0.03)
    assert found.parameters["attention.keys"] == pytest.approx(PRIORS["attention.keys"][1], rel=1e-3)


def test_a_model_left_out_is_judged_by_the_others() -> None:
    models = dict(zip(GPUS, (H100, MI300X), strict=True))
    pairs = {
        name: {gpu: trace_of(model, [1e6 * scale, 1e8 * scale]) for gpu, model in models.items()}
        for name, scale in (("small", 1), ("large", 10))
    }
    fits = fit_all({"large": pairs["large"]}, [])
    ((kind, share, error),) = class_errors(pairs["small"], fits, *GPUS)
    assert (kind, share) == ("elementwise", 1.0) and abs(error) < 0.1


@pytest.mark.slow
def test_models_left_out_are_within_two_deviations() -> None:
    """What is said of its error holds for each public model when the fit hasn't seen it."""
    public = shared_path("data/traces/public", "pairs", *fit_gpus.OTHERS)
    known = operator_times.ERRORS
    rows = [row for row in left_out(*read_all(public)) if row.share >= 0.02]
    assert len({row.model for row in rows}) >= 3
    assert [row for row in rows if abs(np.log1p(row.error)) > 2 * known[row.kind] + 0.01] == []


def test_a_fused_kernel_of_another_library_reaches_half_of_the_peak() -> None:
    """As FlashAttention does in its forward pass; the backward pass is slower."""
    work = OperatorCall("attention", 4.0 * 64 * 8192**2 * 128, 1, batch=64, queries=8192, keys=8192, size=128)
    share = work.operations / (H100.micros(replace(work, tested=False)) * H100.peak(work.type) / 1e6)
    assert 0.45 < share < 0.8


def test_a_convolution_launches_a_kernel_for_each_pass() -> None:
    later = replace(H100, parameters={**H100.parameters, "convolution.launch": 100.0}, seen={})
    for passes in (1, 2, 4):
        work = OperatorCall("convolution", 1e9, 1.0, product=(passes, 512, 64, 64), channels=64, idle=True)
        more = later.micros(work) - H100.micros(work)
        assert more == pytest.approx(passes * (100 - H100.of("convolution", "launch")))
    forward = OperatorCall("convolution", 2.0 * 4096**2 * 512, 1.0, product=(1, 4096, 4096, 512), channels=64)
    assert 1 < H100.micros(forward) * H100.peak(forward.type) / 1e6 / forward.operations < 5


@pytest.mark.parametrize("model", [H100, MI300X], ids=["H100", "MI300X"])
@pytest.mark.parametrize("sizes", [(4096, 4096, 512), (490, 512, 4608)])
def test_both_passes_of_a_backward_convolution_are_counted_once(
    model: GpuModel, sizes: tuple[int, int, int]
) -> None:
    """They were counted twice, as a batch of two products and times two."""
    one, both = (
        OperatorCall("convolution", passes * 1e9, 1.0, product=(passes, *sizes), channels=64, idle=True)
        for passes in (1, 2)
    )
    assert model.micros(both) == pytest.approx(2 * model.micros(one))


def test_rows_of_a_long_softmax_end_with_loads_of_single_elements() -> None:
    without = replace(H100, parameters={**H100.parameters, "softmax_long.odd": 0.0}, seen={})
    # Blocks of 512 threads load 4 elements each, and then one each.
    for row, loads in ((8192, 4), (10_000, 4 + 4)):
        more = H100.of("softmax_long", "odd") * (loads * 4 * 512 / row - 1)
        again, other = (model._read_again("softmax_long", row, 4) for model in (H100, without))
        assert again / other == pytest.approx(1 + more)


def test_rows_of_a_long_softmax_stay_in_the_cache_that_a_unit_can_use() -> None:
    """Of an L2 in two parts, half."""
    whole = replace(H100, kernels=replace(H100.kernels, gpu=replace(H100.gpu, parts=1)), seen={})
    again = [model._read_again("softmax_long", 8192, 4) for model in (whole, H100)]
    assert H100.gpu.parts == 2 and again[0] < again[1]


def test_rows_are_normalized_by_elements_that_are_read_and_written() -> None:
    slow = replace(H100, parameters={**H100.parameters, "normalization.elements": 1.0}, seen={})
    work = OperatorCall("normalization", 1e6, 4e6, row=1024, idle=True)
    least = H100.of("normalization", "launch") + H100.of("normalization", "row")
    assert slow.micros(work) == pytest.approx(1e6 / H100.gpu.units + least)


def test_short_rows_are_normalized_as_many_at_a_time_as_a_gpu_has_blocks() -> None:
    at_once = H100.gpu.units * 2048 // 128
    one, ten = (
        H100.micros(OperatorCall("normalization", rows * 8, rows * 32, row=8, idle=True))
        for rows in (at_once, 10 * at_once)
    )
    assert ten - one == pytest.approx(9 * H100.of("normalization", "row"), rel=0.05)


def test_the_backward_pass_of_a_layer_norm_is_a_multiple_of_its_forward_pass() -> None:
    """22.6 and 10.6 µs for 4096 rows of 768 in a trace of an H200; three tensors in place of two."""
    model, row = gpu_model("H200"), b"[4096,768]"
    calls = [
        described("normalization", f"aten::native_layer_norm{way}", b"[]", b"[%b]" % b",".join(shapes), types)
        for way, shapes, types in (
            ("", [row], b'["Tensor(c10::BFloat16)"]'),
            ("_backward", [row, row], b'["Tensor(c10::BFloat16)","Tensor(c10::BFloat16)"]'),
        )
    ]
    assert [call.backward for call in calls] == [False, True] and {call.row for call in calls} == {768}
    for call, micros in zip(calls, (10.6, 22.6), strict=True):
        assert model.micros(call) == pytest.approx(micros, rel=0.12)


def test_few_bytes_move_faster_as_they_are_in_the_cache() -> None:
    few, many = (OperatorCall("copy", moved / 4, moved, idle=True) for moved in (4e6, 4e9))
    rates = [work.moved / (H100.micros(work) - H100.of("copy", "launch")) for work in (few, many)]
    assert rates[0] / rates[1] == pytest.approx(H100.of("cache", "speedup"))
