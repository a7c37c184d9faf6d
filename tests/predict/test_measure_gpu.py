"""``chakra-et measure-gpu``, on the CPU as a device."""

import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.cost.gpus import gpu
from chakra_et.cost.kernel_times import calibrated, kernel_times
from chakra_et.cost.operator_times import OperatorCall, gpu_model
from chakra_et.predict.measure_gpu import SETS, product_shapes

pytest.importorskip("torch")


def test_the_cpu_as_a_device(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads wait for each other while others use the cores
    path = tmp_path / "mine.json"
    words = ["measure-gpu", "--device", "cpu", "--shapes", "8", "--largest", "1e7", "--repeats", "2"]
    assert main([*words, "-o", str(path)]) == 0
    torch.set_num_threads(threads)
    assert "copies reach" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert set(content["measured"]) == {"16 bit", "float", "operators", "nearby"}
    assert len(content["shapes"]["float"]) == 8
    model = gpu_model(str(path))
    small, large = (
        model.micros(
            OperatorCall("matrix product", 2.0 * size**3, 1, product=(1, size, size, size), type="float")
        )
        for size in (64, 4096)
    )
    assert 0 < small < large
    assert model.of("elementwise", "memory") == content["measured"]["operators"]["elementwise.memory"]


def test_a_machine_without_a_gpu_is_told(capsys: pytest.CaptureFixture) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["measure-gpu"]) == 2
    assert "sees no GPU here" in capsys.readouterr().err


def test_shapes_cover_small_and_large_products() -> None:
    found = product_shapes(100, 4e12)
    assert found.shape == (100, 3) and len(np.unique(found, axis=0)) == 100
    assert found[:, 0].min() < 4 and found[:, 0].max() > 4000
    assert (2 * found.prod(axis=1) <= 4e12).all()


def test_a_slower_gpu_is_found_by_its_shapes() -> None:
    """A GPU like H100 with 70% of its bandwidth: measured shapes tell."""
    times = kernel_times(gpu("H200"))
    sizes = product_shapes(100, 4e12)
    points = np.column_stack([np.ones(100), sizes, np.full(100, SETS)])
    slow = {"16 bit": {**times.of("16 bit"), "memory": 0.6}}
    truth = type(times)(times.gpu, slow, times.grids).micros("16 bit", points)
    found = calibrated(times, "16 bit", points, truth)
    assert found.of("16 bit")["memory"] == pytest.approx(0.6, rel=0.08)
    assert np.abs(found.micros("16 bit", points) / truth - 1).mean() < 0.03
