"""The log parsers on the lines of the formats, on written logs, and on files that are being written."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lm.logs import records
from tests.megatron_lm import written_logs
from tests.megatron_lm.written_logs import SPEC_LINES

TIMER_NAMES = [
    "forward-backward", "forward-compute", "post-process", "loss-compute", "backward-compute",
    "batch-generator", "forward-recv", "forward-send", "backward-recv", "backward-send",
    "forward-send-forward-recv", "forward-send-backward-recv", "backward-send-forward-recv",
    "backward-send-backward-recv", "forward-backward-send-forward-backward-recv",
    "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-all-reduce",
    "grads-reduce-scatter", "params-all-gather", "optimizer-inner-step", "optimizer",
]  # fmt: skip
whole = st.integers(0, 10**6)
seconds = st.integers(1, 10**8).map(lambda tenths: tenths / 10 / 1000)
times = st.lists(st.integers(0, 10**9).map(lambda us: 1.7e9 + us / 1e6), max_size=6)
iterations = st.builds(
    records.Iteration,
    number=whole,
    total=whole,
    seconds=seconds,
    learning_rate=st.sampled_from([0.0, 7.031e-07, 1.5e-4]),
    global_batch_size=st.integers(1, 10**5),
    loss=st.none() | st.integers(0, 10**7).map(lambda n: float(f"{n / 1e6:.6E}")),
    grad_norm=st.none() | st.integers(0, 10**6).map(lambda n: n / 1000),
    skipped=st.integers(0, 9),
)
sizes = st.integers(0, 2**50).map(lambda size: size / 2**20)
memories = st.builds(records.Memory, whole, whole, sizes, sizes, sizes, sizes)
gpu_lines = st.builds(
    records.Gpu,
    index=st.integers(0, 63),
    name=st.sampled_from(
        ["NVIDIA A10", "NVIDIA A100-SXM4-40GB", "Tesla V100", "NVIDIA H100 80GB HBM3 | odd"]
    ),
    celsius=st.none() | st.integers(-5, 120),
    percent=st.none() | st.integers(0, 100),
    used=st.none() | st.integers(0, 10**6),
    total=st.none() | st.integers(0, 10**6),
)


def test_the_lines_of_the_format() -> None:
    data = SPEC_LINES.encode()
    assert records.settings(data) == {"NODE_RANK": "1", "PARTITION": "0-11-8-8-8-8-5-0"}
    assert records.iterations(data) == [
        records.Iteration(30, 50, pytest.approx(1.4238), 7.031e-07, 64, 10.17721, 16.666, 0)
    ]
    assert records.memory(data) == [records.Memory(24, 20, 3035.10107421875, 3869.255859375, 4020.0, 4020.0)]
    assert records.gpu_samples(data[data.index(b"[0]") :].splitlines()[0] + b"\n") == {
        0: [records.Gpu(0, "NVIDIA A10", 49, 0, 0, 22731)]
    }
    found = records.timers(data)
    assert found.keys() == {(0, "forward-compute")}
    np.testing.assert_array_equal(found[0, "forward-compute"].start, [1686726501.12, 1686726501.15])
    np.testing.assert_array_equal(found[0, "forward-compute"].end, [1686726501.14, 1686726501.17])


def test_the_gpu_line_is_written_as_the_format_has_it() -> None:
    line = next(line for line in SPEC_LINES.splitlines() if line.startswith("[0]"))
    assert written_logs.gpu_line(records.parse_gpu(line)) == line


@given(st.lists(iterations), st.lists(memories))
def test_iterations_and_memory_come_back(
    written: list[records.Iteration], used: list[records.Memory]
) -> None:
    text = "".join(map(written_logs.iteration_line, written)) + "".join(map(written_logs.memory_line, used))
    found = records.iterations(text.encode())
    assert [(it.number, it.loss, it.grad_norm, it.skipped) for it in found] == [
        (it.number, it.loss, it.grad_norm, it.skipped) for it in written
    ]
    assert [it.seconds for it in found] == pytest.approx([it.seconds for it in written])
    assert records.memory(text.encode()) == used


@given(gpu_lines)
def test_gpu_lines_come_back(gpu: records.Gpu) -> None:
    assert records.parse_gpu(written_logs.gpu_line(gpu)) == gpu


@given(
    st.dictionaries(
        st.integers(0, 1100),
        st.dictionaries(
            st.sampled_from(TIMER_NAMES), times.map(lambda t: (t, [x + 0.5 for x in t])), min_size=1
        ),
        min_size=1,
        max_size=4,
    )
)
def test_timers_come_back(written: dict[int, dict[str, tuple[list[float], list[float]]]]) -> None:
    """Every rank's block, with names that are the end or the beginning of others."""
    data = "".join(written_logs.timer_block(rank, of_rank) for rank, of_rank in written.items()).encode()
    found = records.timers(data)
    assert found.keys() == {(rank, name) for rank, of_rank in written.items() for name in of_rank}
    for rank, of_rank in written.items():
        for name, (starts, ends) in of_rank.items():
            np.testing.assert_allclose(found[rank, name].start, starts, rtol=0, atol=1e-6)
            np.testing.assert_allclose(found[rank, name].end, ends, rtol=0, atol=1e-6)


