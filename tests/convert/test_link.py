"""Matching host nodes and events: by id, or by thread, order and name without ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.graph import link
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from tests.generator import Features, Layout, generate
from tests.generator.hand_made import annotation, node, op, write_device, write_host


def link_of(
    folder: Path, events: list[dict], nodes: list[dict]
) -> tuple[np.ndarray, list[tuple[str, str]], float]:
    """The link, (event, its host node) by name with "" for none, and the rate."""
    host = host_trace.load(write_host(folder, nodes))
    device = device_trace.load(write_device(folder, events))
    found = link.link(host, device)
    pairs = [
        (device.names[device.name[row]], host.names[host.name[at]] + f" {host.rf_id[at]}" if at >= 0 else "")
        for row, at in enumerate(found.tolist())
    ]
    return found, pairs, link.rate_of(host, found)


def test_by_record_function_id(tmp_path: Path) -> None:
    events = [
        annotation("step", 0, 9, 2),
        op("aten::mm", 1, 2, 3),
        op("aten::mm", 4, 2, 4),
        op("alone", 7, 1, 99),
    ]
    nodes = [node("aten::mm", 4), node("aten::mm", 3), node("step", 2), node("never seen", 50)]
    found, pairs, rate = link_of(tmp_path, events, nodes)
    assert pairs == [
        ("step", "step 2"),
        ("aten::mm", "aten::mm 3"),
        ("aten::mm", "aten::mm 4"),
        ("alone", ""),
    ]
    assert rate == 0.75


def test_structure_and_group_record_need_no_event(tmp_path: Path) -> None:
    nodes = [node("## process_group:init ##", 1, ["[]"]), node("aten::mm", 3)]
    assert link_of(tmp_path, [op("aten::mm", 1, 1, 3)], nodes)[2] == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_by_order_finds_the_same_as_by_id(seed: int, tmp_path: Path) -> None:
    features = Features(seed=seed, autograd_thread=True, nccl=("allreduce",), steps=2, worker_thread=True)
    made = generate(features)
    host, device = map(
        lambda load, path: load(path), (host_trace.load, device_trace.load), made.write(tmp_path)
    )
    by_id = link.link(host, device)
    device.rf_id[:] = -1
    by_order = link.link(host, device)
    assert (by_order == by_id).all()


def test_by_order_over_gaps_on_both_sides(tmp_path: Path) -> None:
    """DLRM's traces lack an inner _local_scalar_dense; profiles begin in the middle of an operator."""
    names = [f"aten::op{n % 7}" for n in range(60)]
    events = [op(name, n, 0.5) for n, name in enumerate(names) if n not in (20, 21, 40)]
    nodes = [node(name, n + 5) for n, name in enumerate(names) if n not in (10, 33)]
    found, pairs, _ = link_of(tmp_path, events, nodes)
    linked = {(a, b) for a, b in pairs if b}
    assert all(b.startswith(a + " ") for a, b in linked)
    assert sum(bool(b) for _, b in pairs) == 55
    right = sum(
        b == f"{names[n]} {n + 5}"
        for n, (_, b) in zip([n for n in range(60) if n not in (20, 21, 40)], pairs, strict=True)
    )
    assert right == 55


def test_threads_are_paired_by_their_operators(tmp_path: Path) -> None:
    forward, backward = [f"f{n}" for n in range(9)], [f"b{n}" for n in range(5)]
    events = [op(name, n, 1, tid=900) for n, name in enumerate(backward)]
    events += [op(name, n, 1, tid=100) for n, name in enumerate(forward)]
    nodes = [node(name, n + 1, tid=1) for n, name in enumerate(forward)]
    nodes += [node(name, n + 20, tid=2) for n, name in enumerate(backward)]
    _, pairs, rate = link_of(tmp_path, events, nodes)
    assert rate == 1.0 and all(b.startswith(a + " ") for a, b in pairs)


def test_nothing_in_common(tmp_path: Path) -> None:
    found, pairs, rate = link_of(tmp_path, [op("a", 0, 1)], [node("b", 3)])
    assert rate == 0.0 and pairs == [("a", "")]


@pytest.mark.parametrize("host", ("1.0.1", "1.1.1"))
def test_all_operators_of_a_generated_pair_are_linked(host: str, tmp_path: Path) -> None:
    made = generate(Features(seed=2, steps=3, autograd_thread=True), Layout(host=host))
    loaded = host_trace.load(made.write(tmp_path)[0])
    found = link.link(loaded, device_trace.load(made.write(tmp_path)[1]))
    assert link.rate_of(loaded, found) == 1.0
