"""``chakra-et completion SHELL``: completion of commands, flags and their choices.

source <(chakra-et completion bash)        in ~/.bashrc; with zsh in ~/.zshrc, after compinit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    shell: Literal["bash", "zsh"] = cli.option("bash or zsh", positional=True)


def main(argv: Sequence[str] | None = None) -> int:
    about = "Print a script by which a shell completes commands and flags of chakra-et."
    shell = cli.parse(CompletionConfig, argv, description=about).shell
    from chakra_et.__main__ import COMMANDS

    offered, choices = [], []
    for name, (module, _) in COMMANDS.items():
        actions = cli.flags_of(module)
        if words := " ".join(word for each in actions for word in spellings(each)):
            offered.append(f'            "{name} -"*) words="{words}" ;;')
        for each in actions:
            values = " ".join(map(str, each.choices or ()))
            for word in (spellings(each) or [name]) if values else ():
                choices.append(f'            "{name} {word}") words="{values}" ;;')
    print("autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh"), end="")
    commands = " ".join(COMMANDS)
    print(_BASH.format(commands=commands, choices="\n".join(choices), flags="\n".join(offered)), end="")
    return 0
