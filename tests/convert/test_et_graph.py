"""The dependency graph of possibly invalid files, compared with brute force on small random graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_et.et.columns import ExecutionTrace, Ragged
from chakra_et.et.edges import (
    edges_of,
    find_cycle,
    repeated,
    rows_of,
    topological_order,
)
from tests.simulate.replay_traces import cpu, make_trace


@st.composite
def graphs(draw: st.DrawFn) -> ExecutionTrace:
    count = draw(st.integers(1, 8))
    ids = draw(
        st.lists(st.integers(0, 12) | st.integers(0, 2**63), min_size=count, max_size=count, unique=True)
    )
    known = st.sampled_from(ids)
    forward = draw(st.booleans())
    nodes = []
    for at, node in enumerate(ids):
        choice = st.sampled_from(ids[:at]) if forward and at else known
        size = 0 if forward and not at else 3
        deps = draw(st.lists(choice, max_size=size))
        ctrl = draw(st.lists(choice, max_size=size - 2 if size else 0))
        nodes.append(cpu(node, 1, tuple(deps), ctrl=tuple(ctrl), start=draw(st.integers(0, 5))))
    return make_trace(*draw(st.permutations(nodes)))


def links(trace: ExecutionTrace) -> set[tuple[int, int]]:
    """(parent, child) rows."""
    row = {int(node): at for at, node in enumerate(trace.ids)}
    found = set()
    for deps in (trace.data_deps, trace.ctrl_deps):
        for child in range(len(trace)):
            for node in deps.values[deps.offsets[child] : deps.offsets[child + 1]].tolist():
                found.add((row[node], child))
    return found


def has_cycle(trace: ExecutionTrace) -> bool:
    """Takes away nodes without parents until none is left, or none can be taken."""
    left, pairs = set(range(len(trace))), links(trace)
    while left:
        free = {row for row in left if not any(child == row and parent in left for parent, child in pairs)}
        if not free:
            return True
        left -= free
    return False


@settings(max_examples=200, deadline=None)
@given(trace=graphs())
def test_reported_cycle_is_a_cycle(trace: ExecutionTrace) -> None:
    pairs = list(links(trace))
    parent, child = np.array(pairs, np.int64).reshape(-1, 2).T
    cycle = find_cycle(len(trace), parent, child)
    assert bool(cycle) == has_cycle(trace)
    if cycle:
        assert len(set(cycle)) == len(cycle)
        assert cycle[0] == min(cycle)
        assert all(pair in pairs for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True))


@given(lists=st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=5))
def test_lists_with_a_repeated_id(lists: list[list[int]]) -> None:
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in lists], dtype=np.int64)))
    values = np.array([value for each in lists for value in each], np.uint64)
    expected = [row for row, each in enumerate(lists) if len(set(each)) < len(each)]
    assert repeated(Ragged(offsets, values)).tolist() == expected


ids = st.lists(st.integers(0, 20) | st.integers(2**64 - 20, 2**64 - 1), max_size=8)


@given(have=ids, wanted=ids)
def test_the_last_node_of_an_id_is_found(have: list[int], wanted: list[int]) -> None:
    rows = {node: at for at, node in enumerate(have)}
    found = rows_of(np.array(have, np.uint64), np.array(wanted, np.uint64))
    assert found.tolist() == [rows.get(node, -1) for node in wanted]


def test_a_chain_of_two_million_nodes_needs_no_recursion() -> None:
    """Against the order of ids, rows and start times, so that it must be sorted node by node."""
    count = 2_000_000
    number = np.arange(count, dtype=np.uint64)
    even_first = np.concatenate((number[::2], number[1::2]))
    trace = make_trace(cpu(0, 1))
    trace.ids, trace.start_micros = even_first, number[::-1].copy()
    trace.types = np.full(count, 4, np.uint8)
    trace.data_deps = Ragged(np.arange(count + 1), (even_first + np.uint64(1)) % np.uint64(count))
    trace.ctrl_deps = Ragged(np.zeros(count + 1, np.int64), number[:0])
    edges = edges_of(trace)
    assert len(find_cycle(count, edges.parent, edges.child)) == count
    kept = even_first != 7
    assert find_cycle(count, edges.parent[kept], edges.child[kept]) == []


def test_a_long_chain_with_shuffled_ids() -> None:
    nodes = 500_000
    shuffled = np.random.default_rng(1).permutation(nodes)
    assert topological_order(nodes, shuffled[:-1], shuffled[1:]) == shuffled.tolist()
    closed = np.append(shuffled[:-1], shuffled[-1]), np.append(shuffled[1:], shuffled[0])
    assert topological_order(nodes, *closed) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_order_agrees_with_a_slow_search(seed: int) -> None:
    draw = random.Random(seed)
    nodes = draw.randint(1, 9)
    edges = [(draw.randrange(nodes), draw.randrange(nodes)) for _ in range(draw.randint(0, 9))]
    reach = {(a, b) for a, b in edges}
    for _ in range(nodes):
        reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
    source, target = (np.array([edge[side] for edge in edges], dtype=np.int64) for side in (0, 1))
    order = topological_order(nodes, source, target)
    assert order == [node for node in order if (node, node) not in reach]
    assert (len(order) == nodes) == all(a != b for a, b in reach)
    assert all(order.index(a) < order.index(b) for a, b in edges if a in order and b in order)
