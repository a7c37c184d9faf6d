"""Operations of an operator, from the shapes of its tensors."""

from __future__ import annotations

import json

import pytest

from chakra_et.cost.operator_work import operator_work


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((2, 8, 100, 64), (2, 8, 300, 64)),
        ((3, 8, 100, 64), (3, 2, 300, 64)),  # heads that share keys
        ((2, 100, 8, 64), (2, 300, 8, 64)),
        ((2, 100, 8, 64), (2, 300, 2, 64)),
        ((3, 8, 1, 64), (3, 8, 300, 64)),  # one new token
    ],
)
def test_attention_has_its_heads_in_front_of_the_tokens_or_behind(
    queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    shapes = json.dumps([queries, keys, keys]).encode()
    types = json.dumps(["Tensor(c10::BFloat16)"] * 3).encode()
    found = operator_work("aten::scaled_dot_product_attention", b"[]", shapes, types, b"[]", b"[]")
    batch, heads, tokens = queries[0], 8, queries[1] * queries[2] // 8
    assert found is not None and found[0] == 4 * batch * heads * tokens * 300 * 64


def counted(name: str, shapes: list, types: list, results: int = 1) -> tuple[int, int] | None:
    """With as many results as said, which are as large as the first argument."""
    given = [], shapes, types, shapes[:results], types[:results]
    return operator_work(name, *(json.dumps(part).encode() for part in given))


def test_optimizers_work_on_lists_of_tensors() -> None:
    """As the observer writes them: ``_foreach_addcdiv_`` reads three lists and writes the first."""
    shapes, of = [[10, 4], [6]], "GenericList[Tensor(c10::BFloat16),Tensor(c10::BFloat16)]"
    given = [shapes, shapes, shapes, [[], []]], [of, of, of, "GenericList[Double,Double]"]
    assert counted("aten::_foreach_addcdiv_", *given, results=0) == (46, 4 * 46 * 2)
    assert counted("aten::_foreach_sqrt", [shapes], [of]) == (46, 2 * 46 * 2)


def test_what_is_only_written_is_not_read() -> None:
    shapes, types = [[8, 4], [8, 4], []], ["Tensor(float)", "Tensor(c10::BFloat16)", "Bool"]
    assert counted("aten::copy_", shapes, types) == (32, 32 * (4 + 2))
    assert counted("aten::add_", shapes, types) == (32, 32 * (4 + 4 + 2))
    assert counted("aten::fill_", [[8, 4], []], ["Tensor(float)", "Int"]) == (32, 32 * 4)
