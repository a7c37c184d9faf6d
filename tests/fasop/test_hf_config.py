"""Models from ``config.json``: as many parameters as transformers builds, to the last one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.cost.gpus import gpu
from fasop.__main__ import main
from fasop.errors import PlanError
from fasop.exact.kernels import Moved, unit_work
from fasop.exact.memory import activations, held_parameters
from fasop.exact.recipes import _attention
from fasop.inputs.models import Model, find_model
from fasop.plans.options import Options

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
SIZES |= {"vocab_size": 1000, "max_position_embeddings": 128}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 32}
LATENT = SIZES | {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2}
LATENT |= {"num_experts_per_tok": 2, "topk_group": 1, "num_key_value_heads": 4}
T5 = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 3, "num_heads": 4, "vocab_size": 1000}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    ("llama", SIZES | {"tie_word_embeddings": True}),
    ("mistral", GROUPED),
    ("mixtral", GROUPED | {"num_local_experts": 4}),
    ("qwen2", SIZES | {"num_key_value_heads": 2}),
    ("qwen3", GROUPED),
    ("qwen3_moe", GROUPED | {"num_experts": 8, "moe_intermediate_size": 48, "mlp_only_layers": [1]}),
    ("gemma", GROUPED),
    ("gemma2", GROUPED),
    ("gemma3_text", GROUPED),
    ("gpt_oss", GROUPED | {"num_local_experts": 4}),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", LATENT | {"q_lora_rank": 24, "n_shared_experts": 1}),
    ("gpt_neox", SIZES),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 128}),
    ("opt", SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("opt", SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False}),
    ("opt", SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("gpt_oss", GROUPED | {"num_local_experts": 6, "attention_bias": False}),
    ("bert", SIZES),
    ("bert", SIZES | {"tie_word_embeddings": False}),
    ("t5", T5),
    ("t5", T5 | {"num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("kind", "settings"), CONFIGS, ids=[kind for kind, _ in CONFIGS])
def test_a_model_has_as_many_parameters_as_its_own_code_makes(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    of = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}.get(kind, "AutoModelForCausalLM")
    with torch.device("meta"):
        built = getattr(transformers, of).from_config(config)
    config.save_pretrained(tmp_path)
    model = find_model(str(tmp_path))
    assert model.parameters == sum(each.numel() for each in built.parameters())
    held, of_experts = held_parameters(model, 1, 1, np.sum)
    assert held == pytest.approx(model.parameters, rel=1e-9), "the planner's memory holds all of them"
    assert 0.1 * held < held - of_experts <= held
    halves = held_parameters(model, 2, 1, np.sum)[0]
    assert 0.49 < halves / model.parameters < 0.52


def test_what_of_a_config_is_left_out_is_said(tmp_path: Path) -> None:
    """Images of a Gemma 3 or Qwen-VL went without a word; Qwen 2.5 turns the windows off that it names."""

    def model(config: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return find_model(str(tmp_path))

    plain = model({"model_type": "qwen2", **GROUPED, "sliding_window": 64, "use_sliding_window": False})
    assert plain.remark == ""
    nested = model({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **GROUPED}})
    assert nested.remark == "its text alone" and nested.parameters == plain.parameters
    latent = LATENT | {"q_lora_rank": 24, "n_shared_experts": 1}
    kimi = model({"model_type": "kimi_k2", **latent, "num_nextn_predict_layers": 1})
    assert kimi.remark == "without its MTP modules" and kimi.kinds == "EFTTP"
    assert kimi.parameters == model({"model_type": "deepseek_v3", **latent}).parameters
    experts = {"num_experts": 8, "moe_intermediate_size": 48}
    middle = model({"model_type": "qwen3_moe", **GROUPED, **experts, "mlp_only_layers": [1]})
    assert middle.remark.startswith("qwen3_moe: computed with 1 layers without experts") and not middle.dense


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {}), ("gemma3_text", {}), ("gpt_oss", {"num_local_experts": 4}), ("mistral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 64}), ("qwen3", {}),
    ],
)  # fmt: skip
def test_windows_and_caps_are_those_of_transformers(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Windows were whole sequences but for GPT-OSS's; Gemma's caps were neither counted nor noted."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **GROUPED | {"num_hidden_layers": 8} | more)
    kept = config.to_dict()
    types = kept.get("layer_types") or ["sliding_attention"] * 8  # Mistral's
    for given in (kept, {**kept, "layer_types": None}):  # as published before and since there are types
        (tmp_path / "config.json").write_text(json.dumps(given))
        model = find_model(str(tmp_path))
        assert model.windowed == types.count("sliding_attention")
        assert model.window == (config.sliding_window if model.windowed else 0)
        assert model.capped_scores == model.capped_logits == (kind == "gemma2")
        assert model.post_norm == kind.startswith("gemma")
        assert ("cap of its scores" in model.remark) == (kind == "gemma2")


@pytest.mark.parametrize("window", [1, 128, 129, 1000, 2048, 5000])
def test_a_window_costs_the_tiles_that_it_touches(window: int) -> None:
    """Against the mask itself: of 3 layers, 2 see the window."""
    model = Model("m", 512, 2048, 3, 1000, 4, 8, window=window, windowed=2)
    at = np.arange(2048)
    mask = (at[:, None] >= at) & (at[:, None] - at < window)
    tiles = mask.reshape(16, 128, 16, 128).any(axis=(1, 3)).sum()
    whole, seen = (_attention(gpu("H100"), each, 1, 1)[0] for each in (replace(model, window=0), model))
    assert seen / whole == pytest.approx((1 + 2 * tiles / 136) / 3)


def test_caps_and_second_norms_are_counted() -> None:
    """Each of a cap's steps goes over the logits, and over the scores of attention that isn't fused."""
    plain = Model("m", 512, 128, 3, 1024, 4, 8)
    gemma = replace(plain, capped_scores=True, capped_logits=True, post_norm=True)

    def more(kind: str, options: Options) -> list[float]:
        works = (unit_work(model, kind, 1, 1, options) for model in (gemma, plain))
        with_caps, without = (
            [sum(k.numbers for k in way if isinstance(k, Moved)) for way in work[:2]] for work in works
        )
        return [a - b for a, b in zip(with_caps, without, strict=True)]

    flash, tokens = Options(attention="flash"), 128
    assert more("P", flash) == [6 * tokens * 1024, 7 * tokens * 1024]
    assert more("T", flash) == [2 * 2 * tokens * 512, 2 * 4 * tokens * 512]
    assert more("T", Options()) == [
        2 * 2 * tokens * 512 + 6 * 4 * tokens**2,
        2 * 4 * tokens * 512 + 7 * 4 * tokens**2,
    ]
    sizes = [activations(model, 1, 1, Options(), "none").sum(axis=0)[1:] for model in (gemma, plain)]
    kept = 2 * 2 * tokens * 512 + 2 * 4 * tokens**2
    assert (sizes[0] - sizes[1]).tolist() == [kept] * 3 + [2 * tokens * 1024]


def test_experts_of_chosen_groups_are_on_fewer_ranks(tmp_path: Path) -> None:
    """A token of DeepSeek-V3 chooses 4 of 8 groups: of 8 ranks those 4, of 64 ranks 32."""
    config = LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 24, "n_routed_experts": 256}
    config |= {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_model(str(tmp_path))
    assert (model.groups, model.near) == (8, 4)
    free = replace(model, groups=0, near=0)
    for ranks, near in ((2, 2), (8, 4), (64, 32)):
        assert model.receivers(ranks) == pytest.approx(near * (1 - (1 - 1 / near) ** 8))
        assert model.receivers(ranks) <= free.receivers(ranks)


def test_a_config_is_planned_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **GROUPED}))
    argv = ["plan", "--model", str(folder / "config.json"), "--cluster", "paper-gpt2xl", "--seq", "64"]
    assert main([*argv, "--global-batch", "32"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Tiny-Llama (257,472 parameters, 3 layers of 64, sequences of 64, 32 per step)")
    # A file of another name was called by its folder, too.
    (folder / "config.json").rename(named := tmp_path / "tiny.json")
    assert find_model(str(named)).name == "tiny"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a model's config.json"),
        ('{"model_type": "mamba"}', "model_type is 'mamba', which can't be planned"),
        ('{"model_type": {"a": 1}}', "model_type is .*, which can't be planned"),
        ('{"model_type": "llama", "text_config": 5}', "lacks hidden_size"),
        ('{"model_type": "llama", "hidden_size": 64}', "lacks num_hidden_layers"),
    ],
)
def test_what_is_no_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        find_model(str(tmp_path))
