"""Parameters shared within groups of ranks that each have a copy (HSDP), and optimizers on the host."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fasop
from fasop.errors import PlanError
from fasop.exact.communication import Communication
from fasop.exact.estimate import Estimate, estimate
from fasop.exact.memory import GIB, MEMORY_MARGIN, parameters, state_bytes
from fasop.exact.passes import Passes
from fasop.exact.recipes import HOST_LINK, HOST_MEMORY
from fasop.exact.training_runs import layout_of
from fasop.exact.unit_times import Compute
from fasop.inputs.clusters import of_gpus
from fasop.inputs.models import find_model
from fasop.output.frameworks import exported
from fasop.plans.options import Options
from fasop.plans.shapes import Part, first

MODEL = replace(find_model("llama3-8b"), global_batch=32)
SHARDED = Options(zero=3, overlap=True, attention="flash", engine="torchtitan", gradient_bytes=2)


def made(options: Options) -> Estimate:
    return estimate(layout_of(MODEL, "H100", 32, 1, (1, 1, 1, 1)), [], options)


def test_groups_gather_within_a_node_and_sum_between_them() -> None:
    options = replace(SHARDED, shard=8)
    links = Communication(of_gpus("H100", 32))
    data = tuple(Part(node, "H100", 8) for node in range(4))
    gather, reduce = Passes(MODEL, Compute([], MODEL, options), links, options)._sharded(data, 1, 1)
    assert first(data, 12) == (data[0], Part(1, "H100", 4))
    size = parameters(MODEL, 1)[0] * 2
    begin, per_byte = links.ring(data[:1], float(size.max()), 1, False)
    np.testing.assert_allclose(gather, begin + size * per_byte)
    # One GPU of each node sums its eighth with its like in the others, as the other seven do beside it.
    between = tuple(Part(node, "H100", 1) for node in range(4))
    more, each = links.ring(between, float(size.max()) / 8, 8 * 2, True)
    slack = links.ring(between, float(size.max()) / 8, 8, True)
    assert (reduce - gather <= more + size / 8 * each + 1e-12).all()
    assert (reduce - gather >= slack[0] + size / 8 * slack[1] - 1e-12).all()


def test_smaller_groups_need_more_memory_and_the_host_takes_the_states() -> None:
    assert sum(state_bytes(replace(SHARDED, shard=8), 32)) == pytest.approx(16 / 8)
    assert sum(state_bytes(replace(SHARDED, offload=True), 32)) == pytest.approx(4 / 32)
    whole, groups, hosts = (
        made(SHARDED),
        made(replace(SHARDED, shard=8)),
        made(replace(SHARDED, offload=True)),
    )
    held = float(parameters(MODEL, 1)[0].sum())
    assert groups.memory - whole.memory == pytest.approx(
        held * 16 * (1 / 8 - 1 / 32) * MEMORY_MARGIN / GIB, rel=0.02
    )
    assert hosts.memory < whole.memory and hosts.step > whole.step
    assert hosts.stages[0].update == pytest.approx(
        held / 32 * (4 / HOST_LINK + 28 * 8 / HOST_MEMORY), rel=0.02
    )


def test_plans_say_so_and_frameworks_get_it() -> None:
    flags: dict[str, Any] = {"tp": 1, "pp": 1, "mbs": 1, "global_batch": 32, "hsdp": 8, "offload": True}
    (plan, *_) = fasop.plan("llama3-8b", "32xH100", top=1, idle=False, **flags)
    assert plan.options.shard == 8 and plan.options.zero == 3
    text = exported(plan, "torchtitan")
    assert "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8" in text
    assert "enable_cpu_offload = true" in text
    assert "num_distributed_optimizer_instances: 4" in exported(plan, "megatron-bridge")
    with pytest.raises(PlanError, match="deepspeed has no --cp and no --hsdp"):
        exported(plan, "deepspeed")
    plain = replace(plan, options=replace(plan.options, shard=0))
    assert json.loads(exported(plain, "deepspeed"))["zero_optimization"]["offload_optimizer"]


def test_experts_are_refused() -> None:
    model = replace(MODEL, experts=8)
    with pytest.raises(PlanError, match="no HSDP here"):
        Passes(
            model, Compute([], model, SHARDED), Communication(of_gpus("H100", 8)), replace(SHARDED, shard=8)
        )
