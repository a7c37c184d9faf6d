"""The flags with which ``chakra-et scale`` and ``chakra-et predict`` give a run another size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from chakra_et.cli import option

if TYPE_CHECKING:
    from chakra_et.cost.network_fit import NetworkModel
    from chakra_et.transform.scale import Scaling

_SIZES = ("dp", "tp", "pp", "layers", "batch", "seq", "resize")


@dataclass(kw_only=True)
class SizeFlags:
    """A config that has these flags."""

    MOST: ClassVar[int] = 1 << 17
    """Of each degree of parallelism."""

    layers: str = option("repeated blocks of the model: a number, or a factor such as 2x", "")
    batch: str = option("sequences per rank and pass: a number, or 2x", "")
    seq: str = option("tokens per sequence: a number, or 2x", "")
    resize: tuple[str, ...] = option(
        "replace dimensions of tensors: 10=20 720=1440 doubles a batch of 10", (), metavar="OLD=NEW"
    )
    dp: int | None = option(
        "data-parallel ranks in place of the measured ones", None, short="--ranks", group="distribution"
    )
    tp: int | None = option("tensor-parallel ranks: a multiple of those measured", None, group="distribution")
    pp: int | None = option("pipeline stages: a multiple of the measured ones", None, group="distribution")
    mesh: str = option(
        "the measured mesh (tp2,dp4,pp2), if the groups don't show it", "", group="distribution"
    )
    network: str | None = option(
        "the run's network, if not fitted to it: 10Gbit/s,30us or a file of chakra-et measure-network",
        None,
        group="network",
    )

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= self.MOST:
                raise ValueError(f"--{name} {value}: use 1 to {self.MOST:,}")
        parse_sizes(self.resize)

    def sizes(self) -> dict[str, Any]:
        """The flags that are given but for --mesh and --network, in the order of a changed run's name."""
        return {name: value for name in _SIZES if (value := getattr(self, name))}

    def scaling(self, network: NetworkModel | None, **others: Any) -> Scaling | None:
        """The change that is asked for; None for none. ``network``: that of the run, None: fitted to it."""
        if not self.sizes():
            return None
        from chakra_et.transform.scale import Scaling  # a prediction without it loads little

        known = {name: getattr(self, name) for name in Scaling.__dataclass_fields__ if hasattr(self, name)}
        return Scaling(**(known | others | {"resize": parse_sizes(self.resize), "network": network}))


def parse_sizes(words: Sequence[str]) -> dict[int, int]:
    """``10=20 720=1440``: old size → new size. Raises ``ValueError``."""
    sizes = {}
    for word in words:
        found = re.fullmatch(r"(\d{1,12})=(\d{1,12})", word)
        if not found or not int(found[1]) or not int(found[2]):
            raise ValueError(f"--resize {word!r}: write OLD=NEW with sizes above 0, as 10=20 720=1440")
        sizes[int(found[1])] = int(found[2])
    return sizes
