"""ATTENTION=flash: the same attention as by its formula, in a kernel that keeps no scores."""

from __future__ import annotations

import pytest

from megatron_lm.settings import Settings

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")

from megatron_lm.engine import model  # noqa: E402

SEQUENCE, BATCH, HEADS, WIDTH = 48, 2, 4, 8


def by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    key, value = (each.repeat_interleave(HEADS // each.shape[2], 2) for each in (key, value))
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) / WIDTH**0.5
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("bhij,jbhd->ibhd", weights, value).flatten(2)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_fused_attention_has_the_values_and_gradients_of_the_formula(groups: int) -> None:
    torch.manual_seed(1)
    given = [torch.randn(SEQUENCE, BATCH, heads, WIDTH) for heads in (HEADS, groups, groups)]
    kept: list[torch.Tensor] = []
    found = []
    for compute in (model.FusedAttention(None), by_formula):
        inputs = [each.clone().requires_grad_() for each in given]
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda e: e):
            output = compute(*inputs)
        if compute is not by_formula:
            # Not even one head's scores, nor keys repeated for each query.
            assert max(each.numel() for each in kept) <= SEQUENCE * BATCH * HEADS * WIDTH
            assert sum(each.numel() for each in kept) < 1.5 * sum(map(torch.numel, [*inputs, output]))
        (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
        found.append([output.detach(), *(each.grad for each in inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_setting_chooses_the_attention_of_every_layer() -> None:
    """It was unfused whatever had been planned."""
    for setting, fused in (("flash", True), ("unfused", False)):
        chosen = model.layer_spec(Settings(attention=setting)).submodules.self_attention.submodules
        assert (chosen.core_attention is model.FusedAttention) is fused
