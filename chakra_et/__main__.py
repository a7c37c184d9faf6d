"""``chakra-et COMMAND …``, also as ``python -m chakra_et COMMAND …``.

Exit status: 0; 2 for arguments or files that can't be used; 1 as a command's own module says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chakra_et import cli
from chakra_et.errors import TraceError

# Command → (module with ``main(argv) -> status``, one line of help).
COMMANDS = {
    "run": ("chakra_et.capture.run", "trace a training script without editing it"),
    "convert": ("chakra_et.convert.command", "convert host and device traces to .et files"),
    "repair": ("chakra_et.repair.command", "repair damaged host and device traces"),
    "validate": ("chakra_et.validate.command", "check .et files, each by itself and as a run"),
    "info": ("chakra_et.info.command", "show the contents of .et files: nodes, edges, times, collectives"),
    "diagnose": ("chakra_et.diagnose.command", "find what bounds a run, which rank is slow, what to change"),
    "stragglers": ("chakra_et.stragglers.command", "find slow ranks and what they cost"),
    "replay": ("chakra_et.simulate.command", "replay a run and compare with the measured times"),
    "scale": ("chakra_et.transform.command", "make a run with other ranks, layers, batch or sequence"),
    "fetch-example": ("chakra_et.astra.examples", "unpack a small example, a folder that ASTRA-sim runs"),
    "astra": ("chakra_et.astra.command", "write a folder that ASTRA-sim runs, or check its log"),
    "report": ("chakra_et.report.command", "write one HTML page about a run: timeline, breakdown, …"),
    "compare": ("chakra_et.report.compare", "compare runs: steps, breakdown, operators, modules"),
    "export": ("chakra_et.export.command", "write a run for Perfetto, Chrome, TensorBoard or as tables"),
    "predict": ("chakra_et.predict.command", "predict step times under changed conditions"),
    "measure-network": ("chakra_et.predict.measure", "time collectives and fit a network model to them"),
    "measure-gpu": ("chakra_et.predict.measure_gpu", "time kernels on this GPU and fit its model to them"),
    "doctor": ("chakra_et.doctor.command", "check capture and prediction on this machine"),
    "completion": ("chakra_et.completion", "print the completion of chakra-et for bash or zsh"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return cli.dispatch("chakra-et", COMMANDS, argv, TraceError)


if __name__ == "__main__":
    sys.exit(main())
