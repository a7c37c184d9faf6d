"""The parts of scripts/gpu_check.sh that need a checkout: training scripts, planner, peers."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et.cost import gpus  # noqa: E402
from chakra_et.doctor import command  # noqa: E402
from chakra_et.doctor.captures import converted, judged  # noqa: E402
from chakra_et.doctor.results import Line, at_most, equal, guarded, not_run  # noqa: E402
from chakra_et.doctor.workload import WAIT_STEPS, device, graphed, step_ms  # noqa: E402
from chakra_et.errors import TraceError  # noqa: E402
from fasop.inputs.clusters import Cluster, Gpu  # noqa: E402
from fasop.inputs.costs import write_costs  # noqa: E402
from fasop.inputs.models import Model  # noqa: E402
from fasop.plans.options import Options  # noqa: E402
from fasop.plans.shapes import Shape  # noqa: E402
from fasop.profiling.measure import Runs, add_gradient, measured  # noqa: E402
from fasop.search.planner import Planner  # noqa: E402

SIZES = {
    "gpt2-345m": (1024, 1024, 24, 50257, 16, 4),
    "gpt2-762m": (1280, 1024, 36, 50257, 20, 4),
    "gpt2-1.5b": (1600, 1024, 48, 50257, 25, 4),
}
"""What the planner predicts: width, tokens, layers, words, heads and batch."""
REHEARSED = {"rehearsal": (128, 32, 2, 512, 2, 4)}


def training(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """GPT-2 small and BERT base on sample data, in bf16 on a GPU, traced and converted."""
    for family, size in (("gpt2", "gpt2"), ("bert", "bert-base-uncased")):
        name = f"{family}_check"
        words = [
            *("--dataset", "sample", "--max-steps", "16", "--enable-tracing", "--no-convert"),
            *("--trace-wait-steps", str(WAIT_STEPS)),
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
            untraced = json.loads(str(run.graph.traces[0].metadata["steps_micros"]))["untraced"]
            yield from judged(run, untraced / 1e3, on_gpu)
        except (RuntimeError, OSError, LookupError, TraceError) as error:
            yield equal(name, f"failed: {error}", "a run that converts")


def planner(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """Layer costs measured as by ``fasop profile``, then plans by them against steps of whole models."""
    import transformers  # noqa: F401

    gc.freeze()  # each graph collects garbage
    for name, sizes in (SIZES if on_gpu else REHEARSED).items():
        yield from guarded(name, _planned(Model(name, *sizes), folder, on_gpu))


def _planned(model: Model, folder: Path, on_gpu: bool) -> Iterator[Line]:
    import torch

    device = torch.cuda.get_device_name(0) if on_gpu else "CPU"
    gpu = Gpu(gpus.by_driver(device) or device.replace(" ", "-"), 1.0, 0, 1e9, 1e9)
    batches = (1, 2, 4) if on_gpu else (1,)
    runs = Runs("cuda", "bfloat16", 2, 5) if on_gpu else Runs("cpu", "float32", 1, 2)
    costs = measured(model, (1,), batches, runs, gpu.name)
    write_costs(folder / f"{model.name}.json", costs)
    options = Options(attention="flash", unfused=("loss",), precision="mixed" if on_gpu else "fp32")
    measure = whole_steps(model, on_gpu)
    for batch in batches:
        what, held = f"{model.name}, micro-batch {batch}", [0.0, 0.0, 0.0]
        given, here = replace(model, global_batch=batch), Cluster("here", 1, (gpu,), (1,))
        for way, graphs in (("eager", False), ("by a CUDA graph", True))[: 1 + on_gpu]:
            planner = Planner(given, here, [costs], replace(options, cuda_graphs=graphs))
            plan = planner.estimate(Shape(1, 1, 1, batch), (gpu.name,), (model.layers + 2,))
            taken, *memory = measure(batch, graphs)
            held = held if held[0] else memory
            step = f"{what}, {way}: planned {plan.step_time * 1e3:.1f} of {taken:.1f} ms"
            # Eager blocks of transformers need more of the host than the layers that were measured.
            yield at_most(step, abs(plan.step_time * 1e3 / taken - 1), 0.05, graphs)
        told = plan.stage_memory[0]
        if on_gpu:
            parts = f"{held[1]:.1f} PyTorch's, {held[2]:.1f} in tensors"
            gib = f"{what}: planned {told:.1f} of {held[0]:.1f} GiB, {parts}"
            yield at_most(gib, abs(told / held[0] - 1), 0.05)
        else:
            yield not_run(f"{what}: planned {told:.3f} GiB", "needs a GPU's count of memory")


def whole_steps(given: Model, on_gpu: bool) -> Callable[[int, bool], tuple[float, ...]]:
    """Training of transformers' GPT-2 without dropout: (micro-batch, whether by a CUDA graph) → (ms of a
    step, GiB of the GPU that are taken, the most that PyTorch held, and in tensors).

    On a GPU with 16-bit weights, and fp32 weights, gradients and moments beside them, as Megatron trains; on
    a CPU all in fp32.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=given.layers, n_embd=given.hidden, n_head=given.heads, n_positions=given.seq,
        vocab_size=given.vocab, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    _forget(on_gpu)
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    with device():
        model = GPT2LMHeadModel(config)
    torch.set_default_dtype(torch.float32)
    weights = list(model.parameters())
    main = [weight.detach().float() if on_gpu else weight for weight in weights]
    optimizer = torch.optim.AdamW(main, fused=True, capturable=on_gpu)
    for weight, of in zip(weights, main, strict=True):
        of.grad = torch.zeros_like(of)
        if on_gpu:
            weight.register_post_accumulate_grad_hook(functools.partial(add_gradient, of.grad))

    def step(tokens: torch.Tensor) -> None:
        of = model.transformer
        x = of.wte(tokens) + of.wpe(torch.arange(given.seq, device=tokens.device))
        for block in of.h:  # the model itself looks at positions, for which the host waits
            x = block(x)
            x = x if isinstance(x, torch.Tensor) else x[0]
        logits = model.lm_head(of.ln_f(x)).float().view(-1, given.vocab)
        torch.nn.functional.cross_entropy(logits, tokens.view(-1)).backward()
        torch.nn.utils.clip_grad_norm_(main, 1.0)
        optimizer.step()
        if on_gpu:
            torch._foreach_copy_([weight.detach() for weight in weights], main)
        optimizer.zero_grad(set_to_none=False)

    def measure(batch: int, graphs: bool) -> tuple[float, ...]:
        _forget(on_gpu)
        call = functools.partial(step, torch.randint(0, given.vocab, (batch, given.seq), device=device()))
        (taken,) = step_ms([graphed(call) if graphs else call], 3 if on_gpu else 1, 3 if graphs else 2)
        if not on_gpu:
            return taken, 0.0, 0.0, 0.0
        free, whole = torch.cuda.mem_get_info()
        most = whole - free, torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return taken, *(size / 2**30 for size in most)

    return measure


def _forget(on_gpu: bool) -> None:
    """What was measured before."""
    import torch

    gc.collect()
    if on_gpu:
        torch._C._cuda_clearCublasWorkspaces()  # each stream that a graph was recorded on has its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


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


def _run(words: list[str], folder: Path) -> tuple[int, str]:
    """(status, last line) of a Python program, without a hub."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    said = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    return ran.returncode, said[-1] if said else ""


command.EXTRA.update({"training": training, "planner": planner, "peers": peers})

if __name__ == "__main__":
    sys.exit(command.main())
