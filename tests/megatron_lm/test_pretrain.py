"""The real training on gloo ranks: the same losses in every layout, its log lines, and resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lm.logs import records
from megatron_lm.settings import from_environment
from tests.megatron_lm.training_runs import ROOT, TINY, environment, layout, losses, norms, train

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")

Done = subprocess.CompletedProcess[str]
# megatron-core's name of each part of a layer, and transformers'.
HUGGING_FACE = {
    "input_layernorm": "ln_1",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One process, five iterations, with checkpoints after two and four."""
    folder = tmp_path_factory.mktemp("alone")
    settings = {"SAVE": str(folder), "SAVE_INTERVAL": "2", "LOG_DIR": str(folder / "log")}
    done = train(**layout(), TRAIN_ITERS="5", REPORT_TO="tensorboard", **settings)
    assert done.returncode == 0, done.stderr[-3_000:]
    done.folder = folder  # type: ignore[attr-defined]
    return done


@pytest.fixture(scope="module")
def four_ranks(alone: Done) -> Done:
    """Two stages of two tensor-parallel ranks, with timers, that continue from the process alone."""
    load = str(alone.folder / "iter_0000002")  # type: ignore[attr-defined]
    more = {"PROFILE": "true", "SEQUENCE_PARALLEL": "true", "RECOMPUTE": "selective"}
    done = train(**layout("3-1", tensor=2), **more, TRAIN_ITERS="4", LOAD=load)
    assert done.returncode == 0, done.stderr[-3_000:]
    return done


def test_the_loss_falls(alone: Done) -> None:
    found = losses(alone)
    assert len(found) == 5 and abs(found[0] - 8.0) < 0.1 and found[3] < found[0] - 0.3


def test_tensorboard_has_the_figures_of_the_log(alone: Done) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(alone.folder / "log" / "tensorboard"))  # type: ignore[attr-defined]
    found.Reload()
    logged = {"loss": losses(alone), "grad_norm": norms(alone)}
    for name, values in logged.items():
        scalars = found.Scalars(name)
        assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, abs=1e-3)


def stored(content: bytes) -> Iterator[bytes]:
    """The records of a file of wandb's: after 7 bytes a LevelDB log of blocks of 32 KiB, in which a record is
    whole (1) or in parts (2, 3, …, 4), each after its checksum, length and kind.
    """
    at, found = 7, b""
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        found += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield found
            found = b""


