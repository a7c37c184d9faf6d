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
