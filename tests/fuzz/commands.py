"""Damaged inputs of every command but ``convert``: sets of .et files, plans, YAML, tables of networks and
GPUs, rows of published runs, configurations of models and logs of megatron_lm.

An input is one good folder with one file damaged, read by one command. Right is an exit status of 0, 1 or 2
without a traceback, and for a refusal at least one sentence; a changed .et file is named by whoever reads it.
Some commands run as processes of their own, most in this one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.fasop import test_mutated_inputs as plans
from tests.fuzz import mutations
from tests.generator import Features, generate
from tests.megatron_lm import written_logs

ROOT = Path(__file__).resolve().parents[2]
GPU = {
    "name": "X1", "vendor": "nvidia", "units": 108, "clock": "1410 MHz", "watts": 400, "cache": "40 MB",
    "memory": "2039 GB/s", "kind": "HBM", "peaks": {"16 bit": "312 TFLOP/s", "float": "19.5 TFLOP/s"},
    "source": "a test",
}  # fmt: skip
PLANS = {"plans": [{"placement": ["X1"], "cluster": {"gpus": [{"name": "X1"}], "gpus_per_node": 2}}]}
ROWS = """source,system,gpu,num_gpus,precision,model,task,gbs,mbs,seq,tp,pp,cp,vp,ep,step_s
Megatron-Bridge,DGX-H100,H100,8,BF16,Llama3 8B,Pre-Training,128,1,8192,1,1,2,1,1,9.49
Megatron-Bridge,DGX-H100,H100,64,FP8-CS,Llama3 70B,Pre-Training,128,1,8192,4,8,1,5,1,10.13
"""
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
# What is damaged → commands. RUN is a set of .et files, IN a folder of the other inputs, OUT one to write to.
ON_RUNS = (
    "replay RUN", "predict RUN --scale mm=2", "predict RUN --bandwidth 10Gbit/s", "predict RUN --dp 4",
    "report RUN -o OUT/r.html", "validate RUN", "info RUN", "diagnose RUN", "stragglers RUN",
    "export RUN --format csv -o OUT/e", "export RUN -o OUT/e", "scale RUN --dp 4 -o OUT/s",
    "astra RUN -o OUT/b --topology dgx-h100", "compare RUN BASE",
)  # fmt: skip
ON_FILES = {
    "gpu.yaml": tuple(
        f"chakra-et predict RUN --gpu {pair}" for pair in ("A100:IN/gpu.yaml", "IN/gpu.yaml:H100")
    ),
    "network.json": ("chakra-et predict RUN --network IN/network.json",),
    "topology.json": (
        "chakra-et predict RUN --topology IN/topology.json",
        "chakra-et astra RUN -o OUT/b --topology IN/topology.json",
    ),
    "rows.csv": ("fasop evaluate --rows IN/rows.csv",),
    "config.json": ("fasop plan --model IN/config.json --cluster IN/clusters.yaml:mine --global-batch 8",),
    "local-7/n1.out": tuple(f"megatron_lm {each} local-7" for each in ("get_result", "picture", "report")),
    "local-7/n2.err": ("megatron_lm get_result local-7",),
    "local-7/n1.gpu": ("megatron_lm get_result local-7",),
    "local-7/n2.state": ("megatron_lm get_result local-7",),
    **dict.fromkeys(("models.yaml", "clusters.yaml", "costs.json", "layouts.yaml", "plans.json"), ("fasop",)),
}  # fmt: skip


@cache
def good() -> Path:
    """A folder with ``runs`` (converted), ``other`` (all other inputs); the same for all inputs."""
    folder = Path(tempfile.mkdtemp(prefix="good"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    runs, other = folder / "runs", folder / "other"
    runs.mkdir()
    other.mkdir()
    for rank in (0, 1):
        nccl = ("allreduce", "_allgather_base")
        features = Features(seed=3, rank=rank, world_size=2, operators=2, depth=2, nccl=nccl, devices=1)
        generate(features).write(runs)
    in_process("chakra-et", ["convert", str(runs)])  # status 1: both have one process id
    plans.write(other, plans.documents(other))
    (other / "gpu.yaml").write_text(yaml.safe_dump(GPU))
    (other / "topology.json").write_text(json.dumps(PLANS))
    (other / "network.json").write_text(json.dumps({"latency": "5us", "bandwidth": "10Gbit/s"}))
    (other / "rows.csv").write_text(ROWS)
    (other / "config.json").write_text(json.dumps(MODEL))
    lines = "".join(
        written_logs.iteration_line(written_logs.simple_iteration(n, 4.5 if n == 1 else 1.4))
        for n in range(1, 30)
    )
    settings = "NODE_RANK: {}\nMODEL: small\nWORLD_SIZE: 8\nGLOBAL_BATCH_SIZE: 64\nPROFILE: false\nstart\n"
    for rank, node in enumerate(("n1", "n2")):
        state = {"state": "exited 0\n", "err": "", "gpu": ""}
        written_logs.write_node(other / "local-7", node, out=settings.format(rank) + lines, **state)
    return folder


def in_process(program: str, words: list[str]) -> tuple[object, str]:
    """(exit status or traceback, what was printed) of one command in this process."""
    package = importlib.import_module(f"{program.replace('-', '_')}.__main__")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            return package.main(words), printed.getvalue()
        except SystemExit as stop:
            return stop.code, printed.getvalue()
        except BaseException:  # whatever it is, it is the answer
            return traceback.format_exc(limit=-4), printed.getvalue()


def in_a_process(program: str, words: list[str]) -> tuple[object, str]:
    """The same by a process of its own."""
    launch = {
        "chakra-et": ["-m", "chakra_et"],
        "fasop": ["-m", "fasop"],
        "megatron_lm": [str(ROOT / "megatron_lm")],
    }
    done = subprocess.run(
        [sys.executable, *launch[program], *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=120,
    )  # fmt: skip
    return ("a traceback" if "Traceback (most recent" in done.stdout else done.returncode), done.stdout


def judge(random: Random, work: Path, as_process: bool) -> tuple[str, Callable[[], tuple[str, str]]]:
    """What the input is, and a function that runs its command: (outcome, what is wrong, "" for nothing)."""
    base = good()
    shutil.copytree(base / "runs", work / "runs")
    shutil.copytree(base / "other", work / "in")
    (work / "out").mkdir()
    layouts = work / "in/layouts.yaml"
    layouts.write_text(layouts.read_text().replace(f"{base}/other", f"{work}/in"))
    place = {"RUN": work / "runs/run", "IN": work / "in", "OUT": work / "out", "BASE": base / "runs/run"}
    on_runs = random.random() < 0.5
    if on_runs:
        names = [
            path.name
            for path in sorted((work / "runs").glob("run*"))
            if path.name not in ("run.et", "run_device.json")
        ]
        name = random.choice([each for each in names if each.endswith(".et")] * 3 + names)
        command = f"chakra-et {random.choice(ON_RUNS)}" + " --allow-missing-ranks" * (random.random() < 0.5)
        path = work / "runs" / name
    else:
        name = random.choice(sorted(ON_FILES))
        command, path = random.choice(ON_FILES[name]), work / "in" / name
    before = path.read_bytes()
    how = damage(random, path)
    program, *words = command.split()
    if words:
        words = [word.replace(key, str(value), 1) for word in words for key, value in [_key(word, place)]]
    else:
        words = plans.command(work / "in", name, random.randrange(4), 1 + random.randrange(3))
    if "info RUN" in command or "validate RUN" in command:
        words = [str(path) if word == str(place["RUN"]) and name.endswith(".et") else word for word in words]

    def run() -> tuple[str, str]:
        os.environ["MEGATRON_LOG_DIR"] = str(work / "in")
        status, said = (in_a_process if as_process else in_process)(program, words)
        if status not in (0, 1, 2):
            return "raised", f"{status}\n{said[-1_500:]}"
        if status and "error: " not in said and not any(line.endswith(".") for line in said.splitlines()):
            return f"exit status {status}", f"no sentence: {said[-300:]}"
        changed = on_runs and name.endswith(".et") and path.is_file() and path.read_bytes() != before
        if changed and status == 0 and "isn't the file that the conversion" not in said:
            return "exit status 0", f"a changed file, and nobody said so: {said[-300:]}"
        return f"exit status {status}", ""

    return f"{command}: {name}, {how}{', as a process' * as_process}", run


def _key(word: str, place: dict[str, Path]) -> tuple[str, Path]:
    return next(((key, value) for key, value in place.items() if key in word), ("RUN", place["RUN"]))


def damage(random: Random, path: Path) -> str:
    """Change a file in place, or what there is of it; what was done."""
    roll = random.random()
    if roll < 0.05:
        path.unlink()
        special: dict[str, Callable[[], Any]] = {
            "lost": lambda: None,
            "a folder": path.mkdir,
            "a link to itself": lambda: path.symlink_to(path),
            "a pipe": lambda: os.mkfifo(path),
            "endless": lambda: path.symlink_to("/dev/zero"),
        }
        how = random.choice(sorted(special))
        special[how]()
        return how
    text = path.read_bytes()
    if roll < 0.5 and path.suffix in (".json", ".yaml"):
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        changed, how = plans.mutated(document, random)
        path.write_text(json.dumps(changed) if path.suffix == ".json" else yaml.safe_dump(changed))
        return how
    if roll < 0.6 and path.suffix == ".yaml":
        how, bomb = random.choice(sorted(YAML_BOMBS.items()))
        path.write_text(bomb if random.random() < 0.5 else text.decode() + "\n" + bomb)
        return how
    kinds = mutations.BYTES if path.suffix != ".et" else (
        mutations.cut_end, mutations.cut_out, mutations.repeat, mutations.flip, mutations.zero_block
    )  # fmt: skip
    done = []
    for _ in range(random.choice((1, 1, 2))):
        change = random.choice(kinds)
        text = change(random, text)
        done.append(change.__name__)
    path.write_bytes(text)
    return ", ".join(done)


YAML_BOMBS = {
    "brackets": "a: " + "[" * 30_000,
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    "merges": "a: &a {x: 1}\n" + "".join(
        f"m{n}: &m{n}\n  <<: [{', '.join([f'*m{n - 1}' if n else '*a'] * 9)}]\n" for n in range(9)
    ),
    "a python object": "a: !!python/object/apply:os.system ['true']",
    "a date": "a: 2026-11-23",
    "two documents": "---\na: 1\n---\nb: 2",
    "keys twice": "models: {}\nmodels: {}",
}  # fmt: skip
