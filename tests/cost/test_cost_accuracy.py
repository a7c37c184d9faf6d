"""benchmarks/cost_accuracy.py on tables of GPUs that the given ones lack."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost_accuracy import Options, judge, other_rows
from benchmarks.cost_picture import draw
from benchmarks.cost_tables import JUDGED, by_name, read_own_attention, read_products
from chakra_et.cost.gpus import gpu
from chakra_et.cost.kernel_times import kernel_times
from chakra_et.errors import TraceError

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("lightgbm")


def write_tables(folder: Path, names: dict[str, str], framework: str, unit: float = 1.0) -> None:
    """Products of GPUs by what a table calls them, as the model has them; the figures mean nothing."""
    sizes = [(m, n, k) for m in (1, 64, 65, 1024) for n in (256, 1024, 4096) for k in (256, 1024, 4096)]
    points = np.array([[1, *each, 6] for each in sizes], float)
    parts = []
    for written, name in names.items():
        part = pandas.DataFrame(sizes, columns=["m", "n", "k"])
        part["gpu"], part["framework"], part["dtype"] = written, framework, "bfloat16"
        part["latency_us"] = kernel_times(gpu(name)).micros("16 bit", points) * unit
        parts.append(part)
    folder.mkdir()
    pandas.concat(parts).to_parquet(folder / "gemm.parquet")


def test_tables_of_other_gpus_are_judged_by_what_they_are_like(tmp_path: Path) -> None:
    write_tables(tmp_path / "given", {"H100": "H100", "B200": "B200", "L40S": "L40S"}, "sglang")
    others = {name: name for name in ("H200", "GB200", "B300", "H100")}
    others["RTX PRO 6000"] = "RTXPRO6000-SERVER"
    write_tables(tmp_path / "other", others, "vllm")
    tables = (read_products(tmp_path / part, "bfloat16") for part in ("given", "other"))
    rows = list(other_rows("16 bit", *tables))
    found = {(row.judged, row.gpu) for row in rows}
    for name in ("H200", "GB200", "B300"):
        assert ("products bf16, GPU left out, relative in the fit", f"{name} vllm") in found
    assert ("products bf16, GPU left out, no relative", "RTXPRO6000-SERVER vllm") in found
    assert ("products bf16, fitted GPU, other framework", "H100 vllm") in found
    assert {row.gpu for row in rows if row.judged == "ratio of two GPUs, relative in the fit"} == {
        "H100 → H200",
        "B200 → GB200",
        "B200 → B300",
    }
    assert max(np.abs(row.errors).mean() for row in rows if "vllm" in row.gpu) < 0.5
    draw({rows[0].judged: [(row.micros, row.errors) for row in rows]}, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").count("<path") > 3


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx_pro_6000_server", "RTXPRO6000-SERVER"),
        ("RTX PRO 6000", "RTXPRO6000-SERVER"),
        ("RTXPRO6000", "RTXPRO6000-SERVER"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000"),
        ("h200_sxm", "H200"),
        ("gb200", "GB200"),
        ("B300", "B300"),
        ("NVIDIA H100 NVL", "H100-NVL"),
    ],
)
def test_names_of_tables(written: str, name: str) -> None:
    found = by_name(written)
    assert found is not None and found.name == name


def test_what_a_table_lacks_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path / "given", {"H100": "H100", "B200": "B200", "Martian": "H100"}, "sglang")
    assert set(read_products(tmp_path / "given", "bfloat16")) == {"H100 sglang", "B200 sglang"}
    assert capsys.readouterr().err == "Martian is no GPU of gpus.json: 36 rows are left out\n"
    table = tmp_path / "given" / "gemm.parquet"
    rows = pandas.read_parquet(table)
    for broken, why in (
        (rows.drop(columns=["m", "n"]), "lacks the columns m, n"),
        (rows[:0], "has no row with"),
    ):
        broken.to_parquet(table)
        with pytest.raises(TraceError, match=f"gemm.parquet: {why}"):
            read_products(table.parent, "bfloat16")
    table.write_text("gpu,m,n,k")
    with pytest.raises(TraceError, match="can't be read as parquet"):
        read_products(table.parent, "bfloat16")


def test_a_table_in_another_unit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path / "given", {"H100": "H100", "B200": "B200"}, "sglang")
    write_tables(tmp_path / "other", {"h200_sxm": "H200"}, "vllm", unit=1e-3)
    options = Options(
        given=str(tmp_path / "given"), tables=str(tmp_path / "other"), kinds=("16 bit", "attention")
    )
    assert judge(options) == 1
    said = capsys.readouterr()
    assert "H200 vllm, 36 rows: half took 0.001 times what the model says" in said.err
    assert "h200_sxm is taken for H200" in said.err and "GPU left out, relative" not in said.out


def test_rows_without_a_number_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tables(tmp_path / "given", {"H100": "H100", "h100_sxm": "H100"}, "sglang")
    table = tmp_path / "given" / "gemm.parquet"
    rows = pandas.read_parquet(table).astype({"m": float}).reset_index(drop=True)
    rows.loc[0, "m"], rows.loc[1, "latency_us"], rows.loc[2, "k"] = np.nan, np.inf, 0
    rows.loc[3, "framework"], rows.loc[4, "dtype"] = None, "fp8_block"
    rows.to_parquet(table)
    # Both names mean one GPU.
    assert len(read_products(table.parent, "bfloat16")["H100 sglang"].micros) == 67
    said = capsys.readouterr().err
    assert "4 rows without gpu, framework, dtype and, above 0, m, n, k, latency_us are left out" in said
    assert "rows of fp8_block, which isn't judged: 1" in said


def test_amd_takes_its_own_parameters(tmp_path: Path) -> None:
    write_tables(tmp_path / "given", {"H100": "H100", "B200": "B200"}, "sglang")
    write_tables(tmp_path / "other", {"mi300x": "MI300X"}, "vllm")
    tables = (read_products(tmp_path / part, "bfloat16") for part in ("given", "other"))
    none = next(iter(other_rows("16 bit", *tables)))
    assert none.judged == "products bf16, GPU left out, no relative" and np.abs(none.errors).max() < 1e-9


def test_tables_that_are_not_there_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.joinpath("other").mkdir()
    assert judge(Options(given=str(tmp_path), tables=str(tmp_path / "other"), kinds=("attention",))) == 0
    assert "attention.parquet isn't there: attention forward: not judged" in capsys.readouterr().err


def test_attention_and_products_in_8_bits_that_gpu_truth_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the model's own times: nothing is off. A row whose backward pass took no time is left out."""
    shapes = pandas.DataFrame(
        [(4, 16, 4, 1024, 128, 1), (2, 8, 8, 2048, 64, 0)],
        columns=["batch", "heads", "kv_heads", "length", "head_dim", "causal"],
    )
    columns = ["batch", "heads", "kv_heads", "length", "length", "head_dim", "causal"]
    times = kernel_times(gpu("H100"))
    forward, backward = (
        times.micros("attention", np.column_stack([shapes[columns], [call] * 2])) for call in (0, 1)
    )
    named = shapes.assign(gpu="NVIDIA H100 80GB HBM3", kernel_source="torch")
    named.assign(forward_us=forward, both_us=forward + backward).to_csv(tmp_path / "sdpa.csv")
    products = pandas.DataFrame([(64, 256, 1024), (512, 512, 512)], columns=["m", "n", "k"])
    points = np.column_stack([[1, 1], products, [6, 6]])
    products["latency_us"] = times.micros("8 bit alone", points)
    products = products.assign(gpu="NVIDIA H100 80GB HBM3", framework="pytorch", dtype="fp8 alone")
    products.to_parquet(tmp_path / "gemm.parquet")
    assert judge(Options(tables=str(tmp_path), kinds=tuple(JUDGED))) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 3 and all("| 2 | 0.0% | " in line for line in lines), lines
    named.assign(forward_us=forward, both_us=[forward[0], 0]).to_csv(tmp_path / "sdpa.csv")
    assert len(read_own_attention(tmp_path, 1)["H100 torch"].micros) == 1
    assert "sdpa.csv: 1 rows without" in capsys.readouterr().err
