"""The settings: defaults, rules, files, environment, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lm.errors import RunError
from megatron_lm.settings import MODELS, NAMES, Settings, from_environment
from megatron_lm.settings import conf as settings_text
from megatron_lm.settings.conf import CONF, complete, from_caller
from tests.megatron_lm.conftest import as_environment
from tests.megatron_lm.training_runs import environment

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


def conf(**variables: str) -> subprocess.CompletedProcess[str]:
    """What ``_00_conf.sh`` gives a script that sources it."""
    script = f'set -e; . "{CONF}"; for name in "${{SETTINGS[@]}}"; do echo "$name=${{!name}}"; done'
    env = {"PATH": PATH} | variables
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)


def values(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("model", MODELS)
def test_the_defaults_of_every_model_fit(model: str) -> None:
    found = values(conf(MEGATRON_MODEL=model))
    assert list(found) == list(dict.fromkeys(found)) and set(found) == set(NAMES)
    settings = from_environment(environment(found))
    assert settings.model == model and settings.world_size == settings.nproc_per_node * settings.nnodes
    assert settings.size == MODELS[model]


def test_the_defaults_are_those_of_the_class() -> None:
    of_conf = from_environment(environment(values(conf())))
    assert dataclasses.replace(of_conf, **dict.fromkeys(SIZES)) == dataclasses.replace(
        Settings(), **dict.fromkeys(SIZES)
    )
    assert (of_conf.master_port, of_conf.container_python) == (6787, "python3")


SIZES = [name.lower() for name in settings_text.SIZE_SETTINGS]


def test_only_prefixed_variables_override() -> None:
    found = values(
        conf(MEGATRON_DP_SIZE="2", MEGATRON_NNODES="4", MEGATRON_GRES="", MEGATRON_LOG_INTERVAL="5")
    )
    expected = {"DP_SIZE": "2", "WORLD_SIZE": "16", "LOG_INTERVAL": "5", "GRES": "", "MASTER_GRES": ""}
    assert found.items() >= expected.items()
    leaked = dict.fromkeys(("CONTAINER_NAME", "WORLD_SIZE", "LOAD", "SAVE", "SEED", "MASTER_PORT"), "7")
    assert values(conf(**leaked)) == values(conf())


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(
        RunError, match="MEGATRON_NNODE: there is no such setting; the nearest is MEGATRON_NN"
    ):
        settings_text.prefixed({"MEGATRON_NNODE": "2"})
    # megatron-core has variables of its own.
    assert settings_text.prefixed({"MEGATRON_LOGGING_LEVEL": "20", "MEGATRON_SEED": "1"}) == {"SEED": "1"}


WRONG = [
    ({"MODEL": "xxl"}, "MODEL=xxl", "tiny, small, xl"),
    ({"NNODES": "08"}, "NNODES=08", "without leading zeros"),
    ({"NPROC_PER_NODE": "abc"}, "NPROC_PER_NODE=abc", "whole number"),
    ({"DP_SIZE": "3"}, "DP_SIZE × TENSOR_MP_SIZE × PIPELINE_MP_SIZE = 3 × 1 × 8 = 24", "DP_SIZE=4 would fit"),
    ({"WORLD_SIZE": "31"}, "WORLD_SIZE=31", "set it to 32"),
    ({"PARTITION": "0-11-8-8-8-8-5"}, "has 7 stages, PIPELINE_MP_SIZE is 8", "6-6-6-6-6-6-6-6 would fit"),
    ({"PARTITION": "0-11-8-8-8-8-5-1"}, "adds up to 49 layers, model xl has 48", "would fit"),
    ({"PARTITION": "8-0-8-8-8-8-8-0"}, "stage 1 has no layers", "would fit"),
    ({"PARTITION": "a-b"}, "PARTITION=a-b", "would fit"),
    ({"NUM_LAYERS": "40"}, "adds up to 48 layers, model xl has 40", "5-5-5-5-5-5-5-5 would fit"),
    ({"VIRTUAL_STAGES": "2"}, "has 8 stages, PIPELINE_MP_SIZE is 8, × VIRTUAL_STAGES = 16", "would fit"),
    (
        {"VIRTUAL_STAGES": "2", "PARTITION": "-".join(["3"] * 16), "GLOBAL_BATCH_SIZE": "16"},
        "multiple of PIPELINE_MP_SIZE=8 micro-batches per data-parallel rank, not 4",
        "GLOBAL_BATCH_SIZE=32 would fit",
    ),
    ({"VIRTUAL_STAGES": "0"}, "VIRTUAL_STAGES=0", "at least 1"),
    ({"GLOBAL_BATCH_SIZE": "66"}, "multiple of MICRO_BATCH_SIZE × DP_SIZE = 4", "64 would fit"),
    ({"TENSOR_MP_SIZE": "3", "NNODES": "24"}, "TENSOR_MP_SIZE=3", "1, 2, 4, 8, 16 fit"),
    ({"TENSOR_MP_SIZE": "4", "DP_SIZE": "1", "KV_GROUPS": "2"}, "2 key-value groups (KV_GROUPS)", "1, 2 fit"),
    (
        {
            "TENSOR_MP_SIZE": "3",
            "NNODES": "24",
            "NUM_HEADS": "15",
            "HIDDEN_SIZE": "1500",
            "VOCAB_SIZE": "50000",
        },
        "TENSOR_MP_SIZE=3: can't share 50048 rows of the embedding (VOCAB_SIZE)",
        "1, 2, 4, 8, 16, 17, 23, 32, 34, 46, 64 fit",
    ),
    ({"NUM_HEADS": "7"}, "NUM_HEADS=7: does not divide HIDDEN_SIZE=1600", "would"),
    ({"KV_GROUPS": "3"}, "KV_GROUPS=3: does not divide NUM_HEADS=16", "1, 2, 4, 8, 16 would"),
    ({"NUM_HEADS": "64", "POSITION": "rope"}, "heads of even width", "25"),
    ({"POSITION": "alibi"}, "POSITION=alibi", "learned, rope"),
    ({"SEQUENCE_PARALLEL": "true"}, "SEQUENCE_PARALLEL=true", "TENSOR_MP_SIZE of at least 2"),
    ({"RECOMPUTE": "some"}, "RECOMPUTE=some", "none, selective, full"),
    ({"ATTENTION": "fused"}, "ATTENTION=fused", "unfused, flash"),
    ({"ATTENTION": "flash", "PRECISION": "fp32"}, "no such kernel for PRECISION=fp32", "fp16 or bf16"),
    ({"SHARDED_OPTIMIZER": "1"}, "SHARDED_OPTIMIZER=1", "true or false"),
    ({"TRAIN_ITERS": "0"}, "TRAIN_ITERS=0", "at least 1"),
    ({"TRAIN_ITERS": "many"}, "TRAIN_ITERS=many", "whole number"),
    ({"PROFILE": "yes"}, "PROFILE=yes", "true or false"),
    ({"LR": "fast"}, "LR=fast", "a number"),
    ({"LR": "5"}, "LR=5", "between 0 and 1"),
    ({"PRECISION": "fp8"}, "PRECISION=fp8", "fp16, bf16, fp32"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000", "1 to 65535"),
    ({"SPLIT": "all"}, "SPLIT=all", "100,0,0"),
    ({"SAVE": "a\nb"}, "SAVE: has a line break", "one line"),
    ({"HOMOGENEOUS_CLUSTER": "false", "MASTER_NNODES": "8"}, "MASTER_NNODES=8", "give 1"),
]


@pytest.mark.parametrize(("settings", "fault", "fit"), WRONG, ids=lambda value: str(value)[:40])
def test_a_setting_at_fault_is_named_before_anything_starts(
    settings: dict[str, str], fault: str, fit: str
) -> None:
    defaults = dataclasses.asdict(Settings())
    given = {name: str(value) for name, value in defaults.items() if value is not None}
    given = {
        name.upper(): value.lower() if value in ("True", "False") else value for name, value in given.items()
    }
    del given["WORLD_SIZE"]
    with pytest.raises(RunError) as refused:
        from_environment(environment(given | settings))
    sentence = str(refused.value)
    assert fault in sentence and fit in sentence and "\n" not in sentence


def test_a_script_that_sources_a_bad_setting_ends_with_one_sentence_and_status_2() -> None:
    done = conf(MEGATRON_NNODES="08")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "_00_conf.sh: NNODES=08: give a whole number without leading zeros.\n"


def test_settings_are_checked_where_nothing_is_installed() -> None:
    """``_00_conf.sh`` runs on a cluster's login node, with the Python that is there."""
    command = [sys.executable, "-S", str(CONF.parent / "settings")]
    done = subprocess.run(command, env={"MEGATRON_MODEL": "tiny"}, capture_output=True, text=True)
    assert (done.returncode, "model tiny has 4" in done.stderr) == (2, True), done.stderr


