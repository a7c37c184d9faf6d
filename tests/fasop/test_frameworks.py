"""Plans as settings of other frameworks, read back by the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import json
import runpy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import fasop
from fasop.commands import plan as plan_command
from fasop.errors import PlanError
from fasop.output import frameworks
from fasop.output.frameworks import exported
from fasop.plans.options import Options
from fasop.plans.plan import Plan, plans_json
from megatron_lm import plan_settings


@pytest.fixture(scope="module")
def plan() -> Plan:
    flags: dict[str, Any] = {"tp": 4, "pp": 2, "mbs": 1, "cp": 2, "precision": "fp8", "fsdp": True}
    (found, *_) = fasop.plan("llama3-8b", "32xH100", top=1, idle=False, **flags)
    return replace(found, partition=(17, 17))


def test_each_framework_gets_the_plan_in_its_own_words(plan: Plan) -> None:
    bridge = yaml.safe_load(exported(plan, "megatron-bridge"))
    assert (
        bridge["model"]["tensor_model_parallel_size"] == 4 and bridge["model"]["context_parallel_size"] == 2
    )
    assert bridge["ddp"]["data_parallel_sharding_strategy"] == "optim_grads_params"
    assert bridge["ddp"]["use_megatron_fsdp"] and bridge["model"]["seq_length"] == 8192
    assert bridge["mixed_precision"] == "bf16_with_fp8_current_scaling_mixed"
    assert bridge["train"] == {"micro_batch_size": 1, "global_batch_size": 512}
    text = exported(plan, "torchtitan")
    assert "[parallelism]\ndata_parallel_replicate_degree = 1\ndata_parallel_shard_degree = 2\n" in text
    assert 'converters = ["quantize.linear.float8"]' in text and 'recipe_name = "tensorwise"' in text
    assert '["layers.16", "layers.17"' in text and "pipeline_parallel_degree = 2" in text
    options = replace(plan.options, precision="mixed", zero=1)
    plain = replace(plan, model=replace(plan.model, cp=1), options=options)
    found = json.loads(exported(plain, "deepspeed"))
    assert found["zero_optimization"]["stage"] == 1 and found["bf16"]["enabled"]
    replicas = plain.dp * found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert replicas == found["train_batch_size"]


@pytest.mark.parametrize(
    ("framework", "changes", "words"),
    [
        ("deepspeed", {"options": Options()}, "has no --cp"),
        ("deepspeed", {}, "nor stages with --zero 2"),
        ("deepspeed", {"partition": (20, 14)}, "as many layers in each stage"),
        ("torchtitan", {"options": Options(cuda_graphs=True)}, "makes no CUDA graph"),
        ("torchtitan", {"options": Options(recompute="full", recomputed=0.5)}, "again, or none"),
        ("megatron-bridge", {"options": Options(recompute="full", recomputed=0.3)}, "one whole number"),
        ("megatron-bridge", {"options": Options(precision="fp8 rows")}, "has no fp8 rows"),
        ("torchtitan", {"options": Options(precision="fp8 blocks")}, "has no fp8 blocks"),
        ("megatron-bridge", {"options": Options(precision="fp32")}, "has no fp32"),
        ("megatron-bridge", {"is_oom": True}, "runs out of memory"),
        ("torchtitan", {"options": Options(adapters=True)}, "LoRA.s adapters have settings of their own"),
    ],
)
def test_what_a_framework_cannot_run_is_refused(
    plan: Plan, framework: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        exported(replace(plan, **changes), framework)


def test_stages_of_their_own_sizes_and_chunks_are_exported(plan: Plan) -> None:
    """torchtitan's own rule would have given other layers to the stages, also where all have as many."""
    plain = replace(plan, partition=(20, 14), virtual_stages=2, options=Options(zero=1))
    layout = yaml.safe_load(exported(plain, "megatron-bridge"))["model"]["pipeline_model_parallel_layout"]
    assert [part.count("t") for part in layout.split("|")] == [10, 7, 9, 6]
    assert layout[0] == "E" and layout[-1] == "L"
    (line,) = [line for line in exported(plain, "torchtitan").splitlines() if "module_fqns" in line]
    parts = json.loads(line.partition(" = ")[2])
    assert [len(part) for part in parts] == [11, 7, 9, 8]
    assert parts[0][0] == "tok_embeddings" and parts[-1][-2:] == ["norm", "output"]
    assert sum(parts, [])[1:-2] == [f"layers.{at}" for at in range(32)]


