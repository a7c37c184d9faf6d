"""The examples, as a user runs them: traced, converted, and with the communication that the code implies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
BATCH, WIDTH, MICRO_BATCHES = 32, 256, 4
FLOAT = 4

Sizes = dict[str, list[int]]


def expected(example: str, rank: int, world: int, manifest: dict) -> Sizes:
    """Kind → bytes of each communication of one step on one rank, from the example's own shapes."""
    layer = (WIDTH * WIDTH + WIDTH) * FLOAT
    if example == "ddp":
        return {"ALL_REDUCE": [(2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH) * FLOAT]}
    if example == "hf_trainer":
        # DDP also looks for unused parameters: an int32 for each of the 12 tensors per layer and 4 others;
        # and the ranks exchange the number of tokens in the batch, an int64.
        gradient, used = manifest["run"]["parameters"] * FLOAT, (2 * 12 + 4) * 4
        return {"ALL_REDUCE": [gradient + used], "ALL_GATHER": [8]}
    if example == "fsdp2":
        # Each layer is gathered for the forward and again for the backward pass.
        return {"ALL_GATHER": [layer // world] * 8, "REDUCE_SCATTER": [layer] * 4}
    if example == "tensor_parallel":
        # The output of both blocks, and the gradient of the second block's input.
        return {"ALL_REDUCE": [BATCH * WIDTH * FLOAT] * 3}
    neighbours = (rank > 0) + (rank < world - 1)
    transfers = [BATCH // MICRO_BATCHES * WIDTH * FLOAT] * MICRO_BATCHES * neighbours
    return {"COMM_SEND": transfers, "COMM_RECV": transfers}


def communication(path: Path) -> Sizes:
    """The same, read from a Chakra trace."""
    trace = et_file.read(path)
    kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size", -1)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(trace.types >= NodeType.COMM_SEND):
        node = NodeType(int(trace.types[row]))
        kind = CollectiveType(int(kinds[row])).name if node == NodeType.COMM_COLL else node.name
        found[kind].append(int(sizes[row]))
    return dict(found)


FAST = ("fsdp2",)
RUNS = [
    pytest.param(example, world, marks=[pytest.mark.slow] if world == 4 or example not in FAST else [])
    for example in EXAMPLES
    for world in (2, 4)
]


@pytest.mark.parametrize(("example", "world"), RUNS)
def test_an_example_is_traced_and_converts(example: str, world: int, torchrun, tmp_path: Path) -> None:
    if example == "hf_trainer":
        pytest.importorskip("accelerate")
    done = torchrun(world, f"examples/{example}.py", env={"PYTHONPATH": str(ROOT)}, timeout=180)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"next: python -m chakra_et convert outputs --name {example}") == 1 or (
        done.stdout.count(f"next: chakra-et convert outputs --name {example}") == 1
    )
    folder = tmp_path / "outputs"
    manifest = json.loads((folder / f"{example}_manifest.json").read_text())
    assert manifest["complete"] and manifest["world_size"] == world and manifest["backend"] == "gloo"
    assert all(rank["check"]["linkable"] for rank in manifest["ranks"])

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "chakra_et"]
    convert = subprocess.run(
        [*command, "convert", "outputs"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert convert.returncode == 0, convert.stdout + convert.stderr
    traces = [folder / f"{example}.{rank}.et" for rank in range(world)]
    check = subprocess.run([*command, "validate", *traces], env=environment, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    for rank, path in enumerate(traces):
        found, wanted = communication(path), expected(example, rank, world, manifest)
        if example in ("ddp", "hf_trainer"):
            found["ALL_REDUCE"] = [sum(found["ALL_REDUCE"])]  # DDP splits the gradient into buckets
        assert found == wanted, f"rank {rank}"
    if example == "tensor_parallel":
        scaled = [*command, "scale", folder / example, "--dp", "4", "-o", folder / "scaled"]
        refused = subprocess.run(scaled, env=environment, capture_output=True, text=True)
        assert refused.returncode == 2 and "inside the forward pass" in refused.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_guide_shows_the_example_as_it_is(example: str) -> None:
    text = (ROOT / "examples" / f"{example}.py").read_text()
    assert len(text.splitlines()) <= 30
    assert f"torchrun --nproc_per_node 2 examples/{example}.py" in text
    assert f"```python\n{text}```" in (ROOT / "docs" / "CAPTURE.md").read_text(encoding="utf-8")
