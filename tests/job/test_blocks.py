"""Which block each node is in, from nodes that are written down one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chakra_et.errors import TraceError
from chakra_et.et.columns import Strings
from chakra_et.job.blocks import _unit, find_blocks
from chakra_et.job.operators import ENGINE, Operators, operators_of
from tests.simulate.replay_traces import cpu, kernel, make_trace

BLOCK = ("aten::norm", "aten::mm", "aten::gelu", "aten::add")


def model(names: tuple[str, ...], last: int, modules: tuple[str, ...] = ()) -> Operators:
    """A forward pass of operators ``names`` on one thread, with kernels of the first one and of ``last``, and
    their backward operators on another thread; ``aten::empty`` is in no phase."""
    nodes = []
    for at, name in enumerate(names):
        more = {"module": modules[at]} if modules else {}
        more |= {} if name == "aten::empty" else {"phase": "forward"}
        nodes.append(cpu(at + 1, 5, name=name, kind="operator", lane=0, seq_id=at, start=at, **more))
    for at, number in enumerate(reversed(range(len(names)))):
        name, start = f"{ENGINE}: {names[number]}", 50 + at
        nodes.append(
            cpu(51 + at, 5, name=name, kind="operator", phase="backward", lane=1, seq_id=number, start=start)
        )
    nodes += [
        kernel(101 + at, 5, (at,), parent=at, kind="kernel", lane=2, start=100 + at) for at in (1, last)
    ]
    return operators_of(make_trace(*nodes), "made")


def shown(operators: Operators) -> list[list[tuple[int, int]]]:
    """(pass, block) of the forward operators, the backward operators and the kernels."""
    found = find_blocks({0: operators}, "made")[0]
    pairs = list(zip(found.group.tolist(), found.block.tolist(), strict=True))
    count = (len(pairs) - 2) // 2
    return [pairs[:count], pairs[count:-2], pairs[-2:]]


def test_the_last_block_ends_with_its_thread() -> None:
    """And the shortest sequence that repeats is a block, not two of them."""
    forward, backward, kernels = shown(model(BLOCK * 4, 16))
    assert forward == [(0, block) for block in range(4) for _ in BLOCK]
    assert backward == [(1, block) for block in reversed(range(4)) for _ in BLOCK]
    assert kernels == [(0, 0), (0, 3)]


def test_what_lies_around_the_blocks_is_in_none() -> None:
    names = ("aten::embedding", "aten::dropout", *BLOCK * 2, "aten::linear", "aten::nll_loss")
    forward, backward, kernels = shown(model(names, 10))
    outside = [(-1, -1)] * 2
    assert forward == [*outside, *[(0, 0)] * 4, *[(0, 1)] * 4, *outside]
    assert backward == [*outside, *[(1, 1)] * 4, *[(1, 0)] * 4, *outside]
    assert kernels == [(-1, -1), (0, 1)]


def test_a_thread_that_begins_the_backward_pass_by_itself_is_in_no_block() -> None:
    """An operator that the autograd engine doesn't run, such as one of a hook."""
    trace = model(BLOCK * 2, 8).trace
    hook = np.flatnonzero(trace.column("lane") == 1)[0]
    names = [trace.names[row] for row in range(len(trace))]
    table = list(dict.fromkeys([*names, "aten::ones_like"]))
    names[hook] = "aten::ones_like"
    index = np.array([table.index(name) for name in names], np.int32)
    changed = replace(trace, names=Strings([name.encode() for name in table], index))
    found = find_blocks({0: operators_of(changed, "made")}, "made")[0]
    assert (found.group[hook], found.block[hook]) == (-1, -1)


@pytest.mark.parametrize("behind", [("GPT_0",), ()])
def test_blocks_are_modules_of_one_class_where_these_are_known(behind: tuple[str, ...]) -> None:
    paths = "GPT_0", *(f"GPT_0/Block_{at // 2}" for at in range(4)), *behind
    forward, backward, _ = shown(model(tuple("abcdef")[: len(paths)], len(paths), paths))
    outside = [(-1, -1)] * len(behind)
    assert forward == [(-1, -1), (0, 0), (0, 0), (0, 1), (0, 1), *outside]
    assert backward == [*outside, (1, 1), (1, 1), (1, 0), (1, 0), (-1, -1)]


@pytest.mark.parametrize("names", [BLOCK, (*BLOCK, "aten::tanh", *BLOCK), BLOCK[:3] * 2])
def test_what_does_not_repeat_one_after_the_other_is_no_block(names: tuple[str, ...]) -> None:
    with pytest.raises(TraceError, match="made: no repeated blocks were recognised on rank 0"):
        find_blocks({0: model(names, 1)}, "made")


def test_of_blocks_that_other_operators_part_the_longest_row_counts() -> None:
    found = find_blocks({0: model((*BLOCK * 2, "aten::tanh", *BLOCK * 3), 1)}, "made")[0]
    assert found.held == 3
    assert found.block[:21].tolist() == [-1] * 9 + [0] * 4 + [1] * 4 + [2] * 4


def test_an_operator_of_no_phase_parts_no_blocks() -> None:
    """As the seed that each checkpoint keeps."""
    forward, _, _ = shown(model(("aten::empty", *BLOCK) * 3, 1))
    assert forward == [(-1, -1), *[(0, 0)] * 5, *[(0, 1)] * 5, *[(0, 2)] * 4]


def test_of_two_passes_that_repeat_as_much_the_first_shows_the_block() -> None:
    other = ("aten::conv1d", *BLOCK[1:])
    assert _unit([BLOCK * 2, other * 2]) == BLOCK and _unit([other * 2, BLOCK * 2]) == other
