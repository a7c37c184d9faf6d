"""The parts of scripts/gpu_check.sh that need a checkout: training scripts, planner, peers."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et.cost import gpus  # noqa: E402
from chakra_et.doctor import command  # noqa: E402
from chakra_et.doctor.captures import converted, judged  # noqa: E402
from chakra_et.doctor.results import Line, at_most, equal, not_run  # noqa: E402
from chakra_et.errors import TraceError  # noqa: E402
from chakra_et.files import write_json  # noqa: E402

SIZES = {"gpt2-345m": (24, 1024, 16), "gpt2-762m": (36, 1280, 20), "gpt2-1.5b": (48, 1600, 25)}
"""Layers, width and heads of what the planner predicts."""
REHEARSED = {"rehearsal": (2, 128, 2)}


def training(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """GPT-2 small and BERT base on sample data, in bf16 on a GPU, traced and converted."""
    for family, size in (("gpt2", "gpt2"), ("bert", "bert-base-uncased")):
        name = f"{family}_check"
        words = [
            *("--dataset", "sample", "--max-steps", "10", "--enable-tracing", "--no-convert"),
            *("--trace-output-dir", str(folder), "--trace-name", name, "--skip-eval", "--save-steps", "0"),
            *("--save-dir", str(folder / "checkpoints"), "--max-seq-length", "512" if on_gpu else "64"),
            *(["--bf16", "--model-name", size, "--batch-size", "8"] if on_gpu else ["--batch-size", "1"]),
            *([] if on_gpu else ["--model-name", "tiny"]),
        ]
        status, said = _run([str(ROOT / family / "train.py"), *words], folder)
        if status:
            yield equal(name, f"status {status}: {said}", "a traced run")
            continue
        try:
            run = converted(folder, name)
            manifest = json.loads((folder / f"{name}_manifest.json").read_text())
            untraced = list(manifest["ranks"][0].get("untraced_step_times_us", {}).values())
            middle = statistics.median(untraced or [float("nan")]) / 1e3
            yield from judged(run, middle, on_gpu)
        except (RuntimeError, OSError, LookupError, TraceError) as error:
            yield equal(name, f"failed: {error}", "a run that converts")


def planner(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """Layer costs measured by ``fasop profile``, then plans against steps of whole models."""
    import torch

    seq, vocab = (1024, 50257) if on_gpu else (32, 512)
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu else 16.0
    device = torch.cuda.get_device_name(0) if on_gpu else "CPU"
    gpu = gpus.by_driver(device) or device.replace(" ", "-")  # a known GPU's optimizer has a time
    node = {"nodes": 1, "memory_gib": round(memory, 1), "price_per_hour": 1.0}
    node |= {"inter_bandwidth": 1e9, "intra_bandwidth": 1e9}
    write_json(folder / "cluster.yaml", {"clusters": {"here": {"gpus_per_node": 1, "gpus": {gpu: node}}}})
    for name, (layers, hidden, heads) in (SIZES if on_gpu else REHEARSED).items():
        sizes = {"hidden": hidden, "seq": seq, "layers": layers, "vocab": vocab, "heads": heads}
        write_json(folder / "models.yaml", {"models": {name: sizes | {"global_batch": 4}}})
        given = ["--model", name, "--models-file", "models.yaml"]
        batches = ["1", "2", "4"] if on_gpu else ["1"]
        costs = ["--gpu-name", gpu, "--output", "costs.json", "--repeat", "10" if on_gpu else "2"]
        precision = ["--precision", "bfloat16"] if on_gpu else []
        status, said = _run(["-m", "fasop", "profile", *given, "--mbs", *batches, *costs, *precision], folder)
        if status:
            yield equal(f"{name}: profile", f"status {status}: {said}", "layer costs")
            continue
        for batch in batches:
            words = ["-m", "fasop", "plan", *given, "--cluster", "cluster.yaml", "--costs", "costs.json"]
            words += ["--json", "--mbs", batch, "--global-batch", batch, "--attention", "flash", "--oom"]
            words += [] if on_gpu else ["--precision", "fp32"]
            status, said = _run(words, folder, whole=True)
            if status:
                yield equal(f"{name}, micro-batch {batch}: plan", said[-200:], "a plan")
                continue
            found = json.loads(said)["plans"][0]
            told, memory = found["step_time"], found["stage_memory"][0]
            taken, used = whole_step(layers, hidden, heads, vocab, seq, int(batch))
            what = f"{name}, micro-batch {batch}: planned"
            step = f"{what} {told * 1e3:.1f} of {taken * 1e3:.1f} ms"
            yield at_most(step, abs(told / taken - 1), 0.05, on_gpu)
            if on_gpu:
                yield at_most(f"{what} {memory:.1f} of {used:.1f} GiB", abs(memory / used - 1), 0.05)
            else:
                yield not_run(f"{what} {memory:.3f} GiB", "needs a GPU's count of memory")


def whole_step(layers: int, hidden: int, heads: int, vocab: int, seq: int, batch: int) -> tuple[float, float]:
    """(seconds of a training step of transformers' GPT-2, the most GiB that PyTorch held for it).

    On a GPU with 16-bit weights, and fp32 weights, gradients and moments beside them, as Megatron trains; on
    a CPU all in fp32.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from chakra_et.doctor.workload import device, step_ms

    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=seq, vocab_size=vocab,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    where = device()
    on_gpu = where.type == "cuda"
    model = GPT2LMHeadModel(config).to(where, torch.bfloat16 if on_gpu else torch.float32)
    weights = list(model.parameters())
    main = [weight.detach().float().clone() if on_gpu else weight for weight in weights]
    optimizer = torch.optim.AdamW(main, fused=True)
    tokens = torch.randint(0, vocab, (batch, seq), device=where)

    def kept(weight: torch.Tensor, of: torch.Tensor) -> None:
        of.grad = weight.grad.float() if of.grad is None else of.grad.add_(weight.grad)
        weight.grad = None

    if on_gpu:
        for weight, of in zip(weights, main, strict=True):
            weight.register_post_accumulate_grad_hook(lambda weight, of=of: kept(weight, of))
        gc.collect()
        torch.cuda.empty_cache()  # what the steps before have left
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        for of in main:
            if of.grad is not None:
                of.grad.zero_()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        if on_gpu:
            torch._foreach_copy_([weight.detach() for weight in weights], main)

    (taken,) = step_ms([step], 5 if on_gpu else 1, 3)
    return taken / 1e3, torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0


def peers(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """Other tools on the traces of part "capture", where they are installed."""
    capture = folder.parent / "capture"
    analysis = "import sys; from hta.trace_analysis import TraceAnalysis as T; "
    analysis += "T(trace_files={0: sys.argv[1]}).get_temporal_breakdown(visualize=False)"
    conversion = ["-m", "chakra_et", "convert", "--name", "eager", "--engine", "mlcommons", "--dir"]
    conversion += [str(capture), "-o", str(folder)]
    for what, packages, words in (
        ("HTA's TraceAnalysis", ("hta",), ["-c", analysis, str(capture / "eager_device.json")]),
        ("MLCommons' converter", ("chakra", "et_replay"), conversion),
    ):
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            yield not_run(what, f"the package {missing[0]} isn't installed")
        elif not (capture / "eager_device.json").exists():
            yield not_run(what, "run --part capture first")
        else:
            status, said = _run(words, folder)
            yield equal(what, said if status else "reads the trace", "reads the trace")


def _run(words: list[str], folder: Path, whole: bool = False) -> tuple[int, str]:
    """(status, last line, or all that it printed) of a Python program, without a hub."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    if whole and not ran.returncode:
        return 0, ran.stdout
    said = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    return ran.returncode, said[-1] if said else ""


command.EXTRA.update({"training": training, "planner": planner, "peers": peers})

if __name__ == "__main__":
    sys.exit(command.main())
