"""The models that can be planned: ``models.yaml`` here, or a file of the same shape given by the user."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields
from pathlib import Path

from fasop.errors import PlanError, nearest
from fasop.inputs.settings import read_mapping, read_yaml, whole

PRESETS = Path(__file__).parents[1] / "data" / "models.yaml"
# The names that the published tool's users type.
ALIASES = {"gpt2XL": "gpt2-xl", "gpt2xl": "gpt2-xl", "gpt2-1.5b": "gpt2-xl", "bert": "bert-large", "T5": "t5"}


@dataclass(frozen=True)
class Model:
    """A transformer as the planner sees it: a row of equal-width units.

    hidden, seq, vocab: sizes; layers: all transformer layers; heads: attention heads; d_kv: width of a
    head where it is not hidden / heads; global_batch: sequences a step; encoder_layers: for an
    encoder-decoder model, how many of the layers come before the decoder's embedding; costs: the entry
    of the cost table to use ("" : the name).
    """

    name: str
    hidden: int
    seq: int
    layers: int
    vocab: int
    heads: int
    global_batch: int
    d_kv: int | None = None
    encoder_layers: int | None = None
    costs: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise PlanError(f"model {self.name}: {field.name} is {value}: give at least 1.")
        if self.d_kv is None and self.hidden % self.heads:
            near = max(n for n in range(1, self.heads + 1) if self.hidden % n == 0)
            raise PlanError(
                f"model {self.name}: hidden {self.hidden} can't be split over {self.heads} heads: "
                f"give heads {near}, or d_kv."
            )
        if self.encoder_layers is not None and not 0 < self.encoder_layers < self.layers:
            raise PlanError(
                f"model {self.name}: encoder_layers is {self.encoder_layers}: give 1 to {self.layers - 1}."
            )

    @functools.cached_property
    def units(self) -> str:
        """One letter a unit that partitions count: E embedding, T layer, P post-process.

        With an encoder the second E is the decoder's embedding, and the post-process is part of the last
        layer of each half, as in the measured costs.
        """
        if self.encoder_layers is None:
            return "E" + "T" * self.layers + "P"
        return "E" + "T" * self.encoder_layers + "E" + "T" * (self.layers - self.encoder_layers)

    def launch_layers(self, partition: tuple[int, ...]) -> tuple[int, ...]:
        """Transformer layers of each stage, as Megatron counts them: ``partition`` without E and P."""
        counts, begin = [], 0
        for size in partition:
            counts.append(self.units[begin : begin + size].count("T"))
            begin += size
        return tuple(counts)

    def embedding_stages(self, partition: tuple[int, ...]) -> list[int]:
        """Stages that hold a copy of the embedding matrix: first, last, and that of a decoder's embedding."""
        middle = 0
        if self.encoder_layers is not None:
            ends = itertools.accumulate(partition)
            middle = sum(end <= self.encoder_layers + 1 for end in ends)
        return sorted({0, middle, len(partition) - 1})


def load_models(path: Path = PRESETS) -> dict[str, Model]:
    """Read a models file, ``{models: {name: {hidden: …}}}``. Raises ``PlanError``."""
    entries = read_yaml(path, "models")
    models = {}
    for name, entry in entries.items():
        values = read_mapping(
            f"{path}: model {name}", entry, [f.name for f in fields(Model) if f.name != "name"]
        )
        missing = [f.name for f in fields(Model) if f.type == "int" and f.name not in values]
        if missing:
            raise PlanError(f"{path}: model {name} lacks {', '.join(missing)}.")
        for key, value in values.items():
            if key != "costs" and value is not None:
                values[key] = whole(f"{path}: model {name}: {key}", value)
        models[str(name)] = Model(name=str(name), **values)
    return models


def find_model(name: str, path: str = "") -> Model:
    """The model of that name, from the user's file where one is given. Raises ``PlanError``."""
    models = load_models(Path(path) if path else PRESETS)
    name = name if name in models else ALIASES.get(name, name)
    if name not in models:
        raise PlanError(f"no model {name!r}: {nearest(name, models)}")
    return models[name]