def test_the_layout_is_that_of_the_partition() -> None:
    assert Settings().layout == "E|t*11|t*8|t*8|t*8|t*8|t*5|L"
    assert Settings(partition="3-2", pipeline_mp_size=2).layout == "Et*3|t*2L"
    assert Settings(model="tiny", partition="4", pipeline_mp_size=1).layout == "Et*4L"
    assert Settings().micro_batches == 16 and Settings().padded_vocabulary == 50_304


def test_chunks_are_in_the_order_of_the_layers() -> None:
    chunks = Settings(partition="2-1-2-1", pipeline_mp_size=2, virtual_stages=2)
    assert chunks.layers == (2, 1, 2, 1) and chunks.layout == "Et*2|t*1|t*2|t*1L"


def test_sizes_that_are_set_replace_those_of_the_model() -> None:
    assert Settings(hidden_size=2048, num_heads=32).size.ffn == 8192
    assert Settings(hidden_size=2048, num_heads=32).size.kv_groups == 32
    assert Settings(hidden_size=768, swiglu=True).size.ffn == 2048
    llama = Settings(model="llama3-8b").size
    assert (llama.ffn, llama.kv_groups, llama.tied_embedding) == (14_336, 8, False)
    assert Settings(model="llama3-8b", tied_embedding=True).size.tied_embedding


