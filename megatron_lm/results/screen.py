"""A run's tables on a terminal, refreshed in place; needs rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_lm.results import view
from megatron_lm.results.view import View

ROWS = 8  # of a table: its last ones
HIDDEN = ("Settings", "Memory by rank")


@contextmanager
def opened() -> Iterator[Callable[[View], None] | None]:
    """A function that shows a run in place of what it showed before; None without rich or a terminal."""
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        yield None
        return
    if not sys.stdout.isatty():
        yield None
        return
    with Live(auto_refresh=False) as live:

        def show(run: View) -> None:
            states = ", ".join(f"{job} {known}" for job, known in run.states.items())
            parts: list[Text | Table] = [
                Text(states, "bold"),
                *(Text(each, "bold red") for each in run.found),
            ]
            for table in view.tables([run]):
                if table.title not in HIDDEN:
                    made = Table(*table.header, title=table.title, title_justify="left")
                    for row in table.rows[-ROWS:]:
                        made.add_row(*map(Text, row))
                    parts.append(made)
            live.update(Group(*parts), refresh=True)

        yield show
