"""One call of an operator: its class, and the sizes on which its time depends."""

from __future__ import annotations

from dataclasses import dataclass

CLASSES = (
    "attention",
    "convolution",
    "matrix product",
    "softmax",
    "normalization",
    "copy",
    "gather",
    "reduction",
    "elementwise",
    "memory copy",
    "memset",
)
"""Classes of kernels, by the operator that launched them."""


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator. ``operations``, ``moved`` (bytes): 0 for none or unknown. ``type``: of the
    first tensor, as PyTorch names it, or ``tf32``. ``idle``: the GPU did nothing just before.

    ``tested``: of an operator that the fit may use.

    Matrix products: ``product``: batch, M, N, K; ``aligned``: at which multiples of bytes the rows of its
    three matrices start; ``along``: whether each of the first two lies along K. Convolutions: ``product``:
    passes and the M, N, K that each amounts to; ``channels`` of the input; ``alone``: each of them by
    itself. Attention: ``batch`` (times heads), ``queries``, ``keys``, ``size`` of a head, ``causal``;
    ``masked``: with a mask of its own. ``row``: elements over which softmax runs. Elementwise: ``strided``:
    places are computed from indices; ``apart``: so many elements in a row don't lie beside each other;
    ``joins``: of ``cat``, elements of the longest tensor of its list; ``special``: with functions such as
    erf.
    """

    kind: str
    operations: float = 0.0
    moved: float = 0.0
    product: tuple[int, int, int, int] | None = None
    batch: int = 0
    queries: int = 0
    keys: int = 0
    size: int = 0
    causal: bool = False
    masked: bool = False
    row: int = 0
    channels: int = 0
    aligned: tuple[int, int, int] = (16, 16, 16)
    along: tuple[bool, bool] = (True, False)
    alone: bool = False
    idle: bool = False
    tested: bool = True
    strided: bool = False
    apart: int = 0
    joins: int = 0
    special: bool = False
    type: str = "c10::BFloat16"

    @property
    def known(self) -> bool:
        return self.operations > 0 or self.moved > 0

    @property
    def shaped(self) -> bool:
        """Whether the sizes are known by which a library chooses kernels."""
        return self.product is not None or self.keys > 0 or self.channels > 0


def item_bytes(type_name: str) -> int:
    """Bytes per element of a PyTorch type name; 2 where it is unknown."""
    short = type_name.rpartition("::")[2].lower()
    sizes = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "tf32": 4, "long int": 8, "long": 8}
    return 1 if short.startswith(("float8", "bool", "unsigned char", "signed char")) else sizes.get(short, 2)


def number(type_name: str) -> str:
    """The key of ``Gpu.peaks`` for a PyTorch type name; 16 bits where it is unknown."""
    short = type_name.rpartition("::")[2].lower()
    return (
        "8 bit" if short.startswith("float8") else short if short in ("double", "float", "tf32") else "16 bit"
    )
