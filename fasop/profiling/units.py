"""Seconds of the three kinds of unit that a decoder-only or encoder-only model is made of."""

from __future__ import annotations

from typing import NamedTuple

from fasop.inputs.models import Model


class KindSeconds(NamedTuple):
    """Seconds of the embedding, one transformer layer and the head."""

    embedding: float
    layer: float
    head: float

    def of_model(self, model: Model) -> tuple[float, ...]:
        """Seconds of every unit of the model, as ``Model.units`` orders them."""
        seconds = {"E": self.embedding, "T": self.layer, "P": self.head}
        return tuple(seconds[unit] for unit in model.units)
