"""Host and device traces made from a small simulated machine, so that the true graph is known.

``program`` defines what a process does (threads, operators, launches, waits), ``parts`` and ``build`` make
random training programs of it, ``machine`` runs them and knows when everything happens and why,
``host_layouts`` and ``device_layouts`` write it down as the profilers of all versions would, and ``truth``
compares what a converter made of that with what happened.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.generator.build import Features, build
from tests.generator.device_layouts import device_text, device_trace
from tests.generator.host_layouts import host_text, host_trace
from tests.generator.layouts import Layout
from tests.generator.machine import Run, run
from tests.generator.program import Program

__all__ = ["Features", "Generated", "Layout", "Program", "Run", "build", "generate", "run"]


@dataclass
class Generated:
    """A program, its execution, and its two traces as documents."""

    program: Program
    run: Run
    layout: Layout
    host: dict[str, Any] = field(repr=False)
    device: dict[str, Any] = field(repr=False)

    def write(self, folder: Path, name: str = "run") -> tuple[Path, Path]:
        """Write NAME_host.json and NAME_device.json (.gz), NAME_rankN_… for other ranks."""
        name += f"_rank{self.program.rank}" if self.program.rank else ""
        texts = {"host": host_text(self.host, self.layout), "device": device_text(self.device, self.layout)}
        paths = []
        for side, text in texts.items():
            path = folder / f"{name}_{side}.json{'.gz' if self.layout.gz else ''}"
            path.write_bytes(gzip.compress(text.encode(), 1, mtime=0) if self.layout.gz else text.encode())
            paths.append(path)
        return paths[0], paths[1]


def generate(program: Program | Features, layout: Layout | None = None) -> Generated:
    """Run a program, or the one for these features, and make its traces (default layout: PyTorch 2.13)."""
    layout = layout or Layout()
    program = build(program) if isinstance(program, Features) else program
    happened = run(program)
    return Generated(
        program,
        happened,
        layout,
        host_trace(program, happened, layout),
        device_trace(program, happened, layout),
    )
