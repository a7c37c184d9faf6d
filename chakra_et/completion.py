"""``chakra-et completion SHELL``: completion of commands, flags and their choices.

source <(chakra-et completion bash)        in ~/.bashrc; with zsh in ~/.zshrc, after compinit
chakra-et completion fish > ~/.config/fish/completions/chakra-et.fish
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chakra_et import cli
from chakra_et.cli import spellings

_BASH = """_chakra_et() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" = 1 ]; then
        words="{commands} --help --version"
    else
        case "$command ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{choices}
        esac
        case "$command $word" in
{flags}
        esac
    fi
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$words" -- "$word")
}}
complete -o default -F _chakra_et chakra-et
"""


@dataclass
class CompletionConfig:
    """The command's arguments."""

    shell: Literal["bash", "zsh", "fish"] = field(
        metadata={"positional": True, "help": "the shell to write for"}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    about = "Print the completion of chakra-et for a shell."
    shell = cli.parse(CompletionConfig, argv, description=about).shell
    from chakra_et.__main__ import COMMANDS

    flags = {name: cli.flags_of(module) for name, (module, _) in COMMANDS.items()}
    if shell == "fish":
        print("\n".join(_fish({name: line for name, (_, line) in COMMANDS.items()}, flags)))
        return 0
    offered, choices = [], []
    for name, actions in flags.items():
        if words := " ".join(word for each in actions for word in spellings(each)):
            offered.append(f'            "{name} -"*) words="{words}" ;;')
        for each in actions:
            for word in (spellings(each) or [name]) if each.choices else ():
                choices.append(f'            "{name} {word}") words="{_choices(each)}" ;;')
    print("autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh"), end="")
    commands = " ".join(flags)
    print(_BASH.format(commands=commands, choices="\n".join(choices), flags="\n".join(offered)), end="")
    return 0


def _fish(commands: dict[str, str], flags: dict[str, list[argparse.Action]]) -> Iterator[str]:
    start = "complete -c chakra-et"
    for name, line in commands.items():
        yield f"{start} -n __fish_use_subcommand -f -a {name} -d {shlex.quote(line)}"
    for name, actions in flags.items():
        for each in actions:
            words = [f"-l {word[2:]}" if word[:2] == "--" else f"-s {word[1:]}" for word in spellings(each)]
            values = f" -xa {shlex.quote(_choices(each))}" if each.choices else " -r" * (each.nargs != 0)
            if words or each.choices:
                within = f"-n '__fish_seen_subcommand_from {name}'"
                about = shlex.quote((each.help or "").replace("\n", " "))
                yield f"{start} {within} {' '.join(words)}{values} -d {about}"


def _choices(flag: argparse.Action) -> str:
    return " ".join(map(str, flag.choices or ()))
