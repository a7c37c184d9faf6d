"""The command line of every script, made from its config dataclass.

Each field is a flag: ``max_steps: int = option("…", 10)`` gives ``--max-steps``; ``--max_steps`` is accepted
too. A bool gives ``--flag`` and ``--no-flag``, a ``Literal`` its choices, a
``tuple[str, ...]`` takes any number of words. Further metadata:

- ``"positional": True``: an argument without dashes; a tuple without a default takes one word or more
- ``"short": "-o"``: a second, short name
- ``"group": "for damaged or hostile files"``: list the flag under this heading of ``--help``
- ``"metavar": "FOLDER"``: the placeholder for the value in ``--help``
- ``"choices": ("a", "b")``: the words to choose from, where a ``Literal`` can't name them
- ``"least": 1``, ``"above": 0``, ``"most": 9``: bounds of a number, or of each of several

``__post_init__`` of the dataclass rejects any other value by raising ``ValueError``: the script prints one
line and exits with status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from chakra_et import __version__
from chakra_et.text import printable

Config = TypeVar("Config")
Refusal = type[Exception] | tuple[type[Exception], ...]
# The program and command that ``dispatch`` runs, for usage lines.
_running: str | None = None
_describing = False


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field of a config dataclass: its line of help, its default and further metadata."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def run_names(
    what: str = "the run", also: str = "a folder, .et files or PyTorch traces", **metadata: Any
) -> Any:
    """The field of commands that read runs: ``convert.inputs.find_run`` or ``et.sets.find_rank_sets``."""
    text = f"{what}: FOLDER/NAME for FOLDER/NAME.0.et, NAME.1.et, …; or {also}"
    return option(text, positional=True, **{"metavar": "NAME"} | metadata)


def allow_missing_ranks() -> Any:
    """The field of every command that reads runs, see ``chakra_et.et.record``."""
    return option("go on where ranks are missing, or files are not those of one finished conversion", False)


def skeletons() -> Any:
    """The field of commands whose questions are about all ranks together, see ``chakra_et.ranks``."""
    text = "read the ranks' skeletons; auto: of more than 64 ranks, or where the .et files aren't there"
    return option(text, "auto")


def cluster(tasks: str = "each rank") -> Any:
    """The field of commands that give a cluster ``tasks``."""
    text = f"work on {tasks} as a task of a Dask cluster: local, slurm, or a scheduler's tcp://HOST:PORT"
    return option(text, "", metavar="WHERE")


def parse(config_class: type[Config], argv: Sequence[str] | None = None, **parser_options: Any) -> Config:
    """Read the command line into one config.

    ``argv`` is as for ``argparse`` (None: ``sys.argv[1:]``); ``parser_options`` are passed to
    ``argparse.ArgumentParser``, with a description's first line. Raises ``SystemExit(2)`` for an unknown flag
    or a rejected value.
    """
    parser_options = {"prog": _running, "formatter_class": _HelpFormatter, **parser_options}
    parser = _Parser(allow_abbrev=False, **parser_options)
    parser.description = (parser.description or "").partition("\n")[0]
    _add_flags(parser, config_class)
    parser.width = None
    if _describing:
        raise _Described(parser)
    given = vars(parser.parse_args(argv))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return made(config_class, values)
    except ValueError as error:
        parser.error(str(error))


def made(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    """The config of these values. Raises ``ValueError`` for one out of bounds, and what the config raises."""
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        given = values.get(field.name)
        least, above, most = (field.metadata.get(name) for name in ("least", "above", "most"))
        if given is None or (least, above, most) == (None, None, None):
            continue
        for value in given if isinstance(given, tuple) else (given,):
            is_low = value < least if above is None else value <= above
            if is_low or not value <= (sys.float_info.max if most is None else most):
                words = f"at least {least:,}" if above is None else f"a number above {above:,}"
                words = words if most is None else f"{least:,} to {most:,}"
                raise ValueError(f"--{field.name.replace('_', '-')} is {value}: give {words}")
    return config_class(**values)


def flags_of(module: str) -> list[argparse.Action]:
    """The flags and arguments of the command in ``module``; [] where it parses none with ``parse``."""
    global _describing
    _describing = True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(module).main([])
    except _Described as found:
        return list(found.args[0]._actions)
    finally:
        _describing = False
    return []


class _Described(BaseException):
    """Ends a command where it would read its arguments; carries its parser."""


def _add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add one flag per field of the dataclass to ``parser``, and the usage line."""
    hints = typing.get_type_hints(config_class)
    headings: dict[str, argparse._ArgumentGroup] = {}
    required, positional = [], []
    for field in dataclasses.fields(config_class):
        heading = field.metadata.get("group")
        if heading and heading not in headings:
            headings[heading] = parser.add_argument_group(heading)
        action = _add_flag(headings[heading] if heading else parser, field, hints[field.name])
        name = str(action.metavar)
        if not action.option_strings:
            forms = {"*": f"[{name} ...]", "+": f"{name} [{name} ...]", "?": f"[{name}]"}
            positional.append(forms.get(str(action.nargs), name))
        elif action.required:
            required.append(f"{action.option_strings[0]} {name}")
    parser.usage = " ".join(["%(prog)s", *required, "[flags]", *positional])


