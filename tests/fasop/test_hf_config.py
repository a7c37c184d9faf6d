"""Models from ``config.json``: as many parameters as transformers builds, to the last one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasop.__main__ import main
from fasop.errors import PlanError
from fasop.exact.memory import held_parameters
from fasop.inputs.models import find_model

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
