"""_00_conf.sh and its check: each setting that makes no sense is named, with what would fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lm.errors import SettingsError
from megatron_lm.settings import MODELS, Settings

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "megatron_lm" / "_00_conf.sh"


def conf(**settings: str) -> subprocess.CompletedProcess[str]:
    script = f'set -e; . "{CONF}"; for name in "${{SETTINGS[@]}}"; do echo "$name=${{!name}}"; done'
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"} | settings
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("model", MODELS)
def test_the_defaults_of_every_model_fit(model: str) -> None:
    done = conf(MODEL=model)
    assert done.returncode == 0, done.stderr
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    settings = Settings.from_environment(values)
    assert settings.model == model and settings.world_size == settings.nproc_per_node * settings.nnodes
    assert {name.upper() for name in Settings.__dataclass_fields__} <= set(values)


def test_the_environment_overrides() -> None:
    done = conf(DP_SIZE="2", NNODES="4", LOG_INTERVAL="5", GRES="")
    assert done.returncode == 0, done.stderr
    assert {"DP_SIZE=2", "WORLD_SIZE=16", "LOG_INTERVAL=5", "GRES="} <= set(done.stdout.splitlines())


WRONG = [
    ({"MODEL": "xxl"}, "MODEL=xxl", "tiny, small, xl"),
    ({"DP_SIZE": "3"}, "DP_SIZE × TENSOR_MP_SIZE × PIPELINE_MP_SIZE = 3 × 1 × 8 = 24", "DP_SIZE=4 would fit"),
    ({"WORLD_SIZE": "31"}, "WORLD_SIZE=31", "set it to 32"),
    ({"PARTITION": "0-11-8-8-8-8-5"}, "has 7 stages, PIPELINE_MP_SIZE is 8", "6-6-6-6-6-6-6-6 would fit"),
    ({"PARTITION": "0-11-8-8-8-8-5-1"}, "adds up to 49 layers, model xl has 48", "would fit"),
    ({"PARTITION": "8-0-8-8-8-8-8-0"}, "stage 1 has nothing to do", "would fit"),
    ({"PARTITION": "a-b"}, "PARTITION=a-b", "would fit"),
    ({"GLOBAL_BATCH_SIZE": "66"}, "multiple of MICRO_BATCH_SIZE × DP_SIZE = 4", "64 would fit"),
    ({"TENSOR_MP_SIZE": "3", "NNODES": "24"}, "TENSOR_MP_SIZE=3", "1, 2, 4, 8, 16 fit"),
    ({"TRAIN_ITERS": "0"}, "TRAIN_ITERS=0", "at least 1"),
    ({"TRAIN_ITERS": "many"}, "TRAIN_ITERS=many", "whole number"),
    ({"PROFILE": "yes"}, "PROFILE=yes", "true or false"),
    ({"LR": "fast"}, "LR=fast", "a number"),
    ({"LR": "5"}, "LR=5", "between 0 and 1"),
    ({"PRECISION": "fp8"}, "PRECISION=fp8", "fp16, bf16, fp32"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000", "1 to 65535"),
    ({"SPLIT": "all"}, "SPLIT=all", "100,0,0"),
    ({"HOMOGENEOUS_CLUSTER": "false", "MASTER_NNODES": "8"}, "MASTER_NNODES=8", "1 would fit"),
]


@pytest.mark.parametrize(("settings", "fault", "fit"), WRONG, ids=lambda value: str(value)[:40])
def test_a_setting_at_fault_is_named_before_anything_starts(
    settings: dict[str, str], fault: str, fit: str
) -> None:
    done = conf(**settings)
    assert done.returncode == 2 and done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert fault in sentence and fit in sentence


def test_the_layout_is_that_of_the_partition() -> None:
    assert Settings().layout == "E|t*11|t*8|t*8|t*8|t*8|t*5|L"
    assert Settings(partition="3-2", pipeline_mp_size=2).layout == "Et*3|t*2L"
    assert Settings(model="tiny", partition="4", pipeline_mp_size=1).layout == "Et*4L"
    assert Settings().micro_batches == 16 and Settings().padded_vocabulary == 50_304
    with pytest.raises(SettingsError):
        Settings(model="none").check()
