"""GPUs that share sequences: what their attention waits for, by a ring and by all-to-all exchanges."""

from dataclasses import replace

import numpy as np
import pytest

from fasop.__main__ import main
from fasop.errors import PlanError
from fasop.exact.communication import HOP, Communication
from fasop.exact.passes import Passes
from fasop.exact.unit_times import Compute
from fasop.inputs.clusters import Cluster, Gpu, of_gpus
from fasop.inputs.models import CpComm, Model
from fasop.plans.options import Options
from fasop.plans.plan import check_heads
from fasop.plans.shapes import Group, Part, shapes

MODEL = Model("grouped", 4096, 32768, 2, 32000, 32, 64, kv_heads=8, gated=True, ffn=14336)
INTRA, NIC = 3.2e12, 4e11
GPU = Gpu("H100", 80, 0.0, 8 * NIC, INTRA, gpu_bandwidth=NIC)
CLUSTER = Cluster("two nodes", 8, (GPU,), (2,))
WITHIN: Group = (Part(0, "H100", 4),)
BETWEEN: Group = (Part(0, "H100", 2), Part(1, "H100", 2))


def waits(group: Group, comm: CpComm, attention: float = 0.0) -> np.ndarray:
    """Of a layer's forward and backward pass."""
    options = Options(attention="flash")
    model = MODEL.split_sequences(4, comm)
    passes = Passes(model, Compute([], model, options), Communication(CLUSTER), options)
    found = passes.context_seconds(group, 2, 1, np.full(4, attention))
    assert not found[:, [0, -1]].any()  # embedding and head have no attention
    return found[:, 1]


def test_a_ring_sends_keys_and_values_three_times() -> None:
    """8,192 tokens of 4 kv heads of 128, keys and values, in 16 bits; backward their gradients too."""
    size = 8192 * 4 * 128 * 2 * 2
    expected = [3 * (HOP + times * size * 8 / INTRA) for times in (1, 2)]
    assert waits(WITHIN, "ring") == pytest.approx(expected)
    assert waits(WITHIN, "p2p") == pytest.approx(expected)
    # Of each ring one GPU sends to the other node, over a network link of its own.
    assert waits(BETWEEN, "ring") == pytest.approx([3 * (HOP + n * size * 8 / NIC) for n in (1, 2)], rel=0.06)


def test_attention_hides_a_ring_but_for_its_first_latency() -> None:
    alone = waits(WITHIN, "ring")
    assert waits(WITHIN, "ring", 40e-6) == pytest.approx(alone - 3 / 4 * np.array([40e-6, 80e-6]))
    assert waits(WITHIN, "ring", 1.0) == pytest.approx([HOP, HOP])


def test_exchanges_move_queries_keys_values_and_outputs() -> None:
    """Each GPU keeps a quarter; 16 query and 4 kv heads of a rank."""
    moved = 3 / 4 * 8192 * 128 * (2 * 16 + 2 * 4) * 2
    starts = waits(WITHIN, "all-to-all") - moved * 8 / INTRA
    assert starts[0] == starts[1] == pytest.approx(4 * (32e-6 + 3 * HOP))
    assert (waits(WITHIN, "a2a", 1.0) == waits(WITHIN, "all-to-all")).all()  # no attention hides them
    assert (waits(BETWEEN, "all-to-all") > 1.2 * waits(WITHIN, "all-to-all")).all()


def test_exchanges_need_heads_for_every_gpu() -> None:
    with pytest.raises(PlanError, match="cp 16 must divide 8"):
        MODEL.split_sequences(16, "all-to-all")
    assert MODEL.split_sequences(16).most_tp == 8
    shared = MODEL.split_sequences(4, "all-to-all")
    check_heads("here", shared, 2)
    with pytest.raises(PlanError, match="tp is 4: .* 8 kv_heads over cp 4"):
        check_heads("here", shared, 4)
    assert {shape.tp for shape in shapes(shared, of_gpus("H100", 16), 8)} == {1, 2}
    assert replace(shared, cp=1).most_tp == 8  # nothing is exchanged


def test_plan_shows_what_is_exposed(capsys: pytest.CaptureFixture[str]) -> None:
    of = ["plan", "--model", "llama3-8b", "--cluster", "16xH100", "--seq", "8192", "--global-batch", "16"]
    of += ["--pp", "1", "--mbs", "1", "--fsdp", "--cp", "4"]
    shares = []
    for comm in ("ring", "all-to-all"):
        assert main([*of, "--cp-comm", comm]) == 0
        text = capsys.readouterr().out
        shares.append(float(text.split("exposed context-parallel communication ")[1].split("%")[0]))
    assert shares[0] < shares[1] < 20
    assert main([*of[:-1], "16", "--cp-comm", "a2a"]) == 2
    assert "cp 16 must divide 8" in capsys.readouterr().err
