"""``chakra-et completion SHELL``: completion of commands, flags and their choices.

source <(chakra-et completion bash)        in ~/.bashrc; with zsh in ~/.zshrc, after compinit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chakra_et import cli
from chakra_et.cli import spellings


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
    script = Path(__file__).with_suffix(".bash").read_text(encoding="utf-8")
    for place, words in (
        ("COMMANDS", " ".join(COMMANDS)),
        ("CHOICES", "\n".join(choices)),
        ("FLAGS", "\n".join(offered)),
    ):
        script = script.replace(f"@{place}@", words)
    print(script, end="")
    return 0