def test_a_file_of_settings_is_read_and_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "plan.conf"
    path.write_text("# a plan\nNNODES=2\nexport MODEL='tiny'  # small\n\nSAVE=\"/a b\"\nSLURM_QUEUE=\n")
    expected = {"NNODES": "2", "MODEL": "tiny", "SAVE": "/a b", "SLURM_QUEUE": ""}
    assert settings_text.read_file(path) == expected
    path.write_text(settings_text.write_lines(expected | {"SAVE": "it's $HOME `x`"}))
    assert settings_text.read_file(path)["SAVE"] == "it's $HOME `x`"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NNODES=2\nNODES=3\n", "line 2: 'NODES=3': give settings as NAME=VALUE, with a name of"),
        ("NNODES=$(touch made)\n", "line 1: give one setting as NAME=VALUE"),
        ("if true; then\n", "line 1: give one setting"),
        ("MODEL='tiny\n", "line 1"),
        ("MODEL=tiny NNODES=1\n", "line 1"),
        ('NNODES="${NNODES:-2}"\n', "line 1: give one setting as NAME=VALUE"),
    ],
)
def test_a_bad_file_of_settings_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.conf").write_text(text)
    with pytest.raises(RunError, match="plan.conf") as refused:
        settings_text.read_file(tmp_path / "plan.conf")
    assert words in str(refused.value) and not (tmp_path / "made").exists()


