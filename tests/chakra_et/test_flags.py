"""The flags of every command are frozen in flags.txt, and a shell completes them.

After a change that users may see, write the file anew: python -m tests.chakra_et.test_flags
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fasop.__main__
from chakra_et import __version__, cli
from chakra_et.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("flags.txt")


def listed() -> str:
    """One line for each flag of every command: spellings, choices, and the default."""
    lines = []
    for program, commands in (("chakra-et", COMMANDS), ("fasop", fasop.__main__.COMMANDS)):
        for name, (module, _) in commands.items():
            for flag in cli.flags_of(module)[1:]:
                words = [program, name, ",".join(cli.spellings(flag)) or str(flag.metavar)]
                words += ["|".join(map(str, flag.choices))] if flag.choices else []
                lines.append(f"{' '.join(words)}{' required' if flag.required else f' = {flag.default!r}'}")
    return "\n".join(lines) + "\n"


def test_the_flags_of_every_command_are_those_of_the_frozen_list() -> None:
    assert listed() == FROZEN.read_text(encoding="utf-8"), __doc__


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_opens_with_examples_whose_flags_it_has(command: str) -> None:
    text = importlib.import_module(COMMANDS[command][0]).__doc__ or ""
    examples = [line for line in text.splitlines() if f"chakra-et {command} " in line]
    assert examples or command.startswith("measure"), "two lines of its use"
    known = {name for flag in cli.flags_of(COMMANDS[command][0]) for name in flag.option_strings}
    if command != "run":
        given = {word for line in examples for word in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line)}
        assert given <= known


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"chakra-et {__version__}\n"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["convrt"], "convert"),
        (["convert", "--comm-kernls"], "--comm-kernels"),
        (["predict", "run", "--bandwith=100Gbit/s"], "--bandwidth"),
    ],
)
def test_did_you_mean(words: list[str], meant: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    shown = capfd.readouterr().err
    assert status == 2 and shown.count("\n") == 1 and f"did you mean {meant}?" in shown


def test_nothing_like_it_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qqqq"]) == 2
    assert "use one of run, convert," in capsys.readouterr().err


@functools.cache
def completion(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert main(["completion", shell]) == 0
    return written.getvalue()


def answer(shell: str, *options: str, program: str) -> list[str]:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine")
    done = subprocess.run([shell, *options], input=program, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["chakra-et", "conv"], ["convert"]),
        (["chakra-et", "convert", "--comm-k"], ["--comm-kernels"]),
        (["chakra-et", "convert", "--engine", "m"], ["mlcommons"]),
        (["chakra-et", "completion", ""], ["bash", "zsh"]),
    ],
)
def test_bash_completes(line: list[str], offered: list[str]) -> None:
    words = " ".join(f"'{word}'" for word in line)
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _chakra_et; echo ${{COMPREPLY[*]}}"
    assert answer("bash", program=f"{completion('bash')}\n{ask}") == offered


def test_zsh_takes_the_completion_of_bash() -> None:
    program = f"autoload -U compinit && compinit -D -u\n{completion('zsh')}\nprint $_comps[chakra-et]"
    assert "_chakra_et" in answer("zsh", "-f", program=program)


if __name__ == "__main__":
    FROZEN.write_text(listed(), encoding="utf-8")