@given(st.integers(0, len(SPEC_LINES)))
def test_a_file_cut_anywhere_gives_a_part_of_the_whole(cut: int) -> None:
    whole_file, part = SPEC_LINES.encode(), SPEC_LINES.encode()[:cut]
    part = part[: part.rfind(b"\n") + 1]  # what read() does
    assert records.settings(part).items() <= records.settings(whole_file).items()
    assert records.iterations(part) in ([], records.iterations(whole_file))
    assert records.memory(part) in ([], records.memory(whole_file))
    for key, lists in records.timers(part).items():
        assert len(lists.start) == len(lists.end) in (0, 2) and key == (0, "forward-compute")


@given(st.text(string.printable), st.binary())
def test_any_text_is_read_without_a_complaint(text: str, data: bytes) -> None:
    for content in (text.encode() + b"\n", data + b"\n"):
        records.settings(content), records.iterations(content), records.memory(content)
        records.timers(content), records.gpu_samples(content)


def test_a_half_written_last_line_does_not_count(tmp_path) -> None:
    line = written_logs.iteration_line(written_logs.simple_iteration(7))
    path = tmp_path / "n1.out"
    path.write_text(line + line.replace(" 7/", " 8/")[:-1])
    assert [it.number for it in records.iterations(records.read(path))] == [7]
    path.write_text(path.read_text() + "\n")
    assert [it.number for it in records.iterations(records.read(path))] == [7, 8]
    assert records.read(tmp_path / "none.out") == b""


def test_a_name_is_not_the_end_of_another() -> None:
    lists = {name: ([1.0 + i], [2.0 + i]) for i, name in enumerate(TIMER_NAMES)}
    found = records.timers(written_logs.timer_block(3, lists).encode())
    assert found[3, "forward-recv"].start == [1.0 + TIMER_NAMES.index("forward-recv")]
    assert list(found) == [(3, name) for name in TIMER_NAMES]


def test_a_run_that_was_stopped_between_start_and_end_keeps_its_pairs() -> None:
    block = written_logs.timer_block(0, {"optimizer": ([1.0], [2.0])})
    data = (
        block.rsplit("\n", 2)[0] + "\n" + written_logs.timer_block(0, {"optimizer": ([5.0], [6.0])})
    ).encode()
    lists = records.timers(data)[0, "optimizer"]
    assert (lists.start.tolist(), lists.end.tolist()) == ([5.0], [6.0])


def test_settings_are_those_of_the_last_launch() -> None:
    text = "WARNING: x\nNODE_RANK: 0\nMODEL: small\nNOTE\nNODE_RANK: 0\nMODEL: xl\nEMPTY: \nlater\nINFO: x\n"
    assert records.settings(text.encode()) == {"NODE_RANK": "0", "MODEL": "xl", "EMPTY": ""}


def test_samples_of_a_gpu_log_keep_their_second() -> None:
    gpu = records.Gpu(0, "NVIDIA A10", 40, 5, 10, 22731)
    two = [gpu, records.Gpu(1, "NVIDIA A10", 41, 6, 11, 22731)]
    data = "".join(written_logs.gpu_line(gpu) + "\n" for _ in range(100) for gpu in two).encode()
    assert records.gpu_samples(data) == {second: two for second in range(100)}
    assert list(records.gpu_samples(data, count=10)) == list(range(0, 100, 10))
    assert records.gpu_samples(b"no GPU: NVML Shared Library Not Found\n") == {}
