"""$ per step: the nodes that a plan uses, and the traffic that is charged."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from fasop.exact.links import Links
from fasop.exact.memory import copies, counted_twice, parameters
from fasop.exact.passes import BACKWARD_SUMS, FORWARD_SUMS
from fasop.exact.stage_costs import message_bytes
from fasop.plans.plan import Plan

Seat = tuple[int, str]  # of one GPU: its node's number, and its type


def price_per_step(plan: Plan) -> float:
    """$ per step: the hourly price of the nodes times the step time, plus the traffic over charged links."""
    price = plan.cluster.price_of(plan.placement) / 3600 * plan.step_time
    if any(link.price_per_gb for link in plan.cluster.links):
        links = Links(plan.cluster)
        for (one, two), sent in sent_between(plan).items():
            link = links.link(one, two)
            price += link.price_per_gb / 1e9 * sent if link else 0.0
    return price


def sent_between(plan: Plan) -> dict[tuple[str, str], float]:
    """Bytes per step that nodes of each type send to other nodes of each type."""
    return _Traffic(plan).total()


class _Traffic:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.sent = plan, defaultdict[tuple[str, str], float](float)
        sizes = [plan.cluster.size(plan.cluster.gpu(name)) for name in plan.placement]
        nodes = zip(plan.placement, sizes, strict=True)
        seats = [(node, name) for node, (name, size) in enumerate(nodes) for _ in range(size)]
        group = plan.tp * plan.dp
        self.stages = [seats[at * group : (at + 1) * group] for at in range(plan.pp)]

    def total(self) -> dict[tuple[str, str], float]:
        self._messages()
        first = 0
        for at, (seats, count) in enumerate(zip(self.stages, self.plan.partition, strict=True)):
            units = slice(first, first + count)
            first += count
            self._gradients(at, seats, units)
            self._within_passes(at, seats, units)
        self._embedding()
        return self.sent

    def _tp(self, stage: int) -> int:
        return self.plan.choices[stage].tp if self.plan.choices else self.plan.tp

    def _send(self, one: Seat, two: Seat, size: float) -> None:
        if one[0] != two[0]:
            self.sent[one[1], two[1]] += size

    def _ring(self, seats: Sequence[Seat], size: float, passes: int) -> None:
        """A ring through the nodes of some GPUs, over each link of which ``passes`` (n−1)/n of the bytes
        go."""
        nodes = list(dict.fromkeys(seats))
        if len(nodes) > 1:
            for one, two in itertools.pairwise([*nodes, nodes[0]]):
                self._send(one, two, size * passes * (len(seats) - 1) / len(seats))

    def _messages(self) -> None:
        """Activations, and as many gradients back, over each boundary for each chunk of layers."""
        plan = self.plan
        batch = plan.dp * plan.mbs * message_bytes(plan.model, plan.options, plan.tp)
        each = batch / (plan.tp * plan.dp) * plan.micro_batches
        chunks = plan.virtual_stages
        boundaries = [*list(itertools.pairwise(range(plan.pp))) * chunks]
        boundaries += [(plan.pp - 1, 0)] * (chunks - 1)
        for left, right in boundaries:
            for one, two in zip(self.stages[left], self.stages[right], strict=True):
                self._send(one, two, each)
                self._send(two, one, each)

    def _gradients(self, stage: int, seats: Sequence[Seat], units: slice) -> None:
        """What the GPUs with the same parameters exchange: gradients, and parameters that ZeRO shares out."""
        plan, tp = self.plan, self._tp(stage)
        options, m = plan.options, plan.micro_batches
        held, of_experts = (float(each[units].sum()) for each in parameters(plan.model, tp, plan.ep))
        held -= float(counted_twice(plan.model, tp, copies(plan.model)[units].sum()))
        # An all-reduce passes the bytes twice, a reduce-scatter or an all-gather once.
        gathered = {0: 0, 1: 1, 2: 1, 3: 2 * m}[options.zero] * options.activation_bytes
        reduced = {0: 2, 1: 1, 2: m, 3: m}[options.zero] * options.gradient_bytes
        for rank in range(tp):
            ring = seats[rank::tp]
            self._ring(ring, (held - of_experts) * (gathered + reduced), 1)
            for expert in range(plan.ep if of_experts else 0):
                self._ring(ring[expert :: plan.ep], of_experts * (gathered + reduced), 1)

    def _within_passes(self, stage: int, seats: Sequence[Seat], units: slice) -> None:
        """Sums over tensor-parallel groups, and tokens on their way to experts and back."""
        plan, tp, model = self.plan, self._tp(stage), self.plan.model
        recompute = plan.choices[stage].recompute if plan.choices else plan.options.recompute
        replicas = len(seats) // tp
        tokens = plan.dp * plan.mbs / replicas * model.seq * plan.micro_batches
        size = tokens * model.hidden * plan.options.activation_bytes
        again = [kind for kind in model.kinds[units] if kind in "TD" and recompute == "full"]
        sums = sum(FORWARD_SUMS[kind] + BACKWARD_SUMS[kind] for kind in model.kinds[units])
        sums += sum(FORWARD_SUMS[kind] for kind in again)
        for replica in range(replicas):
            self._ring(seats[replica * tp : (replica + 1) * tp], size * sums, 2)
        if plan.ep == 1:
            return
        layers = sum(kind in "TD" for kind in model.kinds[units])
        exchanges = 4 * layers + 2 * len(again)  # there and back, in each pass
        each = size * model.top_k / tp / plan.ep * exchanges
        for first, rank in itertools.product(range(0, replicas, plan.ep), range(tp)):
            ranks = seats[first * tp + rank : (first + plan.ep) * tp : tp]
            for one, two in itertools.permutations(ranks, 2):
                self._send(one, two, each)

    def _embedding(self) -> None:
        """The sum of the embedding's copies, among the GPUs at the same place of their stages."""
        plan = self.plan
        holders = plan.model.embedding_stages(plan.partition)
        size = plan.model.hidden * plan.model.vocab / plan.tp * plan.options.gradient_bytes
        for seats in zip(*(self.stages[stage] for stage in holders), strict=True):
            self._ring(seats, size, 2)