def _add_flag(
    parser: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any
) -> argparse.Action:
    metadata = field.metadata
    options: dict[str, Any] = {"help": metadata.get("help", "")}
    if field.default is not dataclasses.MISSING:
        options["default"] = field.default
    if typing.get_origin(hint) in (Union, types.UnionType):  # X | None: None means that it was not given
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    several = typing.get_origin(hint) is tuple
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        options |= {"choices": choices, "type": type(choices[0])}
        if "bare" in metadata:  # what the flag alone means
            options |= {"nargs": "?", "const": metadata["bare"]}
    elif several:
        options |= {"nargs": "*", "type": typing.get_args(hint)[0]}
    elif hint is not bool:
        options["type"] = hint
    if "choices" in metadata:
        options["choices"] = metadata["choices"]
    # The placeholder for a value: N or X for a number, or else the last word of the field's name.
    word = field.name.rstrip("_").rsplit("_", 1)[-1].upper()
    if metadata.get("positional"):
        if several or "default" in options:
            options["nargs"] = "?" if not several else "*" if "default" in options else "+"
        return parser.add_argument(
            field.name, metavar=metadata.get("metavar") or word.removesuffix("S"), **options
        )
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif "choices" not in options:
        number = {int: "N", float: "X"}.get(options["type"], word)
        options["metavar"] = metadata.get("metavar") or number
    if several:
        options["action"] = _Collect
    # A trailing underscore avoids a Python keyword: ``for_`` is --for.
    name = field.name.rstrip("_")
    names = [metadata["short"]] if "short" in metadata else []
    names += dict.fromkeys(["--" + name.replace("_", "-"), "--" + name])
    action = parser.add_argument(*names, dest=field.name, required="default" not in options, **options)
    action.help = options["help"]  # before Python 3.13 a switch adds its default
    return action


def dispatch(
    program: str,
    commands: Mapping[str, tuple[str, str]],
    argv: Sequence[str] | None,
    refusal: Refusal,
    needs: str = "",
) -> int:
    """Run ``program COMMAND …`` and return its exit status, 2 for unusable arguments or input.

    ``commands``: name → (module with ``main(argv) -> status``, one line of help). Only the module of the
    command that runs is imported. ``refusal`` is the error that a command raises for bad input;
    ``needs``: the environment of a checkout that has all packages, see scripts/environment.py.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, commands))
        print(f"usage: {program} COMMAND … (see COMMAND --help)\n")
        print("\n".join(f"  {name:{width}}  {line}" for name, (_, line) in commands.items()))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"{program} {__version__}")
        return 0
    if arguments[0] not in commands:
        listed = did_you_mean(arguments[0], commands) or f": use one of {', '.join(commands)}"
        return _fail(f"error: no command {arguments[0]!r}{listed}", 2)
    global _running
    _running, module = f"{program} {arguments[0]}", commands[arguments[0]][0]
    try:
        return run(lambda: importlib.import_module(module).main(arguments[1:]), refusal)
    except ModuleNotFoundError as error:
        if not needs:
            raise
        make = f"make the environment with 'python3 scripts/environment.py {needs}' and use .venv/bin/python."
        return _fail(f"error: {error.name} is not installed for {sys.executable}: {make}", 2)
    finally:
        _running = None


def run(work: Callable[[], int | None], refusal: Refusal, interrupted: str = "interrupted.") -> int:
    """Run a command and return its exit status; bad input prints one sentence and no traceback.

    A ``refusal`` raised by ``work`` carries that sentence, an ``OSError`` names its file; both return 2.
    ``interrupted`` is printed on Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and paths may hold letters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except refusal as error:
        return _fail(f"error: {error}", 2)
    except KeyboardInterrupt:
        return _fail(interrupted, 130)
    except BrokenPipeError:
        # The reader has gone (`… | head`); without this the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"error: {error.filename or 'output'}: {error.strerror or error}.", 2)
    except Exception as error:
        if not type(error).__module__.startswith(("botocore.", "gcsfs.", "google.", "azure.")):
            raise
        return _fail(f"error: the object store can't be used: {error}.", 2)


def spellings(flag: argparse.Action) -> list[str]:
    """The spellings of a flag that help shows; [] for an argument without dashes."""
    hidden = "--no-" if flag.default is False else "_"
    return [name for name in flag.option_strings if "_" not in name and not name.startswith(hidden)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``, did you mean …?`` with the one of ``known`` that is most like ``word``; "" if none is."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {found[0]}?" if found else ""


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line in one line, without the usage."""

    width: int | None = 80  # while flags are added: to look up the terminal's loads shutil

    def _get_formatter(self) -> argparse.HelpFormatter:
        return self.formatter_class(self.prog, width=self.width)  # type: ignore[call-arg]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = self.parse_known_args(args, namespace)
        if others:
            flags = [word.partition("=")[0] for word in others if word.startswith("--")]
            known = [name for name in self._option_string_actions if "_" not in name]
            hint = did_you_mean(flags[0], known) if flags else ""
            self.error(f"unrecognized arguments: {' '.join(others)}{hint}")
        return found

    def error(self, message: str) -> typing.NoReturn:
        self.exit(_fail(f"{self.prog}: error: {message} (see {self.prog} --help)", 2))


class _HelpFormatter(argparse.HelpFormatter):
    """One dashed spelling per flag, ``--no-flag`` only for flags that are on, and no empty default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper()).strip('[]')}"
        return ", ".join(spellings(action)) + value

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if default is None or default is False or default in ("", (), argparse.SUPPRESS):
            return text
        shown = "on" if default is True else f"{default:g}" if type(default) is float else str(default)
        if isinstance(default, tuple):
            shown = " ".join(map(str, default))
        return f"{text} (default: {shown})".replace("%", "%%")


def _fail(sentence: str, status: int) -> int:
    from chakra_et.redact import redacted  # only failures need it

    print(printable(redacted(sentence)), file=sys.stderr)
    return status


class _Collect(argparse.Action):
    """The values of a flag in place of its default; of one that is given several times, all of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if earlier is self.default else [*earlier, *values])
