"""Files without an end, links in a circle, and YAML that costs more than it holds: one sentence, at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.cost.gpus import datasheet
from chakra_et.errors import TraceError, time_limit
from chakra_et.et import file as et_file
from chakra_et.yaml_file import read_yaml
from fasop.__main__ import main as plan
from tests.chakra_et.test_atomic import capture


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = capture(tmp_path_factory.mktemp("run"), "tiny_1gpu*")
    assert main(["convert", str(folder)]) == 0
    return str(folder / "tiny_1gpu")


COMMANDS = [
    "replay X.et", "predict X.et", "report X.et", "validate X.et", "stragglers X.et", "export X.et",
    "compare RUN X.et", "scale X.et --dp 2", "astra X.et -o OUT --topology dgx-h100",
    "convert X.json", "repair X.json", "report X.json",
    "predict RUN --comm-groups X.json", "predict RUN --network X.json --bandwidth 1Gbit/s",
    "predict RUN --topology X.json",
    "predict RUN --gpu H100:X.json", "predict RUN --gpu H100:X.yaml", "astra . --check X.json",
]  # fmt: skip


@pytest.mark.parametrize("make", [pipe, loop, endless], ids=lambda make: make.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_without_content_of_its_own_is_refused(
    run: str, tmp_path: Path, command: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for ending in ("et", "json", "yaml", "parquet"):
        make(tmp_path / f"X.{ending}")
    words = [word.replace("X.", f"{tmp_path}/X.").replace("RUN", run) for word in command.split()]
    with time_limit(30, TraceError("it hangs")):
        try:
            assert main([word.replace("OUT", str(tmp_path / "out")) for word in words]) in (1, 2)
        except SystemExit as stop:
            assert stop.code == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1 and "hangs" not in errors, errors


def test_an_extra_table_of_kernels_that_has_no_end_fails_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = capture(tmp_path / "run", "tiny_1gpu*")
    pipe(tmp_path / "X.json")
    assert main(["convert", str(folder), "--comm-kernels", str(tmp_path / "X.json")]) == 1
    assert "X.json: not a table of communication kernels" in capsys.readouterr().err


YAML = {
    "brackets": "clusters: " + "[" * 30_000,
    "mappings": "clusters:\n" + "".join(f"{' ' * depth}a:\n" for depth in range(1, 2_000)),
    "laughs": "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 12)),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n}\n  <<: [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 12)),
    "itself": "a: &a [*a]\n",
    "long": "clusters: [" + "1, " * 200_000 + "1]\n",
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_beyond_the_limits_is_refused_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thousands of brackets crashed the interpreter; merges of merges took a minute."""
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML[name])
    began = time.process_time()
    with pytest.raises(TraceError, match="too deep or too large"):
        read_yaml(path)
    assert time.process_time() - began < 5
    for words in (["plan", "--model", "gpt2-345m", "--cluster", str(path)],):
        assert plan(words) == 2
        assert "too deep or too large" in capsys.readouterr().err


def test_what_a_file_holds_does_not_make_a_sentence_long(tmp_path: Path) -> None:
    """A tag of 100,000 characters was in the message, which named the file twice."""
    path = tmp_path / "gpu.yaml"
    path.write_text("!" * 100_000)
    with pytest.raises(TraceError, match=r"line 1: not YAML: could not") as refused:
        datasheet(path)
    assert len(str(refused.value)) < 500 and str(refused.value).count(str(path)) == 1


def test_aliases_and_merges_within_the_limits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("base: &base {gpus: 8}\nnode: {<<: *base, name: a}\nboth: [*base, *base]\n")
    assert read_yaml(path)["node"] == {"gpus": 8, "name": "a"}


def test_a_pattern_that_never_ends_is_stopped(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chakra_et.transform.durations.MATCHING_SECONDS", 0.2)
    trace = et_file.read(f"{run}.0.et")
    trace.names.table[0] = b"a" * 60
    et_file.write(tmp_path / "long.0.et", trace)
    assert main(["predict", str(tmp_path / "long.0.et"), "--scale", "(a|a)*b=2"]) == 2
    assert "takes more than 0.2 s to match" in capsys.readouterr().err
