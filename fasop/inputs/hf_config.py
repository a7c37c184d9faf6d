"""Models from Hugging Face's ``config.json``: their sizes, and their exact count of parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fasop.errors import PlanError
from fasop.inputs.read_files import DATA, read_json

SEQUENCES, LONGEST = 512, 8192  # of a step, and tokens of one, where nothing else is said


class _Family(NamedTuple):
    """How a ``model_type`` differs from a Llama: biases of queries, keys and values (q), of the output (o),
    of the feed-forward part (m); settings that turn biases on, and whether they do where nothing is said;
    norms per layer, of queries and keys too, with biases; learned positions more than the setting says (-1:
    none); whether embedding and head are one; whole: every how many layers one sees no window (0: none does).
    """

    biases: str = ""
    flags: Mapping[str, str] = {"attention_bias": "qo", "mlp_bias": "m"}
    biased: bool = False
    norms: int = 2
    qk_norm: bool = False
    layer_norm: bool = False
    gated: bool = True
    positions: int = -1
    tied: bool = False
    causal: bool = True
    whole: int = 0


_TABLE = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
FAMILIES = {kind: _Family(**settings) for kind, settings in _TABLE["families"].items()}
ALIKE, NAMES = _TABLE["alike"], _TABLE["names"]


def read_config(path: Path) -> dict[str, Any]:
    """The settings of ``Model`` of a ``config.json``. Raises ``PlanError``."""
    config = read_json(path, dict[str, Any], "a model's config.json", "give the file as published")
    inner = config.get("text_config")
    found = model_sizes({**config, **(inner if isinstance(inner, dict) else {})}, str(path))
    left = ["its text alone"] * bool(config.keys() & {"text_config", "vision_config", "audio_config"})
    left += ["without its MTP modules"] * bool(config.get("num_nextn_predict_layers"))
    return found | {"remark": "; ".join([*left, *filter(None, [found.get("remark")])])}


def model_sizes(config: Mapping[str, Any], file: str) -> dict[str, Any]:
    """``read_config`` of settings that were read from ``file``."""
    given = str(config.get("model_type"))
    kind = ALIKE.get(given, given)
    if kind not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *ALIKE]))
        raise PlanError(f"{file}: model_type is {given!r}, which can't be planned: use one of {known}.")
    if given == "deepseek_v3":  # as transformers has it where nothing is said
        config = {"n_group": 8, "topk_group": 4, **config}
    try:
        return _sizes({**config, "model_type": kind}, FAMILIES[kind])
    except KeyError as error:
        raise PlanError(f"{file}: lacks {error.args[0]}: give a whole config.json.") from None
    except (TypeError, ZeroDivisionError) as error:
        raise PlanError(f"{file}: a setting has no plausible value ({error}).") from None


def _get(config: Mapping[str, Any], name: str, *default: Any) -> Any:
    """A setting by any of its names; null counts as left out."""
    for each in (name, *NAMES.get(name, ())):
        if config.get(each) is not None:
            return config[each]
    if default:
        return default[0]
    raise KeyError(name)


def _sizes(config: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    kind = config["model_type"]
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    h, layers, heads = (_get(config, name) for name in needed)
    vocab, tied = _get(config, "vocab_size"), _get(config, "tie_word_embeddings", family.tied)
    kv = _get(config, "num_key_value_heads", heads)
    size = _get(config, "head_dim", h // heads)
    ffn, experts = _get(config, "intermediate_size", 4 * h), _get(config, "num_experts", 0)
    biases = family.biases + "".join(
        b for flag, b in family.flags.items() if _get(config, flag, family.biased)
    )
    gated = family.gated or "gated" in str(config.get("feed_forward_proj"))
    norm = h * (2 if family.layer_norm else 1)

    attention = h * size * (heads + 2 * kv) + heads * size * h
    attention += ("q" in biases) * size * (heads + 2 * kv) + ("o" in biases) * h + family.qk_norm * 2 * size
    found: dict[str, Any] = {}
    if "kv_lora_rank" in config:
        attention, size = _latent(config, h, heads)
        kv = heads
        found = {"kv_rank": config["kv_lora_rank"], "q_rank": config.get("q_lora_rank") or 0}
        found |= {"rope": config["qk_rope_head_dim"], "v_width": config["v_head_dim"]}
    matrices = 3 if gated else 2

    def feed(width: int) -> int:
        return int(matrices * h * width + ("m" in biases) * ((matrices - 1) * width + h))

    routed, dense, shared, width = 0, layers, 0, ffn
    if experts:
        width = config.get("moe_intermediate_size") or ffn
        shared = width * (config.get("n_shared_experts") or 0)
        step, only = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        first = config.get("first_k_dense_replace") or 0
        sparse = [at for at in range(layers) if at >= first and (at + 1) % step == 0 and at not in only]
        dense = layers - len(sparse)
        routed = experts * matrices * h * width + h * experts + (feed(shared) if shared else 0)
        if kind == "gpt_oss":
            routed += experts * (2 * width + h) + experts
            attention += heads  # sinks
    total = layers * (attention + family.norms * norm) + dense * feed(ffn) + (layers - dense) * routed
    total += vocab * h * (1 if tied else 2) + norm
    if family.positions >= 0:
        total += h * (_get(config, "max_position_embeddings") + family.positions)
    if kind == "bert":
        # With the head for masked words.
        total += h * config.get("type_vocab_size", 2) + h * h + h + norm + vocab * (1 if tied else 2)
    if kind == "opt":  # may have narrower embeddings, projected to the layers and back
        narrow = config.get("word_embed_proj_dim") or h
        total += (narrow != h) * (vocab * (narrow - h) * (1 if tied else 2) + 2 * narrow * h)
        total -= norm * (not config.get("do_layer_norm_before", True))
    if kind == "t5":
        decoder = _get(config, "num_decoder_layers", layers)
        total += decoder * (2 * attention + feed(ffn) + 3 * norm) + norm
        total += 2 * heads * config.get("relative_attention_num_buckets", 32)
        found["encoder_layers"] = layers
        layers += decoder
    found |= {"hidden": h, "layers": layers, "heads": heads, "vocab": vocab, "kv_heads": kv % heads and kv}
    found |= {"d_kv": size, "ffn": width, "gated": gated, "tied": bool(tied), "causal": family.causal}
    found |= {"qk_norm": True} if family.qk_norm else {}
    found |= {"post_norm": True} if family.norms == 4 else {}
    found |= {"capped_scores": True} if config.get("attn_logit_softcapping") else {}
    found |= {"capped_logits": True} if config.get("final_logit_softcapping") else {}
    if windowed := _windowed(config, family, layers):
        found |= {"window": config["sliding_window"], "windowed": windowed}
    if experts:
        found |= {"experts": experts, "top_k": _get(config, "num_experts_per_tok", 2), "shared_ffn": shared}
        if (groups := config.get("n_group") or 1) > 1:
            found |= {"groups": groups, "near": config.get("topk_group") or groups}
        if dense and sparse == [*range(dense, layers)]:
            found |= {"dense": dense, "dense_ffn": ffn}
    if kind == "gpt_oss":
        found["stepwise"] = True
    remarks = [f"{dense} layers without experts as those with them"] * bool(
        experts and dense and "dense" not in found
    )
    remarks += ["fused attention as if the cap of its scores took no time"] * ("capped_scores" in found)
    if remarks:
        found["remark"] = f"{kind}: computed with {', '.join(remarks)}"
    seq = min(_get(config, "max_position_embeddings", LONGEST), LONGEST)
    return found | {"seq": seq, "global_batch": SEQUENCES, "parameters": total}


def _windowed(config: Mapping[str, Any], family: _Family, layers: int) -> int:
    """Layers that attend to a sliding window only, as transformers has it."""
    default = not config["model_type"].startswith("qwen")
    if not config.get("sliding_window") or not config.get("use_sliding_window", default):
        return 0
    if types := config.get("layer_types"):
        return list(types).count("sliding_attention")
    if family.whole:
        return layers - layers // config.get("sliding_window_pattern", family.whole)
    return layers - min(config.get("max_window_layers", 0), layers)  # Qwen's first ones see all


def _latent(config: Mapping[str, Any], h: int, heads: int) -> tuple[int, int]:
    """Parameters of multi-head latent attention (DeepSeek-V2), and the width of a head of queries."""
    rope, nope, value = (int(config[f"{name}_head_dim"]) for name in ("qk_rope", "qk_nope", "v"))
    rank, of_queries = config["kv_lora_rank"], config.get("q_lora_rank")
    queries = (of_queries * (h + 1) if of_queries else 0) + (of_queries or h) * heads * (nope + rope)
    keys = h * (rank + rope) + rank * (1 + heads * (nope + value))
    bias = (of_queries or 0) + rank + rope + h if config.get("attention_bias") else 0
    return queries + keys + heads * value * h + bias, nope + rope
