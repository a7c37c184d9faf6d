#!/usr/bin/env python3
"""Measure kernels and training steps on this GPU, as tables that judge the models of ``chakra_et/cost``.

    python benchmarks/gpu_truth.py -o FOLDER --kinds attention=10,products=6,8-bit=8,single=8,steps=15
    python benchmarks/cost_accuracy.py --tables FOLDER

The files have the names, columns and ways of timing of ../shared/data/truth (its README.md), so that the
models, which were fitted to those, can be judged by kernels of another library on another machine:

- attention (sdpa.csv): ``scaled_dot_product_attention`` in bfloat16, forward, and backward with forward, by
  what PyTorch chooses ("torch") and by FlashAttention-2 ("flash"). For each new shape cuDNN takes half a
  second of the CPU;
- products (gemm.parquet, bfloat16): ``F.linear`` of six sets of operands in a CUDA graph;
- 8-bit (gemm.parquet): ``torch._scaled_mm`` of six sets, with a scale for each row or for each tensor; the
  kind "quantised" has quantisation of each row of A by one kernel and the product (fp8);
- single (neusight_kernels.parquet): fp32 kernels called one by one, the mean of the 5 fastest of 25;
- steps (neusight_steps.csv): Hugging Face models in fp32, eager attention, forward and backward.

Shapes are drawn with a seed until the seconds of their kind are over. Needs pandas and transformers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

from chakra_et.predict.measure_gpu import SETS, call_micros

ROWS = [*range(1, 18), *(n + odd for n in (32, 48, 64, 80, 96, 112, 128, 160, 192, 224) for odd in (0, 1))]
ROWS += [n + odd for n in (256, *range(512, 4353, 256)) for odd in (0, 1)] + [8192, 16384, 32768]
SIDES = [32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192]
SIDES += [10240, 12288, 16384, 51200, 65536]
MOST_FLOP, MOST_BYTES, LARGEST_8_BITS, MOST_MICROS, SHORT = 5e12, 2e9, 448.0, 1e5, 2e10
MODELS = {  # layers, hidden, heads, vocabulary, sequence, batches
    "bert_large": (24, 1024, 16, 30522, 512, (2, 8, 16)),
    "gpt2_large": (36, 1280, 20, 50257, 1024, (1, 4, 8)),
    "opt_13": (24, 2048, 32, 50272, 2048, (1, 2)),
    "gpt3_xl": (24, 3072, 24, 50257, 2048, (1,)),
    "gpt3_27": (32, 2560, 32, 50257, 2048, (1,)),
}
TWO = {"add": torch.add, "mul": torch.mul, "div": torch.div, "pow": torch.pow}
ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "addu": lambda x: x + 1.5, "mulu": lambda x: x * 1.5, "divu": lambda x: x / 1.5, "powu": lambda x: x**1.5,
    "relu": torch.relu, "tanh": torch.tanh, "gelu": functional.gelu,
}  # fmt: skip
Row = dict[str, Any]
Call = Callable[[], object]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
MakeCall = Callable[[Pairs], Call]
SOURCES: dict[str, Callable[[], Any]] = {
    "torch": nullcontext,
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}


def gemms(random: np.random.Generator, kinds: Mapping[tuple[str, str], MakeCall]) -> Iterator[Row]:
    """``kinds``: (type of number, framework) → what makes a product's call of some pairs."""
    while True:
        m, (n, k) = int(random.choice(ROWS)), (int(side) for side in random.choice(SIDES, 2))
        if 2.0 * m * n * k > MOST_FLOP or 2.0 * SETS * (m * k + n * k + m * n) > 6 * MOST_BYTES:
            continue
        of: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        pairs = [(torch.randn(m, k, **of), torch.randn(n, k, **of)) for _ in range(SETS)]
        for (dtype, framework), make in kinds.items():
            call = make(pairs)
            row = {"dtype": dtype, "framework": framework, "m": m, "n": n, "k": k}
            yield row | {"latency_us": call_micros(call, "cuda", 6) / SETS}


def products(pairs: Pairs) -> Call:
    return lambda: [functional.linear(a, b) for a, b in pairs]


def alone(pairs: Pairs, dim: int | None) -> Call:
    """The products of numbers in 8 bits, with a scale for each row (``dim`` 1) or each tensor."""

    def small(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.abs().amax(dim, keepdim=True) if dim else x.abs().max()
        scale = largest.float() / LARGEST_8_BITS
        return (x / scale).to(torch.float8_e4m3fn), scale

    sides = [(*small(a), *small(b)) for a, b in pairs]
    return lambda: [
        torch._scaled_mm(a, b.t(), by, b_by.t(), out_dtype=torch.bfloat16) for a, by, b, b_by in sides
    ]


def quantised(pairs: Pairs) -> Call:
    """The products of A, quantised by rows in the call, and B, quantised before."""
    weights = []
    for _, b in pairs:
        scale = b.abs().amax(1, keepdim=True).float() / LARGEST_8_BITS
        weights.append(((b / scale).to(torch.float8_e4m3fn).t(), scale.t().contiguous()))

    def call() -> None:
        for (a, _), (b, scale) in zip(pairs, weights, strict=True):
            m, k = a.shape
            small = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=a.device)
            scales = torch.empty(m, 1, device=a.device)
            block = min(triton.next_power_of_2(k), 4096)
            rows_to_8_bits[(m,)](a, small, scales, k, LARGEST_8_BITS, BLOCK=block)
            torch._scaled_mm(small, b, scales, scale, out_dtype=torch.bfloat16)

    return call


