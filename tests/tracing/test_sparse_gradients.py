"""All-reduces of sparse gradients, as of embeddings, from capture to replay."""

from __future__ import annotations

import json

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from chakra_et import ChakraTracer
dist.init_process_group("gloo")
own = nn.Embedding(100, 16, sparse=True)
model = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(50, 8, sparse=True))
rows = torch.arange(5 + 2 * dist.get_rank())
with ChakraTracer(sys.argv[1], "sparse", 2, 1, 2) as tracer:
    for _ in range(5):
        own(rows).sum().backward()
        dist.all_reduce(own.weight.grad)
        own.weight.grad = None
        model(rows, torch.zeros(1, dtype=torch.long)).sum().backward()
        model.zero_grad()
        dist.all_reduce(torch.ones(3))
        tracer.step()
dist.destroy_process_group()
"""


def test_a_sparse_all_reduce_does_not_end_the_training_and_has_its_bytes(
    torchrun, tmp_path, repo_root
) -> None:
    """The tracer asked a sparse tensor for its ``nbytes``, which raised in the user's call; from DDP, sparse
    gradients had 1 byte and no warning. gloo gathers indices and values: each rank's own number of bytes."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = torchrun(2, tmp_path / "train.py", "out", env={"PYTHONPATH": str(repo_root)})
    assert done.returncode == 0, done.stdout
    out = tmp_path / "out"
    assert main(["convert", str(out)]) == 0
    report = json.loads((out / "sparse_conversion.json").read_text())
    for rank, rows in enumerate((5, 7)):
        trace = et_file.read(out / f"sparse.{rank}.et")
        number = trace.attributes["comm_type"].rows
        kinds = [CollectiveType(kind).name for kind in trace.column("comm_type")[number].tolist()]
        sizes = trace.column("comm_size")[number].tolist()
        in_step = [("ALL_GATHER", rows * (8 + 16 * 4)), ("ALL_GATHER", 0), ("ALL_REDUCE", 12)]
        assert sorted(zip(kinds, sizes, strict=True)) == sorted(2 * in_step)
        counts = {each["id"]: each["count"] for each in report["ranks"][str(rank)]["warnings"]}
        assert counts["communication-size"] == 2  # DDP's, in two steps
    for command in ("validate", "replay"):
        assert main([command, str(out / "sparse")]) == 0