def test_fp8_by_rows_and_blocks_is_exported_where_it_is_known(plan: Plan) -> None:
    """Both were refused everywhere: torchtitan's recipe ``rowwise``, Megatron-Bridge's subchannel scaling."""
    by_rows = replace(plan, options=replace(plan.options, precision="fp8 rows"))
    text = exported(by_rows, "torchtitan")
    assert 'converters = ["quantize.linear.float8"]' in text and 'recipe_name = "rowwise"' in text
    assert "enable_fsdp_float8_all_gather" not in text  # which needs one scale for all of a tensor
    blocks = replace(plan, options=replace(plan.options, precision="fp8 blocks"))
    settings = yaml.safe_load(exported(blocks, "megatron-bridge"))
    assert settings["mixed_precision"] == "bf16_with_fp8_subchannel_scaling_mixed"


def test_parts_of_a_step_are_exported_to_megatron_bridge(plan: Plan) -> None:
    """Shares of the layers that are computed again, and graphs of layers or attention, were refused."""
    some = replace(plan.options, recompute="full", recomputed=0.5, cuda_graphs="attention")
    model = yaml.safe_load(exported(replace(plan, options=some), "megatron-bridge"))["model"]
    assert (model["recompute_method"], model["recompute_num_layers"]) == ("block", 8)  # of a stage's 16
    assert (model["cuda_graph_impl"], model["cuda_graph_scope"]) == ("transformer_engine", ["attn"])
    whole = replace(some, recomputed=1.0, cuda_graphs="layer")
    model = yaml.safe_load(exported(replace(plan, options=whole), "megatron-bridge"))["model"]
    assert (model["recompute_method"], model["recompute_num_layers"]) == ("uniform", 1)
    assert (model["cuda_graph_impl"], model["cuda_graph_scope"]) == ("transformer_engine", [])
    routed = replace(plan, ep=2, options=replace(whole, fast_dispatch=True))
    assert yaml.safe_load(exported(routed, "megatron-bridge"))["model"]["moe_token_dispatcher_type"] == "flex"
    assert "# not in this file: which kernels dispatch tokens" in exported(routed, "megatron-bridge")


def test_what_is_not_in_the_file_is_named(plan: Plan) -> None:
    assert "# not in this file: times, which are those of --engine megatron" in exported(plan, "torchtitan")
    assert "not in this file" not in exported(plan, "megatron-bridge")
    options = replace(plan.options, precision="mixed", recompute="full")
    assert not frameworks.not_exported(plan, "megatron-bridge")
    left = frameworks.not_exported(replace(plan, options=options), "deepspeed")
    assert "recomputation full" in left and "flash attention" in left


def test_the_command_writes_the_file(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plans.json").write_text(plans_json([plan]))
    out = tmp_path / "plan.toml"
    words = [str(tmp_path / "plans.json"), "--format", "torchtitan", "--output", str(out)]
    assert plan_settings.main(words) == 0 and "[training]" in out.read_text()


def test_torchtitan_knows_every_setting(plan: Plan) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python before 3.11 reads no TOML")
    package = importlib.util.find_spec("torchtitan")
    file = Path((package and package.origin) or "none").with_name("config") / "job_config.py"
    if not file.exists():
        pytest.skip("torchtitan 0.2 isn't installed")
    # The file alone: the package needs Triton.
    whole = runpy.run_path(str(file))["JobConfig"]()
    for section, values in tomllib.loads(exported(plan, "torchtitan")).items():
        known = getattr(whole, section)
        assert is_dataclass(known) and set(values) <= {each.name for each in fields(known)}, section


def test_deepspeed_reads_its_settings(plan: Plan) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed isn't installed")
    options = replace(plan.options, precision="mixed", zero=1)
    plain = replace(plan, model=replace(plan.model, cp=1), options=options)
    settings = json.loads(exported(plain, "deepspeed"))
    runtime.DeepSpeedConfig(settings | {"train_batch_size": settings["train_batch_size"] // plain.dp})


def test_a_plan_that_flags_would_make_much_faster_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-8b", "--cluster", "8xH100", "--tp", "2", "--top", "1", "--global-batch", "64"]
    assert plan_command.main([*words, "--recipe", "plain", "--recompute", "full"]) == 0
    out = capsys.readouterr().out
    assert "With --attention flash" in out and "the same layout would take" in out
    assert plan_command.main([*words, "--recompute", "full", "--precision", "fp8", "--fsdp"]) == 0
    assert "the same layout would take" not in capsys.readouterr().out
