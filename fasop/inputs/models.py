"""The models that can be planned: ``data/models.json``, or a user's YAML file of the same shape."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from fasop.errors import PlanError, nearest
from fasop.inputs import kinds
from fasop.inputs.hf_config import read_config
from fasop.inputs.read_files import DATA, checked, kinds_of, read_settings, read_yaml

PRESETS = DATA / "models.json"
LAYERS = "TDF"  # of ``Model.kinds``
# The names that the published tool's users type.
CpComm = Literal["ring", "all-to-all", "p2p", "a2a"]  # the last two: Megatron's names
ALIASES = {"gpt2XL": "gpt2-xl", "gpt2xl": "gpt2-xl", "gpt2-1.5b": "gpt2-xl", "bert": "bert-large", "T5": "t5"}


@dataclass(frozen=True)
class Model:
    """A transformer as the planner sees it: a row of equal-width units.

    hidden, seq, vocab: sizes; layers: all transformer layers; heads: attention heads; d_kv: width of a
    head where it is not hidden / heads; global_batch: sequences per step; encoder_layers: for an
    encoder-decoder model, how many of the layers come before the decoder's embedding; costs: the entry
    of the cost table to use ("": the name).
    kv_heads: heads of keys and values (0: as many as heads); ffn: width of the feed-forward part (0: 4 ×
    hidden); gated: it has a gate matrix too (SwiGLU); tied: embedding and head share one matrix; causal: a
    token attends to earlier ones only; experts: feed-forward experts per layer (0: one, always used), of
    which each token uses ``top_k``, beside shared ones of width ``shared_ffn`` in all; dense: first layers
    that have none, but a feed-forward part of width ``dense_ffn``; groups, near: of experts, of which a
    token's are in ``near`` (0: any); kv_rank, q_rank, rope, v_width: of latent attention (DeepSeek-V2), its
    ranks, and the widths of a head that turn with positions and of its values; window: tokens that some
    layers attend to (0: all), windowed: how many layers (0: every second); mtp: modules that predict further
    tokens; qk_norm: queries and keys are normalized, too; post_norm: so are the outputs of attention and
    feed-forward part (Gemma 2); capped_scores, capped_logits: a tanh caps them; stepwise: its activation is
    no fused kernel; clamped: scores of unfused attention are, as OPT's; cp: GPUs that share each sequence, of
    which ``seq`` and ``global_batch`` then count the shares; cp_comm: how these attend to each other's
    tokens: keys and values go round a ring, or all-to-all exchanges give each GPU whole sequences of some
    heads (DeepSpeed-Ulysses);
    parameters: exactly how many it has (0: by these sizes); remark: what of it is computed otherwise.
    """

    name: str
    hidden: kinds.Count
    seq: kinds.Count
    layers: kinds.Layers
    vocab: kinds.Count
    heads: kinds.Count
    global_batch: kinds.Sequences
    d_kv: kinds.Count | None = None
    encoder_layers: kinds.Count | None = None
    costs: str = ""
    kv_heads: kinds.CountOrZero = 0
    ffn: kinds.CountOrZero = 0
    gated: bool = False
    tied: bool = True
    causal: bool = True
    experts: kinds.CountOrZero = 0
    top_k: kinds.Count = 2
    shared_ffn: kinds.CountOrZero = 0
    dense: kinds.CountOrZero = 0
    dense_ffn: kinds.CountOrZero = 0
    groups: kinds.CountOrZero = 0
    near: kinds.CountOrZero = 0
    kv_rank: kinds.CountOrZero = 0
    q_rank: kinds.CountOrZero = 0
    rope: kinds.CountOrZero = 0
    v_width: kinds.CountOrZero = 0
    window: kinds.CountOrZero = 0
    windowed: kinds.CountOrZero = 0
    mtp: kinds.CountOrZero = 0
    qk_norm: bool = False
    post_norm: bool = False
    capped_scores: bool = False
    capped_logits: bool = False
    stepwise: bool = False
    clamped: bool = False
    cp: kinds.Count = 1
    cp_comm: CpComm = "ring"
    parameters: Annotated[int, Meta(ge=0)] = 0
    remark: str = ""

    def __post_init__(self) -> None:
        where, heads, kv, encoder = f"model {self.name}", self.heads, self.kv_heads, self.encoder_layers
        for name, kind in kinds_of(Model).items():
            checked(f"{where}: {name}", getattr(self, name), kind)
        if self.d_kv is None and self.hidden % heads:
            near = max(n for n in range(1, heads + 1) if self.hidden % n == 0)
            split = f"hidden {self.hidden} can't be split over {heads} heads"
            raise PlanError(f"{where}: {split}: give heads {near}, or d_kv.")
        if kv and heads % kv:
            raise PlanError(f"{where}: kv_heads is {kv}: give a divisor of the {heads} heads.")
        if self.ffn_width < heads:
            # Tensor-parallel ranks take heads, and of the feed-forward part as large a share.
            name, value = ("ffn", self.ffn) if self.ffn else ("hidden", self.hidden)
            raise PlanError(f"{where}: {name} is {value}: give more than the {heads} heads.")
        if self.experts and self.top_k > self.experts:
            raise PlanError(f"{where}: top_k is {self.top_k}: give 1 to {self.experts}, all experts.")
        if self.dense and (not self.experts or not self.dense_ffn or self.dense >= self.layers or encoder):
            raise PlanError(
                f"{where}: dense is {self.dense}: give fewer than all layers, experts and dense_ffn."
            )
        if encoder is not None and not 0 < encoder < self.layers:
            raise PlanError(f"{where}: encoder_layers is {encoder}: give 1 to {self.layers - 1}.")

    @functools.cached_property
    def units(self) -> str:
        """One letter per unit that partitions count: E embedding, T layer, P post-process.

        With an encoder the second E is the decoder's embedding, and the post-process is part of the last
        layer of each half, as in the measured costs.
        """
        return self.kinds.replace("D", "T").replace("F", "T")

    @functools.cached_property
    def kinds(self) -> str:
        """``units`` with D for the layers of a decoder that has an encoder before it, and F for those without
        the experts that others have.
        """
        if self.encoder_layers is None:
            return "E" + "F" * self.dense + "T" * (self.layers - self.dense) + "P"
        return "E" + "T" * self.encoder_layers + "E" + "D" * (self.layers - self.encoder_layers)

    @functools.cached_property
    def plain(self) -> Model:
        """A model whose layers are those without experts."""
        return replace(self, experts=0, shared_ffn=0, ffn=self.dense_ffn, dense=0, dense_ffn=0, parameters=0)

    @property
    def head_width(self) -> int:
        return self.d_kv or self.hidden // self.heads

    @property
    def width(self) -> int:
        """Of all queries of a token."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Of all keys, and of all values, of a token."""
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def by_heads(self) -> bool:
        """Whether the GPUs that share a sequence share the heads of its attention."""
        return self.cp > 1 and self.cp_comm in ("all-to-all", "a2a")

    @property
    def most_tp(self) -> int:
        """Of which tensor-parallel degrees are divisors: they split heads, of keys and values too."""
        return math.gcd(self.heads, self.kv_heads or self.heads) // (self.cp if self.by_heads else 1)

    def projections(self, tp: int = 1) -> list[tuple[int, int]]:
        """Outputs and inputs of the matrices of a layer's attention on one of ``tp`` ranks: queries, keys and
        values, output; or latent attention's (DeepSeek-V2): down, queries up, keys and values up, output.
        """
        h, heads = self.hidden, self.heads // tp
        if not self.kv_rank:
            return [((self.width + 2 * self.kv_width) // tp, h), (h, self.width // tp)]
        return [
            (self.q_rank + self.kv_rank + self.rope, h),
            (heads * self.head_width, self.q_rank or h),
            (heads * (self.head_width - self.rope + self.v_width), self.kv_rank),
            (h, heads * self.v_width),
        ]

    @property
    def attention_weights(self) -> int:
        """Of a layer, biases not counted."""
        return sum(outputs * inputs for outputs, inputs in self.projections())

    def receivers(self, ranks: int) -> float:
        """How many of the ranks that share a layer's experts hold some of a token's, on average."""
        near = max(ranks * self.near / self.groups, min(self.near, ranks)) if self.groups else ranks
        return near * (1 - (1 - 1 / near) ** self.top_k)

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the model, forward and backward, without recomputation: 6 for each weight that a token is
        multiplied by, and the products of attention over whole sequences (Chowdhery et al. 2022, "PaLM",
        appendix B).
        """
        h, feed = self.hidden, (3 if self.gated else 2) * self.hidden * self.ffn_width
        layer = self.attention_weights + feed * (self.top_k if self.experts else 1) + h * self.experts
        layer += (3 if self.gated else 2) * h * self.shared_ffn
        plain = self.attention_weights + (3 if self.gated else 2) * h * self.dense_ffn
        crossed = self.kinds.count("D")
        weights = (self.layers - self.dense) * layer + self.dense * plain
        weights += crossed * self.attention_weights + h * self.vocab
        scores = self.heads * (self.head_width + (self.v_width or self.head_width))
        return 6 * weights + 6 * (self.layers + crossed) * scores * self.seq * self.cp

    def split_sequences(self, cp: int, comm: CpComm = "ring") -> Model:
        """The model with each sequence shared by ``cp`` GPUs. Raises ``PlanError``."""
        if self.seq % cp:
            raise PlanError(f"model {self.name}: cp {cp} doesn't divide sequences of {self.seq} tokens.")
        batch = self.global_batch * cp
        found = replace(self, seq=self.seq // cp, global_batch=batch, cp=cp, cp_comm=comm)
        if found.by_heads and self.most_tp % cp:
            raise PlanError(
                f"model {self.name}: cp_comm {comm} splits heads: cp {cp} must divide {self.most_tp} of them."
            )
        return found

    def embedding_stages(self, partition: tuple[int, ...]) -> list[int]:
        """Stages whose embedding gradients are summed: those that hold a copy of one matrix.

        First and last where embedding and head are tied, and that of a decoder's embedding.
        """
        if self.encoder_layers is None:
            return sorted({0, len(partition) - 1}) if self.tied else [0]
        ends = itertools.accumulate(partition)
        middle = sum(end <= self.encoder_layers + 1 for end in ends)
        return sorted({0, middle, len(partition) - 1})


def find_model(name: str, path: str = "") -> Model:
    """The model of that name, from the user's file where one is given, or of a Hugging Face ``config.json``
    or its folder. Raises ``PlanError``.

    Other entries of the file are not looked at.
    """
    config = Path(name, "config.json") if Path(name, "config.json").is_file() else Path(name)
    if config.suffix == ".json":
        named = config.absolute().parent.name if config.name == "config.json" else config.stem
        return Model(name=named, **read_config(config))
    file = Path(path) if path else PRESETS
    entries = read_yaml(file, "models")
    name = name if name in entries else ALIASES.get(name, name)
    if name not in entries:
        raise PlanError(f"{path + ': ' if path else ''}no model {name!r}: {nearest(name, entries)}")
    where = path or file.name
    settings = {key: kind for key, kind in kinds_of(Model).items() if key != "name"}
    needed = [field.name for field in fields(Model) if field.name in settings and field.default is MISSING]
    values = read_settings(f"{where}: model {name}", entries[name], settings, needed)
    try:
        return Model(name=name, **values)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
