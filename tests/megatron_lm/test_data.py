"""preprocess_data.py: SQuAD, text and JSON lines become indexed datasets, or one sentence says why not."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from chakra_et import cli
from megatron_lm import saved
from megatron_lm.settings import Settings
from tests.megatron_lm.training_runs import ROOT, TINY, environment, layout
from utils.data.config import DataError

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")
TOKENIZER = str(ROOT / "data" / "tokenizers" / "gpt2")


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Preprocess = Callable[..., Done]


@pytest.fixture
def preprocess(capsys: pytest.CaptureFixture[str]) -> Preprocess:
    from megatron_lm import preprocess_data

    def call(*arguments: str | Path) -> Done:
        flags = ["--model", "tiny", "--tokenizer", TOKENIZER]
        try:
            words = [*map(str, arguments), *flags]
            status = cli.run(lambda: preprocess_data.main(words), DataError)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Done(status, *capsys.readouterr())

    return call


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [np.asarray(dataset[number]).tolist() for number in range(len(dataset))]


def decoded(prefix: Path) -> list[str]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{TOKENIZER}/tokenizer.json")
    found = documents(prefix)
    ends = {ids[-1] for ids in found}
    assert len(ends) == 1, "each document ends with the end-of-text token"
    return [tokenizer.decode(ids[:-1]) for ids in found]


def test_text_is_cut_at_empty_lines(tmp_path: Path, preprocess: Preprocess) -> None:
    (tmp_path / "a.txt").write_text("One sea.\n\nTwo lighthouses\nby it.\n\n\n")
    done = preprocess(tmp_path / "a.txt", "--output", tmp_path / "out" / "a")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/out/a.bin, {tmp_path}/out/a.idx: 2 documents, ")
    assert decoded(tmp_path / "out" / "a") == ["One sea.", "Two lighthouses\nby it."]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bin", "a.idx"]


def test_json_lines_and_several_files(tmp_path: Path, preprocess: Preprocess) -> None:
    for name, words in (("a", "first"), ("b", "second")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": words}) + "\n\n")
    files = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert preprocess(*files, "--output", tmp_path / "ab").returncode == 0
    assert decoded(tmp_path / "ab") == ["first", "second"]


@pytest.mark.parametrize(
    ("ending", "kept", "words"),
    [
        (".idx", 0, "is not the index of a dataset"),
        (".idx", 33, "is not the index of a dataset"),
        (".idx", -1, "a.idx is cut off"),
        (".bin", -1, "a.bin is cut off"),
        (".bin", 0, "a.bin is cut off"),
    ],
)
def test_a_dataset_that_was_not_copied_in_full_is_noticed(
    tmp_path: Path, preprocess: Preprocess, ending: str, kept: int, words: str
) -> None:
    (tmp_path / "a.txt").write_text("One sea.\n\nTwo lighthouses by it.\n")
    assert preprocess(tmp_path / "a.txt", "--output", tmp_path / "a").returncode == 0
    assert saved.dataset_damage(tmp_path / "a") == ""
    path = tmp_path / f"a{ending}"
    path.write_bytes(path.read_bytes()[:kept])
    assert words in saved.dataset_damage(tmp_path / "a")


def test_squad_has_a_document_for_each_question(tmp_path: Path, preprocess: Preprocess) -> None:
    done = preprocess(ROOT / "data" / "squad_sample.json", "--output", tmp_path / "squad")
    assert done.returncode == 0 and "289 documents" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\nno\n', "a.jsonl, line 2: no JSON object with a field 'text'"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: field 'text' is not text"),
        ("a.txt", b"\xff\xfe\x00", "can't be read as text"),
        ("a.txt", b"\n \n", "no document found"),
        ("a.json", b"{}", "a.json"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    tmp_path: Path, preprocess: Preprocess, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    done = preprocess(tmp_path / name, "--output", tmp_path / "out")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_file_and_no_output(preprocess: Preprocess) -> None:
    assert preprocess("--output", "x").returncode == 2
    done = preprocess("/nowhere.txt", "--output", "x")
    assert done.returncode == 2 and "/nowhere.txt" in done.stderr


def test_every_data_parallel_rank_takes_its_own_samples() -> None:
    torch = pytest.importorskip("torch")
    from megatron_lm.engine.dataset import micro_batches
    from megatron_lm.settings import from_environment

    row = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
    samples = [dict.fromkeys(row, torch.full((2,), number)) for number in range(12)]
    settings = from_environment(environment(TINY | layout("4", data=2) | {"MICRO_BATCH_SIZE": "2"}))
    taken = [
        [batch["tokens"][:, 0].tolist() for batch in micro_batches(samples, settings, rank, 4)]
        for rank in (0, 1)
    ]
    assert taken == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


@pytest.mark.slow
def test_maps_are_kept_in_a_folder_of_the_model(tmp_path: Path, preprocess: Preprocess) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"Sentence number {n} of the sea." for n in range(200)))
    assert preprocess(tmp_path / "a.txt", "--output", tmp_path / "a").returncode == 0
    code = (
        "import sys, torch.distributed as dist\n"
        "from megatron_lm.engine import dataset; from megatron_lm.settings import from_environment\n"
        "dist.init_process_group('gloo', init_method=sys.argv[1], rank=0, world_size=1)\n"
        "data = dataset.build(from_environment())\n"
        "assert len(data) >= 24 and data[0]['tokens'].shape == (64,)\n"
    )
    env = os.environ | environment(TINY | layout() | {"DATA_PATH": str(tmp_path / "a")})
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", code, f"file://{tmp_path}/store"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    maps = {path.name.rpartition("-")[2] for path in (tmp_path / "tiny").glob("*.npy")}
    assert maps == {"document_index.npy", "sample_index.npy", "shuffle_index.npy"}
    env["MEGATRON_DATA_PATH"] = str(tmp_path / "absent")
    done = subprocess.run(command[:-1] + [command[-1] + "2"], capture_output=True, text=True, env=env)
    assert (
        done.returncode != 0
        and f"there is no {tmp_path}/absent.bin; make it with megatron_lm/" in done.stderr
    )


def test_a_wrong_path_to_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "megatron_lm/preprocess_data.py", ROOT / "data/squad_sample.json"]
    command += ["--output", tmp_path / "x", "--tokenizer", tmp_path / "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path / "nowhere") in done.stderr
    assert not list(tmp_path.iterdir())


def test_index_maps_of_megatron_lm_are_used_only_where_they_fit(tmp_path: Path) -> None:
    """Ten documents of 7 to 16 tokens in samples of 8."""
    from megatron_lm.engine.dataset import adopt_index_maps

    lengths = np.arange(7, 17)
    documents = np.random.default_rng(1).permutation(10).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths[documents])])
    at = np.arange(0, lengths.sum() - 8, 8)
    of = np.searchsorted(starts, at, "right") - 1
    maps = {"doc": documents, "sample": np.stack([of, at - starts[of]], 1).astype(np.int32)}
    maps["shuffle"] = np.random.default_rng(2).permutation(len(at) - 1).astype(np.uint32)
    (tmp_path / "small").mkdir()
    base = tmp_path / "small" / "data_text_document_train_indexmap_12ns_8sl_1234s_"
    settings = Settings(model="small", seq_length=8, train_iters=6, global_batch_size=2)

    def adopted(wanted: Settings, **changed: object) -> tuple[list[str], object]:
        for kind, content in (maps | changed).items():
            np.save(f"{base}{kind}_idx.npy", content)
        dataset = SimpleNamespace(dataset=SimpleNamespace(sequence_lengths=lengths), document_index=None)
        return adopt_index_maps(dataset, tmp_path / "data_text_document", wanted), dataset.document_index

    said, used = adopted(settings)
    assert said == [f"index maps {base}*.npy are used"] and np.array_equal(used, documents)
    for wanted, changed, why in (
        (dataclasses.replace(settings, seed=1), {}, "SEQ_LENGTH is 8 and SEED 1"),
        (dataclasses.replace(settings, train_iters=7), {}, "TRAIN_ITERS × GLOBAL_BATCH_SIZE is 14"),
        (settings, {"doc": documents[::-1]}, "they are of another .bin and .idx"),
        (settings, {"doc": documents + 5}, "they can't be read, or are of another .bin and .idx"),
    ):
        said, used = adopted(wanted, **changed)
        assert used is None and said[0].startswith(f"index maps {base}*.npy are not used: {why}")
