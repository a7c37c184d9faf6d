"""Times of kernels by the fitted models, and the table of GPUs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cost_fits
from benchmarks.boosting import boosted, product_columns
from chakra_et.cost import grids
from chakra_et.cost.fit import fit
from chakra_et.cost.gpus import by_driver, datasheet, gpu, names
from chakra_et.cost.kernel_times import MODELS, kernel_times
from chakra_et.errors import TraceError
from tests.shared import shared_path


def product(m: int, n: int, k: int, batch: int = 1) -> list[list[float]]:
    return [[batch, m, n, k, 6]]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A10", "A10"),
        ("H100_PCIe", "H100-PCIE"),
        ("a100-40gb", "A100-40GB"),
        ("H100 96GB HBM2e 500W", "H100-HBM2E"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000-SERVER"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("AMD Radeon Graphics", None),
    ],
)
def test_names_of_drivers_mean_one_gpu(text: str, name: str | None) -> None:
    assert by_driver(text) == name


def test_each_gpu_has_times_for_products() -> None:
    for name in names():
        times = kernel_times(gpu(name)).micros("16 bit", product(4096, 4096, 4096))
        rate = 2 * 4096**3 / times[0] * 1e6
        assert 0.2 * gpu(name).peak("16 bit") < rate < gpu(name).peak("16 bit"), name


def test_more_work_takes_longer_and_a_batch_is_not_free() -> None:
    times = kernel_times(gpu("RTXPRO6000"))
    rows = [product(2**at, 4096, 4096)[0] for at in range(6, 16)]
    assert (np.diff(times.micros("16 bit", rows)[3:]) > 0).all()
    one, many = times.micros("16 bit", [*product(512, 512, 64), *product(512, 512, 64, 512)])
    assert many > 20 * one


def test_measured_tables_are_met() -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.read_parquet(shared_path("data/truth", "gemm.parquet") / "gemm.parquet")
    for name, each in rows[rows.dtype == "bfloat16"].groupby("gpu", observed=True):
        some = each.sample(200, random_state=5)
        points = [[1, m, n, k, 6] for m, n, k in zip(some.m, some.n, some.k, strict=True)]
        said = kernel_times(gpu(str(name))).micros("16 bit", points)
        assert np.abs(said / some.latency_us - 1).mean() < 0.08, name


def test_a_datasheet_makes_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    sheet = {
        "vendor": "nvidia",
        "units": 132,
        "clock": "1830 MHz",
        "watts": 700,
        "cache": "50 MB",
        "parts": 2,
        "memory": "3350 GB/s",
        "kind": "HBM",
        "peaks": {"16 bit": "989 TFLOP/s", "float": "67 TFLOP/s"},
    }
    path.write_text(json.dumps(sheet))
    of = datasheet(path)
    assert of.name == "mine" and of.memory == gpu("H100").memory
    assert kernel_times(of).micros("16 bit", product(8192, 8192, 8192))[0] > 0
    for changed, message in (
        ({key: each for key, each in sheet.items() if key != "watts"}, "lacks watts"),
        (sheet | {"vendor": "intel"}, "vendor 'intel' is unknown: use nvidia or amd"),
        (sheet | {"peaks": {"float": "67 TFLOP/s"}}, "lacks, of dense products, the peak 16 bit"),
        (sheet | {"units": "many"}, "mine.json: units 'many': give a number above 0"),
        (sheet | {"memory": "3350"}, "bandwidth"),
        (sheet | {"clock": 1830}, "clock '1830': give a number above 0 in MHz or GHz"),
        (sheet | {"cache": "0 MB"}, "cache '0 MB': give a number above 0 in KB or MB"),
        (sheet | {"parts": 0}, "parts '0': give a number above 0"),
        (sheet | {"like": "H1000"}, "like 'H1000' is unknown: use P100 or"),
        (sheet | {"memroy": "3 TB/s"}, "has no setting memroy"),
        (
            sheet | {"peaks": {"16 bit": "989 TFLOP/s", "fp8": "1979 TFLOP/s"}},
            "the peaks 16 bit, 8 bit, 4 bit, tf32, float, double, not fp8",
        ),
        (sheet | {"peaks": "989 TFLOP/s"}, "no datasheet of a GPU: give settings and peaks as"),
        ([sheet], "no datasheet of a GPU: give settings"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(TraceError, match=message):
            datasheet(path)


def test_the_datasheet_of_predict_md_can_be_read(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "PREDICT.md"
    path = tmp_path / "h20.yaml"
    path.write_text(guide.read_text().split("```yaml\n", 1)[1].split("```", 1)[0])
    assert gpu(str(path)).peak("8 bit") == 296e12 and gpu(str(path)).memory == 4e12


def test_fit_finds_the_parameters_that_made_the_times() -> None:
    model, of = MODELS["16 bit"], gpu("H100")
    random = np.random.default_rng(0)
    sizes = np.exp2(random.uniform(5, 14, (300, 3)))
    points = np.column_stack([np.ones(300), sizes, np.full(300, 6)])
    truth = model.start(of) | {"hot": 0.7, "memory": 0.65, "launch": 3.0}
    found = fit(
        lambda values: model.micros(of, values, points),
        model.micros(of, truth, points),
        model.start(of),
        model.widths,
    )
    for name in ("hot", "memory", "launch"):
        assert found[name] == pytest.approx(truth[name], rel=0.1)


def test_grids_interpolate_and_fade(tmp_path: Path) -> None:
    points = np.array([[m, n, k] for m in (1, 4, 16) for n in (64, 128) for k in (64, 256)], float)
    logs = np.log(points[:, 0]) / 10
    grid = grids.Grid(tuple(np.unique(column) for column in points.T), logs.reshape(3, 2, 2))
    assert grid.at(np.array([[2, 100, 100]]))[0] == pytest.approx(np.log(2) / 10)
    assert grid.at(np.array([[16, 128, 2560.0]]))[0] == pytest.approx(logs[-1] / 10)
    cost_fits.save({"A": grid}, tmp_path / "grids.npz")
    again = grids.load(tmp_path / "grids.npz")["A"]
    assert np.abs(again.logs - grid.logs).max() <= 0.0026


def smooth_logs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    points = np.exp2(random.integers(0, 8, (count, 3)) + 4.0)
    return points, 0.05 * np.log2(points[:, 0]) - 0.04 * np.log2(points[:, 2])


def test_few_measured_shapes_say_what_others_take_but_not_far_away() -> None:
    points, logs = smooth_logs(100, 0)
    logs[0] += 5  # an outlier
    near = grids.nearby(points, logs)
    others, truth = smooth_logs(300, 1)
    assert np.abs(near.at(others) - truth).mean() < 0.25 * np.abs(truth).mean()
    assert np.abs(near.at(np.array([[1e12, 1e12, 1e12]]))).max() < 0.01


def test_the_benchmark_smooths_noise_outliers_and_gaps() -> None:
    from benchmarks.smoothing import Part, smooth

    points, truth = smooth_logs(4000, 2)
    points, first = np.unique(points, axis=0, return_index=True)
    truth = truth[first]
    random = np.random.default_rng(3)
    kept = random.random(len(points)) < 0.7
    noisy = truth + random.normal(0, 0.05, len(points)) + (random.random(len(points)) < 0.02) * 1.0
    grid = smooth(points[kept], noisy[kept], (Part(0.2, (3, 3, 3)), Part(0.02, (1, 1, 1), 64)))
    assert np.abs(grid.at(points) - truth)[~kept].mean() < 0.03


def test_batched_products_in_32_bits_fill_the_tiles_of_their_library() -> None:
    """128 × 128 since Ampere; before, tiles of 64 columns, too. K isn't rounded up to more than 8."""
    for name, narrow in (("A100-PCIE-40GB", 0.9), ("V100-PCIE", 0.6)):
        times = kernel_times(gpu(name))
        half, whole = times.micros("float", [(256, 1024, 64, 1024, 1), (256, 1024, 128, 1024, 1)])
        assert (half / whole > narrow) == (name[0] == "A")
        short, long = times.micros("float", [(256, 1024, 1024, 80, 1), (256, 1024, 1024, 128, 1)])
        assert 0.55 < short / long < 0.8


def test_the_benchmark_finds_borders_along_products_of_sizes() -> None:
    pytest.importorskip("lightgbm")
    random = np.random.default_rng(4)
    points = np.exp2(random.integers(5, 14, (3000, 3)).astype(float))
    truth = 0.3 * (points[:, 0] * points[:, 1] > 2**18)
    noisy = truth + random.normal(0, 0.05, len(points)) + (random.random(len(points)) < 0.02)
    columns = product_columns(points, 132)
    left = points[:, 2] == 2**9
    shapes = np.unique(points[~left, 1:], axis=0, return_inverse=True)[1].reshape(-1)
    said = [boosted(columns[~left], noisy[~left], shapes, columns[left]) for _ in range(2)]
    assert np.abs(said[0] - truth[left]).mean() < 0.02
    assert (said[0] == said[1]).all()


def test_without_lightgbm_the_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(TraceError, match="the fit of products needs LightGBM: pip install lightgbm"):
        boosted(np.ones((9, 1)), np.ones(9), np.arange(9), np.ones((9, 1)))