def test_relative_paths_start_where_they_were_given(tmp_path: Path) -> None:
    given = from_caller({"SAVE": "ckpt", "LOAD": "/x/../y", "MODEL": "tiny", "DATA_PATH": ""}, tmp_path)
    assert given == {"SAVE": f"{tmp_path}/ckpt", "LOAD": "/y", "MODEL": "tiny", "DATA_PATH": ""}
    found = complete({"MODEL": "tiny"} | given)
    root = CONF.parents[1]
    assert found["SAVE"] == f"{tmp_path}/ckpt" and found["LOG_DIR"] == f"{root}/log2"
    assert found["TRACE_OUTPUT_DIR"] == f"{root}/outputs" and found["HIDDEN_SIZE"] == "64"


def test_settings_in_the_environment_without_the_prefix_are_refused() -> None:
    """Also where a node is launched by hand, with a script that sources ``_00_conf.sh``."""
    with pytest.raises(RunError, match="MODEL=tiny in the environment: .* from MEGATRON_MODEL only"):
        settings_text.refuse_misplaced({"NNODES": "08", "CONTAINER_NAME": "x", "MODEL": "tiny"})
    settings_text.refuse_misplaced({"NNODES": "2", "MEGATRON_NNODES": "2", "LOAD": "x"})
    done = conf(NNODES="2")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        "_00_conf.sh: NNODES=2 in the environment: settings are read from MEGATRON_NN"
    )
    assert as_environment({"MODEL": "tiny"}) == {"MEGATRON_MODEL": "tiny"}


def test_what_fasop_exports_is_a_file_of_settings(tmp_path: Path) -> None:
    plans, exported = tmp_path / "plans.json", tmp_path / "anywhere.conf"
    plan = ["plan", "--model", "gpt2-xl", "--cluster", "paper-gpt2xl-het", "--top", "1", "--json"]
    plans.write_text(fasop(*plan))
    exported.write_text(fasop("export", str(plans)))
    found = complete(settings_text.read_file(exported))
    assert (found["HOMOGENEOUS_CLUSTER"], found["MODEL"], found["WORLD_SIZE"]) == ("false", "xl", "32")
    partition = "-".join(map(str, launched_layers(json.loads(plans.read_text())["plans"][0])))
    assert found["PARTITION"] == partition


def test_a_plan_of_a_llama_brings_its_sizes_nodes_and_options(tmp_path: Path) -> None:
    gpu = {"nodes": 4, "memory_gib": 78, "price_per_hour": 32, "inter_bandwidth": 4e11, "queue": "dgx"}
    gpu |= {"intra_bandwidth": 2e12, "hosts": ["a1", "a2", "a3", "a4"]}
    (tmp_path / "mine.yaml").write_text(
        json.dumps({"clusters": {"mine": {"gpus_per_node": 8, "gpus": {"A100": gpu}}}})
    )
    words = [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        str(tmp_path / "mine.yaml"),
        "--tp",
        "2",
        "--pp",
        "2",
    ]
    options = ["--recompute", "selective", "--zero", "1", "--sequence-parallel"]
    options += ["--attention", "flash"]
    (tmp_path / "plans.json").write_text(fasop(*words, *options, "--top", "1", "--json"))
    (tmp_path / "plan.conf").write_text(fasop("export", str(tmp_path / "plans.json")))
    found = complete(settings_text.read_file(tmp_path / "plan.conf"))
    wanted = {"RECOMPUTE": "selective", "SHARDED_OPTIMIZER": "true", "SEQUENCE_PARALLEL": "true"}
    wanted |= {
        "ATTENTION": "flash",
        "TENSOR_MP_SIZE": "2",
        "PIPELINE_MP_SIZE": "2",
        "NODELIST": "a1,a2,a3,a4",
        "SLURM_QUEUE": "dgx",
    }
    assert found.items() >= wanted.items()
    settings = from_environment(environment(found))
    assert settings.size == MODELS["llama3-8b"]


def fasop(*words: str) -> str:
    command = [sys.executable, "-m", "fasop", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONF.parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout


def launched_layers(plan: dict[str, Any]) -> list[int]:
    """A plan counts the embedding and the head as units of the first and last stage."""
    first, *inner, last = plan["partition"]
    return [first - 1, *inner, last - 1]
