"""What kernels achieve, against the GPU's peak and against what such work usually takes there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.inputs import find_run
from chakra_et.cost import nccl
from chakra_et.diagnose.rates import find_rates, kernel_classes
from chakra_et.diagnose.verdict import diagnose
from chakra_et.et.columns import CollectiveType
from chakra_et.report.collectives import collectives
from chakra_et.report.run import load
from chakra_et.report.times import idle_time
from chakra_et.simulate.run import make_run
from tests.shared import shared_path


def test_classes_of_a_public_h100_trace() -> None:
    name = "pairs/h100_bert-small-uncased.json.gz"
    run = load(find_run([str(shared_path("data/traces/public", name) / name)]))
    classes = {each.kind: each for each in run.kernel_classes}
    assert run.rates.gpu == "H100" and run.rates.roof == (989e12, 3.35e12)
    assert sum(each.share for each in classes.values()) == pytest.approx(1)
    product = classes["matrix product"]
    assert product.times_usual == pytest.approx(1, abs=0.25)
    assert product.per_second is not None and product.of_peak is not None
    assert product.per_second / 989e12 <= product.of_peak < 1
    assert classes["memory copy"].of_peak is None, "a copy to the host is no matter of the device's memory"
    ((late, other, short),) = idle_time(run) or []
    assert late > 0.9 * (late + other + short), "a small model: the host launches too late"
    # Three times slower than recorded is three times slower than usual.
    assert run.job is not None
    traces = [each for each in run.job.graph.traces]
    for trace in traces:
        trace.duration_micros *= np.where(trace.column("is_cpu_op") == 0, 3, 1).astype(np.uint64)
    slower = make_run("slower", traces, [0])
    (again,) = [each for each in kernel_classes(slower, find_rates(slower)) if each.kind == "matrix product"]
    assert again.times_usual == pytest.approx(3 * product.times_usual, rel=0.02)
    assert "× the usual time" in str(diagnose(slower).kernels[0])


def test_collectives_have_what_nccl_reaches(tmp_path: Path) -> None:
    folder = shared_path("data/traces/dlrm_8gpu", "dlrm_8gpu_rank0_device.json.gz")
    found = max(collectives(load(find_run([str(folder)]))), key=lambda each: each["bytes"])
    assert (found["type"], found["bytes"], found["ranks"]) == ("all-reduce", 1_576_964, 8)
    ns = float(nccl.node("V100", "").time(CollectiveType.ALL_REDUCE, found["bytes"], 8))
    assert found["usual_bus"] == pytest.approx(1.75 * found["bytes"] / ns)
    assert 0.5 < found["bus"] / found["usual_bus"] < 1.2
