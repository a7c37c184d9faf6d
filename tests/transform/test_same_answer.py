"""One question, one answer: what ``scale`` writes and ``predict`` then replays is what ``predict`` says."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.cost.network_fit import NetworkModel, write_model
from tests.shared import SHARED, shared_path

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "captures"


def converted(pattern: str, source: Path, folder: Path) -> Path:
    for path in source.glob(pattern):
        shutil.copy(path, folder / path.name)
    assert main(["convert", str(folder)]) == 0
    (first,) = folder.glob("*.0.et")
    return folder / first.name.split(".")[0]


def step_ms(capsys: pytest.CaptureFixture[str], name: Path | str, *flags: str) -> dict[int, float]:
    """The predicted mean step of each rank, ms; without flags the step of the set itself."""
    capsys.readouterr()
    assert main(["predict", str(name), *flags, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    return {each["rank"]: each["after_us"] / 1e3 for each in found["ranks"]}


def assert_same(
    capsys: pytest.CaptureFixture[str], name: Path | str, flags: Sequence[str], folder: Path
) -> None:
    predicted = step_ms(capsys, name, *flags)
    assert main(["scale", str(name), *flags, "--spread", "0", "-o", str(folder / "made")]) == 0
    made = step_ms(capsys, folder / "made")
    assert predicted.keys() == made.keys()
    assert made == pytest.approx(predicted, rel=1e-3)


def assert_same_or_both_refuse(
    capsys: pytest.CaptureFixture[str], name: Path, flags: Sequence[str], folder: Path
) -> None:
    capsys.readouterr()
    status = main(["predict", str(name), *flags])
    refusal = capsys.readouterr().err
    if status == 0:
        return assert_same(capsys, name, flags, folder)
    assert main(["scale", str(name), *flags, "-o", str(folder / "made")]) == status == 2
    assert capsys.readouterr().err == refusal
    assert not list(folder.glob("made*"))


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for name in ("gpt2-gloo", "megatron-pp2-dp2"):
        assert main(["fetch-example", name, "-o", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def sets(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The examples, the captures, and the shared traces where they are."""
    found = [next(examples.glob(f"{name}/*.0.et")) for name in ("gpt2-gloo", "megatron-pp2-dp2")]
    names = [path.parent / path.name.removesuffix(".0.et") for path in found]
    for version in ("torch-2.4", "torch-2.13"):
        names.append(converted("tiny_2gpu*", FIXTURES / version, tmp_path_factory.mktemp(version)))
    shared = SHARED / "data/traces/dlrm_8gpu"
    return [*names, *([converted("*", shared, tmp_path_factory.mktemp("dlrm"))] if shared.is_dir() else [])]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--dp", "8"], marks=pytest.mark.slow),
        pytest.param(["--dp", "64"], marks=pytest.mark.slow),
        ["--layers", "2x"],
        ["--dp", "4", "--layers", "6"],
    ],
    ids=" ".join,
)
def test_gpt2_on_gloo(
    flags: list[str], examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 ranks took 3,326 ms by predict and 2,995 ms by scale and then predict."""
    (name,) = {path.parent / path.name.split(".")[0] for path in (examples / "gpt2-gloo").glob("*.0.et")}
    assert_same(capsys, name, flags, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in (["--dp", "4"], ["--layers", "2x"])),
        ["--layers", "8", "--pp", "4"],
    ],
    ids=" ".join,
)
def test_megatron(
    flags: list[str], examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_same(capsys, examples / "megatron-pp2-dp2" / "megatron_tiny_4gpu", flags, tmp_path)


@pytest.mark.parametrize("version", ["torch-2.4", "torch-2.13"])
def test_captures_of_the_training_script(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_same(capsys, converted("tiny_2gpu*", FIXTURES / version, tmp_path), ["--dp", "4"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--dp", "4", "--mesh", "dp8"],
        *([flag, "2x"] for flag in ("--layers", "--batch", "--seq")),
        ["--resize", "64=96", "128=192"],
        ["--pp", "4"],
        ["--tp", "4", "--mesh", "tp2"],
    ],
    ids=" ".join,
)
def test_every_transform_gives_one_answer_or_one_refusal(
    flags: list[str], sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in sets:
        assert_same_or_both_refuse(capsys, name, flags, tmp_path / name.name / name.parent.name)


def test_one_rank_of_a_capture_gets_ddp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = tmp_path / "network.json"
    write_model(network, NetworkModel(5e3, 2e4, 1e9, math.inf, 0.1, 4, "a test"))
    name = converted("tiny_1gpu*", FIXTURES / "torch-2.13", tmp_path)
    assert_same(capsys, name, ["--dp", "4", "--network", str(network)], tmp_path)


def test_shared_ranks_of_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = converted("*", shared_path("data/traces/dlrm_8gpu"), tmp_path)
    assert_same(capsys, name, ["--dp", "16", "--mesh", "dp8"], tmp_path)
