"""Running the real train.py: alone in this process, or on several ranks under torchrun."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bert.config import BertTrainConfig
from bert.model import BERT
from chakra_et import cli
from gpt2.config import GPT2TrainConfig
from gpt2.model import GPT2
from tests.training.jobs import REPO_ROOT, TINY, Job
from utils.distributed import World
from utils.training.trainer import Trainer
from utils.watch import Watch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """On a busy machine the threads of so small a model mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of downloads for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def start_job(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> Iterator[Callable[..., Job]]:
    """``start_job(2, "gpt2/train.py", *flags)``: N ranks in the background.

    0: without torchrun. None: all that torchrun is given follows, the script among it.
    """
    if not Path("/proc/self/environ").exists():
        pytest.skip("finds processes in /proc, which this system lacks")
    jobs: list[Job] = []

    def start(ranks: int | None, script: object, *flags: object, **variables: str) -> Job:
        launcher = [] if ranks == 0 else ["-m", "torch.distributed.run"]
        if ranks:
            launcher += ["--standalone", f"--nproc_per_node={ranks}"]
        first = str(script) if ranks is None else str(REPO_ROOT / str(script))
        command = [sys.executable, *launcher, first, *map(str, flags)]
        environment = {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": str(data_cache), **variables}
        jobs.append(Job(command, tmp_path_factory.mktemp("job"), environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(16)``: a file system of 16 MB."""
    mounted: list[Path] = []

    def mount(megabytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def make_trainer(tmp_path: Path, data_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """``make_trainer("gpt2", *flags)``: the tiny model on the CPU, in this process, writing in ``tmp_path``.

    The last flag wins, so the ones that every test shares can be given anew.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(data_cache))
    families = {"gpt2": (GPT2TrainConfig, GPT2), "bert": (BertTrainConfig, BERT)}

    def make(family: str, *flags: object) -> Trainer:
        config_class, model_family = families[family]
        config = cli.parse(config_class, [*TINY, *map(str, flags)])
        world = World(0, 1, 0, 1, torch.device("cpu"))
        return Trainer(config, model_family, world, Watch(0, 1, config.dist_timeout))

    return make


@pytest.fixture
def train_alone(make_trainer: Callable[..., Trainer]) -> Callable[..., Path]:
    """``train_alone("gpt2", *flags)``: the same, trained to the end. Returns its --save-dir."""

    def train(family: str, *flags: object) -> Path:
        trainer = make_trainer(family, *flags)
        assert trainer.train() == 0
        return trainer.save_dir.resolve()

    return train


@pytest.fixture
def few_samples(tmp_path: Path, repo_root: Path) -> Path:
    """A data set with 10 training samples: 5 steps of 2 are an epoch."""
    sample = json.loads((repo_root / "data" / "squad_sample.json").read_text())
    paragraphs = [{**p, "qas": p["qas"][:1]} for a in sample["data"] for p in a["paragraphs"]][:11]
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "few", "paragraphs": paragraphs}]}))
    return path