if triton is not None:

    @triton.jit
    def rows_to_8_bits(x, out, scales, k, most, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Each row of x over its largest number, in 8 bits, and its scale."""
        begin_of_row = tl.program_id(0).to(tl.int64) * k
        at = tl.arange(0, BLOCK)
        largest = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, k, BLOCK):
            inside = begin + at < k
            part = tl.load(x + begin_of_row + begin + at, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(part))
        scale = tl.maximum(tl.max(largest, 0), 1e-10) / most
        tl.store(scales + tl.program_id(0), scale)
        for begin in range(0, k, BLOCK):
            inside = begin + at < k
            part = tl.load(x + begin_of_row + begin + at, mask=inside, other=0.0).to(tl.float32) / scale
            tl.store(out + begin_of_row + begin + at, part.to(tl.float8e4nv), mask=inside)


def single(random: np.random.Generator) -> Iterator[Row]:
    torch.backends.cuda.matmul.allow_tf32 = False
    while True:
        table = str(random.choice(["linear", "bmm", "elem", "softmax", "ln"]))
        found = fp32_product(random, table) if table in ("linear", "bmm") else rows_of_numbers(random, table)
        if found:
            yield {"table": table} | found


def fp32_product(random: np.random.Generator, table: str) -> Row | None:
    low = 9 if table == "linear" else 6
    m, n, k = (int(2 ** random.uniform(low, 13) / 64) * 64 for _ in range(3))
    batch = int(2 ** random.uniform(3.6, 12)) if table == "bmm" else 1
    if batch * max(m * n, m * k, n * k) * 4.0 > MOST_BYTES or 2.0 * batch * m * n * k > MOST_FLOP / 5:
        return None
    a, b = (torch.randn(batch, *of, device="cuda") for of in ((m, k), (k, n)))
    linear = torch.nn.Linear(k, n, device="cuda").requires_grad_(False)
    took = one_by_one(lambda: torch.bmm(a, b) if table == "bmm" else linear(a[0]))
    return {"op": table, "batch": batch, "m": m, "n": n, "k": k, "latency_us": took}


def rows_of_numbers(random: np.random.Generator, table: str) -> Row | None:
    rows, cols = int(2 ** random.uniform(13, 21)), int(2 ** random.uniform(9.6, 14) / 256) * 256
    if rows * cols * 4.0 > MOST_BYTES:
        return None
    x, weight = torch.zeros(rows, cols, device="cuda"), torch.ones(cols, device="cuda")
    op = str(random.choice([*TWO, *ONE])) if table == "elem" else table
    if op in TWO:
        other = torch.zeros_like(x)
        took = one_by_one(lambda: TWO[op](x, other))
    elif op in ONE:
        took = one_by_one(lambda: ONE[op](x))
    elif op == "ln":
        took = one_by_one(lambda: functional.layer_norm(x, (cols,), weight, weight))
    else:
        took = one_by_one(lambda: torch.softmax(x, -1))
    return {"op": op, "rows": rows, "cols": cols, "latency_us": took}


def one_by_one(call: Callable[[], object], times: int = 25, kept: int = 5) -> float:
    """µs by CUDA events around each call, the mean of the fastest."""
    found: list[float] = []
    while len(found) < times and (len(found) < kept + 1 or sum(found) < MOST_MICROS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return mean(sorted(found)[:kept])


def attention_shapes(random: np.random.Generator) -> Iterator[Row]:
    while True:
        heads, size = int(random.choice([4, 8, 16, 32])), int(random.choice([64, 128]))
        shared = heads // int(random.choice([1, 1, 4]))
        length = int(random.choice([128, 256, 512, 1024, 2048, 4096, 8192]))
        batch = int(2 ** random.integers(0, 6))
        causal = int(random.integers(0, 2))
        if batch * length <= 32768:
            shape = {"batch": batch, "heads": heads, "kv_heads": shared, "length": length}
            yield shape | {"head_dim": size, "causal": causal}


def attention_calls(shape: Row) -> tuple[Call, Call]:
    """Forward, and backward with forward."""
    batch, heads, shared, length, size, causal = shape.values()
    of: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, heads, length, size, requires_grad=True, **of)
    k, v = (torch.randn(batch, shared, length, size, requires_grad=True, **of) for _ in range(2))
    grad = torch.randn(batch, heads, length, size, **of)

    def out() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=bool(causal), enable_gqa=heads != shared
        )

    def forward() -> None:
        with torch.no_grad():
            out()

    return forward, lambda: torch.autograd.grad(out(), (q, k, v), grad)


def attention(random: np.random.Generator) -> Iterator[Row]:
    for shape in attention_shapes(random):
        for source, way in SOURCES.items():
            with way():
                forward, both = (behind_one_another(call, shape) for call in attention_calls(shape))
            yield {"kernel_source": source} | shape | {"forward_us": forward, "both_us": both}


def behind_one_another(call: Call, shape: Row) -> float:
    """µs of a call, of ten in a CUDA graph where they are short: a host may take 4 µs to launch a graph."""
    scores = shape["batch"] * shape["heads"] * shape["length"] ** 2 * shape["head_dim"]
    times = 10 if scores < SHORT else 1
    return call_micros(lambda: [call() for _ in range(times)], "cuda", 6) / times


def steps(random: np.random.Generator) -> Iterator[Row]:
    for name, (*sizes, batches) in MODELS.items():
        sequence = sizes[-1]
        with torch.device("cuda"):
            model = build(name, *sizes).train()
        for batch in batches:
            tokens = torch.ones(batch, sequence, dtype=torch.long, device="cuda")
            labels = {"labels": tokens} | ({"next_sentence_label": tokens[:, 0]} if "bert" in name else {})
            parts: list[list[float]] = []
            for _ in range(6):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                events[0].record()
                out = model(tokens, **labels)
                events[1].record()
                out.loss.backward()
                events[2].record()
                torch.cuda.synchronize()
                del out
                parts.append([a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)])
            forward, backward = (mean(sorted(part)[:3]) for part in zip(*parts, strict=True))
            of = {"model": name, "mode": "train", "seq": sequence, "batch": batch, "parallelism": "none"}
            of |= {"num_gpus": 1, "microbatches": 1, "fusion": 0, "timed": "fw+bw"}
            yield of | {"e2e_ms": forward + backward, "fw_ms": forward, "bwall_ms": backward}
        del model
        torch.cuda.empty_cache()


def build(name: str, layers: int, hidden: int, heads: int, vocab: int, sequence: int) -> Any:
    import transformers as of

    eager: Any = {"attn_implementation": "eager"}  # which the signatures of configurations don't have
    if name.startswith("bert"):
        config: Any = of.BertConfig(
            vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * hidden, **eager,
        )  # fmt: skip
        return of.BertForPreTraining(config)
    if name.startswith("opt"):
        config = of.OPTConfig(
            vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            ffn_dim=4 * hidden, word_embed_proj_dim=hidden, **eager,
        )  # fmt: skip
        return of.OPTForCausalLM(config)
    config = of.GPT2Config(
        vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=sequence,
        **eager,
    )  # fmt: skip
    return of.GPT2LMHeadModel(config)


ALONE: dict[tuple[str, str], MakeCall] = {
    ("fp8 alone", "pytorch, scales of rows"): lambda pairs: alone(pairs, 1),
    ("fp8 alone", "pytorch, scale of a tensor"): lambda pairs: alone(pairs, None),
}
KINDS: dict[str, tuple[str, Callable[[np.random.Generator], Iterator[Row]]]] = {
    "attention": ("sdpa.csv", attention),
    "products": ("gemm.parquet", lambda random: gemms(random, {("bfloat16", "pytorch"): products})),
    "8-bit": ("gemm.parquet", lambda random: gemms(random, ALONE)),
    "quantised": ("gemm.parquet", lambda random: gemms(random, {("fp8", "pytorch"): quantised})),
    "single": ("neusight_kernels.parquet", single),
    "steps": ("neusight_steps.csv", steps),
}
NAMES = {"gemm.parquet": "gpu", "sdpa.csv": "gpu"}
"""The column of the GPU, where it isn't "device"."""


def until(rows: Iterator[Row], seconds: float) -> Iterator[Row]:
    end = time.monotonic() + seconds
    for row in rows:
        yield row
        if time.monotonic() > end:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--kinds", default="attention,products,8-bit,single,steps", help="KIND[=SECONDS],...")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes")
    config = parser.parse_args()
    config.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    files: dict[str, list[Row]] = {}
    for each in config.kinds.split(","):
        kind, _, seconds = each.partition("=")
        name, measure = KINDS[kind]
        rows, begin = files.setdefault(name, []), time.monotonic()
        before = len(rows)
        try:
            for row in until(measure(np.random.default_rng(config.seed)), float(seconds or 10)):
                rows.append(row)  # one by one: what was measured stays if this fails or is stopped
        except Exception as error:  # the other kinds still count
            print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            write(config.output / name, rows)
            took = time.monotonic() - begin
            print(f"{kind}: {len(rows) - before} rows in {took:.1f} s", flush=True)
    return 0


def write(path: Path, rows: list[Row]) -> None:
    import pandas

    source = {NAMES.get(path.name, "device"): torch.cuda.get_device_name(0)}
    if path.name in NAMES:
        source |= {"framework": "pytorch", "version": torch.__version__, "kernel_source": "torch"}
    table = pandas.DataFrame([source | row for row in rows])
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)


if __name__ == "__main__":
    sys.exit(main())
