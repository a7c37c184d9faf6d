"""$ per step: the nodes that a plan uses, and the traffic that is charged."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from fasop.exact.communication import Communication
from fasop.exact.memory import held_parameters
from fasop.exact.passes import BACKWARD_SUMS, FORWARD_SUMS
from fasop.exact.stage_costs import message_bytes
from fasop.plans.plan import Plan

Seat = tuple[int, str]  # of one GPU: its node's number, and its type


def price_per_step(plan: Plan) -> float:
    """$ per step: the hourly price of the nodes times the step time, plus the traffic over charged links."""
    prices = [plan.cluster.gpu(name).price_per_hour for name in plan.placement]
    price = sum(prices) / 3600 * plan.step_time
    if any(link.price_per_gb for link in plan.cluster.links):
        links = Communication(plan.cluster)
        for (one, two), sent in sent_between(plan).items():
            link = links.link(one, two)
            price += link.price_per_gb / 1e9 * sent if link else 0.0
    return price


def sent_between(plan: Plan) -> dict[tuple[str, str], float]:
    """Bytes per step that nodes of each type send to other nodes of each type."""
    model, options, m = plan.model, plan.options, plan.micro_batches
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    group, width = plan.tp * plan.dp, options.activation_bytes

    def send(one: Seat, two: Seat, size: float) -> None:
        if one[0] != two[0]:
            found[one[1], two[1]] += size

    def ring(seats: Sequence[Seat], size: float, passes: int = 1) -> None:
        """Through the nodes of some GPUs; over each link go ``passes`` (n−1)/n of the bytes."""
        nodes = list(dict.fromkeys(seats))
        for one, two in itertools.pairwise([*nodes, nodes[0]]):
            send(one, two, size * passes * (len(seats) - 1) / len(seats))

    sizes = [plan.cluster.size(plan.cluster.gpu(name)) for name in plan.placement]
    nodes = enumerate(zip(plan.placement, sizes, strict=True))
    seats = [(node, name) for node, (name, size) in nodes for _ in range(size)]
    stages = [seats[at * group : (at + 1) * group] for at in range(plan.pp)]
    # Activations, and as many gradients back, over each boundary for each chunk of layers.
    each = plan.dp * plan.mbs * message_bytes(model, options, plan.tp) / group * m
    boundaries = [*list(itertools.pairwise(range(plan.pp))) * plan.virtual_stages]
    for left, right in [*boundaries, *[(plan.pp - 1, 0)] * (plan.virtual_stages - 1)]:
        for one, two in zip(stages[left], stages[right], strict=True):
            send(one, two, each)
            send(two, one, each)
    # What the GPUs with the same parameters exchange: an all-reduce passes the bytes twice, a reduce-scatter
    # or an all-gather once.
    once = {0: 0, 1: 1, 2: 1, 3: 2 * m}[options.zero] * width
    once += {0: 2, 1: 1, 2: m, 3: m}[options.zero] * options.gradient_bytes
    for at, own in enumerate(stages):
        units, choice = plan.units(at), plan.choice(at)
        tp = choice.tp
        held, of_experts = held_parameters(model, tp, plan.ep, units)
        for rank in range(tp):
            ring(own[rank::tp], (held - of_experts) * once)
            for expert in range(plan.ep if of_experts else 0):
                ring(own[rank::tp][expert :: plan.ep], of_experts * once)
        # Sums over tensor-parallel groups, and tokens on their way to experts and back.
        replicas = group // tp
        size = plan.dp * plan.mbs / replicas * model.seq * m * model.hidden * width
        again = [kind for kind in model.kinds[units] if kind in "TD" and choice.recompute == "full"]
        sums = sum(FORWARD_SUMS[kind] + BACKWARD_SUMS[kind] for kind in model.kinds[units])
        sums += sum(FORWARD_SUMS[kind] for kind in again)
        for replica in range(replicas):
            ring(own[replica * tp : (replica + 1) * tp], size * sums, 2)
        layers = sum(kind in "TD" for kind in model.kinds[units])
        each = size * model.top_k / tp / plan.ep * (4 * layers + 2 * len(again))  # there and back
        for first, rank in itertools.product(range(0, replicas, plan.ep), range(tp)):
            among = own[first * tp + rank : (first + plan.ep) * tp : tp]
            for one, two in itertools.permutations(among, 2):
                send(one, two, each)
    # The sum of the embedding's copies, among the GPUs at the same place of their stages.
    size = model.hidden * model.vocab / plan.tp * options.gradient_bytes
    for holders in zip(*(stages[at] for at in model.embedding_stages(plan.partition)), strict=True):
        ring(holders, size, 2)
    return found