@pytest.mark.slow
def test_wandb_has_the_figures_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded offline by the last of two ranks, and read back from wandb's own file."""
    pytest.importorskip("wandb", reason="wandb is not installed (extra train)")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    done = train(**layout("2-2"), REPORT_TO="wandb", LOG_DIR=str(tmp_path))
    expected = {"loss": losses(done), "grad_norm": norms(done)}
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    rows, settings = [], {}
    for record in map(Record.FromString, stored(run.read_bytes())):
        if record.HasField("history"):
            items = record.history.item
            rows.append(
                {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            )
        for each in record.run.config.update:
            settings[each.key] = json.loads(each.value_json)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    for name, values in expected.items():
        assert [row[name] for row in rows] == pytest.approx(values, abs=1e-3)
    assert settings["partition"] == "2-2" and settings["model"] == "tiny"


@pytest.mark.slow
def test_another_partition_goes_on_with_the_same_losses(alone: Done, four_ranks: Done) -> None:
    """Of 2 × 2 ranks (pipeline × tensor), from the checkpoint of one process."""
    assert losses(four_ranks) == pytest.approx(losses(alone)[2:4], abs=1e-5)
    assert norms(four_ranks) == pytest.approx(norms(alone)[2:4], abs=2e-3)


def test_iteration_lines(alone: Done) -> None:
    found = records.iterations(alone.stdout.encode())
    assert [(line.number, line.total) for line in found] == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert all(line.global_batch_size == 8 and line.seconds > 0 for line in found)
    assert found[0].learning_rate == pytest.approx(1e-2)
    form = (
        r" iteration +1/ +5 \| consumed samples: +8 \| elapsed time per iteration \(ms\): [\d.]+ \| "
        r"learning rate: 1\.000E-02 \| global batch size: +8 \| lm loss: \d\.\d{6}E\+00 \| "
        r"loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| number of skipped iterations: +0 \| "
        r"number of nan iterations: +0 \|"
    )
    assert any(re.fullmatch(form, line) for line in alone.stdout.splitlines())
    start = r"\[before the start of training step\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert any(re.fullmatch(start, line) for line in alone.stdout.splitlines())


@pytest.mark.slow
def test_memory_lines_of_every_data_parallel_group(four_ranks: Done) -> None:
    found = records.memory(four_ranks.stdout.encode())
    assert sorted(line.rank for line in found) == [0, 1, 2, 3]
    assert all(0 < line.allocated <= line.max_allocated for line in found)
    assert all(line.reserved <= line.max_reserved for line in found)


def test_the_precision_that_is_used_is_logged(alone: Done) -> None:
    assert [line for line in alone.stdout.splitlines() if line.startswith("PRECISION")] == ["PRECISION: fp32"]


@pytest.mark.slow
def test_timers_of_every_rank_with_start_and_end(four_ranks: Done) -> None:
    found = records.timers(four_ranks.stdout.encode())
    for rank in range(4):
        forward = found[rank, "forward-compute"]
        assert len(forward.start) == 2 * 8  # two iterations of eight micro-batches
        assert (forward.end >= forward.start).all() and (forward.start[1:] >= forward.end[:-1]).all()
        whole = found[rank, "forward-backward"]
        assert len(whole.start) == 2 and whole.start[0] <= forward.start[0] <= forward.end[7] <= whole.end[0]
        assert len(found[rank, "optimizer"].start) == 2
    assert (0, "forward-recv") not in found and (2, "forward-recv") in found
    assert (0, "loss-compute") not in found and (3, "post-process") in found
    pattern = r"^  forward-compute:\n +rank +2: (\S+)$"
    summed = map(float, re.findall(pattern, four_ranks.stdout, re.MULTILINE))
    spans = found[2, "forward-compute"]
    assert sum(summed) == pytest.approx((spans.end - spans.start).sum() * 1000, abs=0.1)


@pytest.mark.slow
def test_hugging_face_s_gpt2_has_the_same_loss(alone: Done) -> None:
    """The weights of a checkpoint in transformers' model, on the samples of the fifth iteration."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from megatron_lm.engine.checkpoint import read
    from megatron_lm.engine.dataset import micro_batches

    _, parts = read(alone.folder / "iter_0000004")  # type: ignore[attr-defined]
    weights = {name: part["value"].float() for name, part in parts.items()}
    embedding = weights["embedding.word_embeddings.weight"]
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": len(embedding)}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **rates, activation_function="gelu")
    model = transformers.GPT2LMHeadModel(config).eval()
    state = {"wte.weight": embedding, "wpe.weight": weights["embedding.position_embeddings.weight"]}
    for kind in ("weight", "bias"):
        state[f"ln_f.{kind}"] = weights[f"decoder.final_layernorm.{kind}"]
        for layer in range(4):
            ours, theirs = f"decoder.layers.{layer}.", f"h.{layer}."
            for source, target in HUGGING_FACE.items():
                state[f"{theirs}{target}.{kind}"] = weights[f"{ours}{source}.{kind}"].t().contiguous()
            # From query, key and value of each head in turn to all queries, all keys, all values.
            joint = weights[f"{ours}self_attention.linear_qkv.{kind}"]
            by_kind = joint.reshape(4, 3, 16, *joint.shape[1:]).transpose(0, 1).reshape(joint.shape)
            state[f"{theirs}attn.c_attn.{kind}"] = by_kind.t().contiguous()
    model.transformer.load_state_dict(state)
    settings, samples = _samples(5)
    batches, total = micro_batches(samples, settings, 0, 4 * 8), 0.0
    with torch.no_grad():
        for batch in (next(batches) for _ in range(8)):
            logits = model(batch["tokens"]).logits.flatten(0, 1)
            total += torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).item()
    assert total / 8 == pytest.approx(losses(alone)[4], abs=1e-5)


def _samples(iterations: int):
    """The data of the runs above, read in this process."""
    code = (
        "import json, sys, dataclasses, torch.distributed as dist\n"
        "from megatron_lm.engine import dataset; from megatron_lm.settings import from_environment\n"
        "dist.init_process_group('gloo', init_method=sys.argv[1], rank=0, world_size=1)\n"
        "s = from_environment()\n"
        "d = dataset.build(s)\n"
        "count = s.train_iters * s.global_batch_size\n"
        "rows = [{k: v.tolist() for k, v in d[n].items()} for n in range(count)]\n"
        "print(json.dumps(rows))\n"
    )
    values = TINY | layout() | {"TRAIN_ITERS": str(iterations)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"file://{folder}/store"]
        env = os.environ | environment(values) | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return from_environment(environment(values)), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_good_one(alone: Done, tmp_path: Path) -> None:
    """One bit of the newest is flipped, the one before is cut off; both are named."""
    for number in (2, 4, 5):
        shutil.copytree(alone.folder / f"iter_{number:07d}", tmp_path / f"iter_{number:07d}")  # type: ignore[attr-defined]
    flipped, cut = (tmp_path / f"iter_{number:07d}/stage000_tensor000.pt" for number in (5, 4))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-100])
    done = train(**layout(), LOAD=str(tmp_path), TRAIN_ITERS="3")
    assert losses(done) == pytest.approx(losses(alone)[2:3], abs=1e-5)
    changed = "stage000_tensor000.pt has changed since it was written (SHA-256)"
    assert f"checkpoint {flipped.parent} is damaged: {changed}" in done.stderr
    short = f"stage000_tensor000.pt has {size - 100:,} bytes instead of {size:,}"
    assert f"checkpoint {cut.parent} is damaged: {short}" in done.stderr
    assert f"continuing from {tmp_path / 'iter_0000002'}, the newest good checkpoint" in done.stderr
    # One that is named is not replaced by another without being asked for.
    done = train(**layout(), LOAD=str(flipped.parent))
    assert done.returncode != 0
    assert f"{flipped.parent} is damaged: {changed}; set LOAD to {tmp_path / 'iter_0000002'}" in done.stderr


def interleaved(partition: str, tensor: int = 1, data: int = 1) -> dict[str, str]:
    """Two stages of two chunks each; ``partition``: layers of the four chunks."""
    ranks = str(2 * tensor * data)
    shape = {"PIPELINE_MP_SIZE": "2", "VIRTUAL_STAGES": "2", "WORLD_SIZE": ranks, "NPROC_PER_NODE": ranks}
    return layout(partition, tensor, data) | shape


LAYOUTS = {
    "PP2": layout("3-1"),
    "TP2": layout("4", tensor=2),
    "TP2 with sequence parallelism": layout("4", tensor=2) | {"SEQUENCE_PARALLEL": "true"},
    "DP2": layout("4", data=2),
    "DP2, sharded optimizer": layout("4", data=2) | {"SHARDED_OPTIMIZER": "true"},
    "PP2, DP2, first stage without layers": layout("0-4", data=2),
    "PP4, last stage without layers": layout("1-2-1-0"),
    "TP2, DP2, recomputed": layout("4", 2, 2) | {"RECOMPUTE": "full"},
    # Without a GPU, fp16 becomes the fp32 that the others have.
    "fused attention, PP2, recomputed": layout("3-1")
    | {"ATTENTION": "flash", "RECOMPUTE": "selective", "PRECISION": "fp16"},
    "PP2, two chunks per stage": interleaved("1-1-1-1"),
    "PP2, uneven chunks, DP2, sharded": interleaved("0-2-1-1", data=2) | {"SHARDED_OPTIMIZER": "true"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(alone: Done, settings: dict[str, str]) -> None:
    done = train(**settings)
    assert losses(done) == pytest.approx(losses(alone)[:3], abs=1e-5)
    assert norms(done) == pytest.approx(norms(alone)[:3], abs=2e-3)


@pytest.mark.slow
def test_a_llama_has_the_same_losses_in_every_layout_and_continues_in_any(tmp_path: Path) -> None:
    """From a sharded optimizer in bf16 to an interleaved pipeline with tensor and sequence parallelism."""
    llama = {"MODEL": "llama-tiny"}
    alone = losses(train(**layout(), **llama, TRAIN_ITERS="4"))
    assert len(alone) == 4 and alone[3] < alone[0] - 0.3
    sharded = layout("4", data=2) | llama | {"SHARDED_OPTIMIZER": "true", "SAVE": str(tmp_path)}
    assert losses(train(**sharded, TRAIN_ITERS="2")) == pytest.approx(alone[:2], abs=1e-5)
    chunks = interleaved("1-1-1-1", tensor=2) | llama | {"SEQUENCE_PARALLEL": "true", "LOAD": str(tmp_path)}
    assert losses(train(**chunks, TRAIN_ITERS="4")) == pytest.approx(alone[2:], abs=1e-5)
    fused = layout("4", tensor=2) | llama | {"ATTENTION": "flash", "PRECISION": "fp16"}
    assert losses(train(**fused, TRAIN_ITERS="4")) == pytest.approx(alone, abs=1e-5)
    other = train(**layout(), MODEL="tiny", LOAD=str(tmp_path))
    assert other.returncode != 0 and "is of another model (ffn, kv_groups, swiglu," in other.stderr


@pytest.mark.slow
def test_half_precision_keeps_its_fp32_weights_and_moments_in_a_checkpoint(tmp_path: Path) -> None:
    half = {"PRECISION": "bf16"}
    alone = losses(train(**layout(), **half, TRAIN_ITERS="4"))
    first = layout("2-2", data=2) | half | {"SHARDED_OPTIMIZER": "true", "SAVE": str(tmp_path)}
    train(**first, TRAIN_ITERS="2")
    second = layout("4") | half | {"LOAD": str(tmp_path), "SAVE": str(tmp_path)}
    train(**second, TRAIN_ITERS="3")
    third = train(
        **layout("4", data=2), **half, SHARDED_OPTIMIZER="true", LOAD=str(tmp_path), TRAIN_ITERS="4"
    )
    assert "PRECISION: bf16" in third.stdout
    # bf16 rounds each layout's sums differently; starting moments anew would change the loss by 0.1.
    assert losses(third) == pytest.approx(alone[3:], abs=2e-3)


@pytest.mark.slow
def test_a_broken_tie_is_seen_in_the_losses(alone: Done) -> None:
    """The negative control: without the embeddings' all-reduce the third loss differs."""
    done = train(Path(__file__).with_name("broken_tie.py"), **layout("2-2"))
    difference = max(abs(a - b) for a, b in zip(losses(done), losses(alone), strict=False))
    assert difference > 1e-3


@pytest.mark.slow
def test_the_eight_stages_of_the_published_run() -> None:
    """0-11-8-8-8-8-5-0 with 48 layers of hidden size 32 against one process."""
    script = Path(__file__).with_name("many_layers.py")
    one = losses(train(script, **layout("48")))
    eight = losses(train(script, timeout=800, **layout("0-11-8-8-8-8-5-0")))
    assert len(one) == 3 and eight == pytest.approx(one, abs=1e-5)
