"""scripts/public_tables.py against git repositories on disk, with git-lfs as on GitHub."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import cost_tables
from chakra_et.errors import TraceError
from scripts.public_tables import SOURCES, Source, fetch_tables
from tests.shared import shared_path

pandas = pytest.importorskip("pandas", reason="the tables are parquet files, which pandas reads")
pytest.importorskip("pyarrow", reason="pandas reads parquet by pyarrow")
pytestmark = pytest.mark.skipif(not shutil.which("git-lfs"), reason="git-lfs isn't installed")

SYSTEMS = "aic-core/src/aiconfigurator_core/systems/data"
DATASET = "scripts/asplos/data/dataset/train"


def _git(folder: Path, *words: str) -> str:
    setting = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *setting, *words], cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def _upstream(base: Path, source: Source, files: dict[str, object]) -> Source:
    """A repository with these tables, aiconfigurator's in git-lfs; the source at its commit."""
    folder = base / source.repository
    folder.mkdir(parents=True)
    _git(folder, "init", "--quiet")
    _git(folder, "config", "uploadpack.allowFilter", "true")
    if source.repository.startswith("ai-dynamo"):
        _git(folder, "lfs", "install", "--local")
        _git(folder, "lfs", "track", "*.parquet")
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = pandas.DataFrame(rows)
        frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "-m", "tables")
    return source._replace(commit=_git(folder, "rev-parse", "HEAD")[:9])


GEMM = {
    "framework": ["SGLang", "SGLang"],
    "version": ["0.5.10"] * 2,
    "kernel_source": ["default"] * 2,
    "gemm_dtype": ["bfloat16", "int8_wo"],
    "m": [7, 7],
    "n": [64, 64],
    "k": [128, 128],
    "latency": [0.0021, 1.0],
}
ATTENTION = {
    "framework": ["SGLang"] * 4,
    "version": ["0.5.10"] * 4,
    "kernel_source": ["flash_attention"] * 4,
    "attn_dtype": ["bfloat16"] * 4,
    "kv_cache_dtype": ["bfloat16", "fp8", "bfloat16", "bfloat16"],
    "head_dim": [128, 128, 192, 128],
    "num_heads": [8] * 4,
    "num_key_value_heads": [2] * 4,
    "isl": [256] * 4,
    "batch_size": [3] * 4,
    "window_size": [0, 0, 0, 128],
    "latency": [0.05] * 4,
}
NCCL = {
    "nccl_dtype": ["half", "int8"],
    "op_name": ["all_gather"] * 2,
    "num_gpus": [8, 8],
    "message_size": [1024, 2048],
    "latency": [0.012, 0.012],
}
NEUSIGHT = {"OPName": ["bmm"], "Latency": [0.25], "Device": ["Tesla T4"], "Kernel Name": ["sgemm_128x64"]}
NEUSIGHT |= {f"{of} {axis}": [1] for of in ("Grid", "Block") for axis in "xyz"}


def _both(base: Path) -> tuple[Source, ...]:
    upper = {
        f"{SYSTEMS}/h100_sxm/gemm/sglang/0.5.10/gemm_perf.parquet": GEMM,
        f"{SYSTEMS}/h100_sxm/gemm/sglang/0.5.12/gemm_perf.parquet": GEMM,
        f"{SYSTEMS}/b200_sxm/attention/sglang/0.5.10/context_attention_perf.parquet": ATTENTION,
        f"{SYSTEMS}/b200_sxm/attention/sglang/0.5.14/context_attention_perf.parquet": ATTENTION,
        f"{SYSTEMS}/l40s/comm/nccl/2.27.3/nccl_perf.parquet": NCCL,
    }
    lower = {f"{DATASET}/bmm.csv": NEUSIGHT | {"B": [12], "M": [64], "N": [196], "K": [32]}}
    lower |= {f"{DATASET}/ln.csv": NEUSIGHT | {"OPName": ["ln"], "B": [8192], "H": [768]}}
    return _upstream(base, SOURCES[0], upper), _upstream(base, SOURCES[1], lower)


def test_tables_are_fetched_by_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And are read by the benchmark. Other versions, types, windows and widths of heads aren't taken."""
    sources = _both(tmp_path / "mirror")
    out = tmp_path / "out"
    fetch_tables(out, (tmp_path / "mirror").as_uri(), sources)
    gemm = pandas.read_parquet(out / "gemm.parquet")
    assert gemm[["gpu", "dtype", "m", "n", "k"]].values.tolist() == [["H100", "bfloat16", 7, 64, 128]]
    assert gemm.latency_us.tolist() == pytest.approx([2.1])
    attention = pandas.read_parquet(out / "attention.parquet")
    assert attention[["gpu", "heads", "kv_heads", "isl", "batch"]].values.tolist() == [["B200", 8, 2, 256, 3]]
    nccl = pandas.read_csv(out / "nccl.csv")
    assert nccl[["op", "gpu", "nccl", "num_gpus", "bytes"]].values.tolist() == [
        ["all_gather", "L40S", "2.27.3", 8, 2048]
    ]
    neusight = pandas.read_parquet(out / "neusight_kernels.parquet")
    assert neusight[["batch", "m", "n", "k"]].values.tolist()[0] == [12, 64, 32, 196]
    assert neusight[["rows", "cols"]].values.tolist()[1] == [8192, 768]
    assert "1 rows of 1 files of ai-dynamo/aiconfigurator" in capsys.readouterr().out
    assert list(cost_tables.read_products(out, "bfloat16")) == ["H100 SGLang"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["attention.parquet", "gemm.parquet", "nccl.csv", "neusight_kernels.parquet"]
    )


def test_a_changed_file_is_not_used(tmp_path: Path) -> None:
    """git-lfs compares each file with the sha256 that the commit names."""
    (source, _) = _both(tmp_path / "mirror")
    for path in (tmp_path / "mirror" / source.repository / ".git/lfs/objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"another table")
    with pytest.raises(TraceError, match="git can't fetch it"):
        fetch_tables(tmp_path / "out", (tmp_path / "mirror").as_uri(), (source,))
    assert not list((tmp_path / "out").iterdir())


def test_a_commit_or_table_that_is_not_there(tmp_path: Path) -> None:
    _, source = _both(tmp_path / "mirror")
    base = (tmp_path / "mirror").as_uri()
    with pytest.raises(TraceError, match="NeuSight: git can't fetch it .*Not a valid object name"):
        fetch_tables(tmp_path / "out", base, (source._replace(commit="123456789"),))
    missing = source.tables[0]._replace(paths=("elsewhere/*.csv",))
    with pytest.raises(TraceError, match=r"has no elsewhere/\*.csv"):
        fetch_tables(tmp_path / "out", base, (source._replace(tables=(missing,)),))
    assert not list((tmp_path / "out").iterdir())


def test_the_columns_are_those_of_the_shared_tables(tmp_path: Path) -> None:
    truth = shared_path("data/truth")
    fetch_tables(tmp_path, (tmp_path / "mirror").as_uri(), _both(tmp_path / "mirror"))
    for name in ("gemm.parquet", "attention.parquet", "neusight_kernels.parquet", "nccl.csv"):
        read = pandas.read_csv if name.endswith("csv") else pandas.read_parquet
        assert sorted(read(tmp_path / name)) == sorted(read(truth / name)), name
