"""``--help`` and the flags of every command, made by ``chakra_et.cli`` from the config dataclasses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import pytest

from chakra_et.__main__ import COMMANDS, main
from chakra_et.cli import option, parse


@dataclass
class Config:
    """One field of every kind."""

    files: tuple[str, ...] = field(default=(), metadata={"positional": True, "help": "input files"})
    run_name: str = field(default="", metadata={"help": "name of the run", "short": "-n"})
    max_share: float = field(default=50.0, metadata={"help": "limit in % of the total", "metavar": "PERCENT"})
    fill_gaps: bool = field(default=True, metadata={"help": "fill gaps"})
    dry_run: bool = field(default=False, metadata={"help": "write nothing", "group": "for damaged files"})
    keep: Literal["last", "first"] = field(default="last", metadata={"help": "which object to keep"})


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


# ``run`` passes its arguments on to the user's script and prints a usage of its own.
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"run"}))
def test_help_is_short(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys=capsys)
    assert re.match(rf"usage: chakra-et {command}( --[a-z-]+ [A-Z]+)* \[flags\]( [^\n]+)?\n\n", text)
    assert not re.search(r"--\w+_", text), "underscore spelling"
    assert not re.search(r"default: (\)|False|None|True|\(\))", text), "empty or Python default"


def test_rare_flags_of_convert_have_their_own_heading(capsys: pytest.CaptureFixture[str]) -> None:
    common, rare = help_of("convert", capsys=capsys).split("for damaged or hostile files:")
    for name in ("--allow-unlinked", "--allow-missing-ranks", "--max-bytes"):
        assert name in rare and name not in common


def test_help_of_every_kind_of_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse(Config, ["--help"], prog="tool", description="A tool.")
    text = capsys.readouterr().out
    text = text[text.index("usage") :].replace("optional arguments:", "options:")
    assert (
        text
        == """usage: tool [flags] [FILE ...]

A tool.

positional arguments:
  FILE                  input files

options:
  -h, --help            show this help message and exit
  -n, --run-name NAME   name of the run
  --max-share PERCENT   limit in % of the total (default: 50)
  --fill-gaps, --no-fill-gaps
                        fill gaps (default: on)
  --keep {last,first}   which object to keep (default: last)

for damaged files:
  --dry-run             write nothing
"""
    )


@dataclass
class Bounded:
    """Numbers with bounds."""

    count: int = option("how many", 3, least=1)
    shares: tuple[float, ...] = option("of each", (), least=0, most=1)
    rate: float | None = option("per second", None, above=0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--count", "0"], "--count is 0: give at least 1"),
        (["--shares", "0.5", "2"], "--shares is 2.0: give 0 to 1"),
        *(
            (["--rate", each], f"--rate is {float(each)}: give a number above 0")
            for each in ("0", "inf", "nan")
        ),
    ],
)
def test_a_number_beyond_its_bounds_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(Bounded, words, prog="tool")
    assert end.value.code == 2 and capsys.readouterr().err == f"tool: error: {sentence} (see tool --help)\n"
    assert parse(Bounded, ["--count", "1", "--shares", "0", "1"]) == Bounded(1, (0.0, 1.0))


def test_accepted_spellings() -> None:
    assert parse(Config, []) == Config()
    assert parse(Config, ["--run_name", "a", "--no-fill_gaps", "--dry_run", "x", "y"]) == Config(
        ("x", "y"), "a", fill_gaps=False, dry_run=True
    )
    assert parse(Config, ["-n", "a", "--no-fill-gaps", "--dry-run", "--no-dry-run"]) == Config(
        (), "a", fill_gaps=False
    )


@dataclass
class Sizes:
    sizes: tuple[int, ...] = field(default=(1,), metadata={"help": "sizes"})


def test_values_replace_the_default_and_add_up() -> None:
    assert parse(Sizes, []).sizes == (1,)
    assert parse(Sizes, ["--sizes", "2"]).sizes == (2,)
    assert parse(Sizes, ["--sizes", "2", "3", "--sizes", "4"]).sizes == (2, 3, 4)


def test_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["validate", "x", "--nope"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "chakra-et validate: error: unrecognized arguments: --nope (see chakra-et validate --help)\n"
    )
