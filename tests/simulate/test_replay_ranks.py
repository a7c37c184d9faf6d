"""Joint replays of several ranks: matching, waiting, and the errors for ranks that disagree."""

from __future__ import annotations

import pytest

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.replays import missing_order
from tests.simulate.replay_traces import (
    collective,
    cpu,
    make_trace,
    makespan_ns,
    recv,
    replay_astra,
    replay_device,
    send,
    times,
)

BOTH = pytest.mark.parametrize("replay", [replay_device, replay_astra])


@BOTH
def test_collective_waits_for_the_last_rank_and_lasts_the_shortest_duration(replay):
    early = make_trace(cpu(1, 10), collective(2, 95, (1,)), cpu(3, 1, (2,)))
    late = make_trace(cpu(1, 100), collective(2, 5, (1,)), cpu(3, 1, (2,)))
    result = replay([early, late])
    assert times(result, 0) == [(0, 10), (10, 105), (105, 106)]
    assert times(result, 1) == [(0, 100), (100, 105), (105, 106)]


@BOTH
def test_collectives_are_matched_within_their_group(replay):
    groups = {"1": [0, 1], "2": [1, 2]}
    traces = [
        make_trace(collective(1, 4)),
        make_trace(collective(1, 7), collective(2, 3, (1,), group="2")),
        make_trace(cpu(1, 20), collective(2, 9, (1,), group="2")),
    ]
    result = replay(traces, comm_groups=groups)
    assert times(result, 0) == [(0, 4)]
    assert times(result, 1) == [(0, 4), (4, 23)]
    assert times(result, 2) == [(0, 20), (20, 23)]


@BOTH
@pytest.mark.parametrize("names", [("", "0"), ("0", None), (None, "")])
def test_no_group_is_all_ranks(replay, names):
    traces = []
    for rank, name in enumerate(names):
        node = collective(1, 10 + rank, group=name)
        if name is None:
            del node["pg_name"]
        traces.append(make_trace(node))
    assert times(replay(traces), 1) == [(0, 10)]


@BOTH
def test_collectives_run_unmatched_if_a_member_is_missing(replay):
    traces = [make_trace(collective(1, 10)), make_trace(collective(1, 30))]
    result = replay(traces, comm_groups={"1": [0, 1, 2]})
    assert [times(result, rank) for rank in (0, 1)] == [[(0, 10)], [(0, 30)]]
    assert any("group 1 run unmatched" in note and "not given" in note for note in result.notes)
    result = replay([make_trace(collective(1, 10, group="", x=1), world_size=3) for _ in range(2)])
    assert any("group 0 run unmatched" in note for note in result.notes)


@BOTH
def test_group_of_one_runs_unmatched(replay):
    result = replay([make_trace(collective(1, 10, group="5")), make_trace(cpu(1, 1))])
    assert times(result, 0) == [(0, 10)]
    assert any("has one rank" in note for note in result.notes)


def test_astra_replays_broadcast_without_synchronising():
    kind = CollectiveType.BROADCAST
    traces = [
        make_trace(cpu(1, 50), collective(2, 5, (1,), comm_type=kind)),
        make_trace(collective(2, 9, comm_type=kind)),
    ]
    assert times(replay_astra(traces), 1) == [(0, 9)]
    assert times(replay_device(traces), 1) == [(0, 55)]


def test_astra_treats_a_collective_with_is_cpu_op_as_computation():
    traces = [
        make_trace(cpu(1, 50), collective(2, 5, (1,), is_cpu_op=1)),
        make_trace(collective(2, 9, is_cpu_op=1)),
    ]
    assert times(replay_astra(traces), 1) == [(0, 9)]
    assert times(replay_device(traces), 1) == [(0, 55)]


@BOTH
def test_send_and_receive_are_matched_by_ranks_tag_and_size(replay):
    traces = [
        make_trace(send(1, 6, dst=1, comm_tag=3), send(2, 5, dst=1, deps=(1,))),
        make_trace(cpu(1, 10), recv(2, 9, src=0, comm_tag=0), recv(3, 4, src=0, comm_tag=3, deps=(1,))),
    ]
    result = replay(traces)
    assert times(result, 0) == [(0, 14), (14, 19)]
    assert times(result, 1) == [(0, 10), (0, 19), (10, 14)]


@BOTH
def test_messages_without_a_given_peer_run_unmatched(replay):
    nameless = send(2, 3, dst=0, deps=(1,))
    del nameless["comm_dst"]
    result = replay([make_trace(send(1, 6, dst=7), nameless), make_trace(cpu(1, 1))])
    assert times(result, 0) == [(0, 6), (6, 9)]
    assert any("2 sends and receives run unmatched" in note for note in result.notes)


@BOTH
def test_a_rank_may_send_to_itself(replay):
    traces = [make_trace(send(1, 6, dst=0), recv(2, 4, src=0)), make_trace(cpu(1, 1))]
    assert times(replay(traces), 0) == [(0, 4), (0, 4)]


@BOTH
def test_missing_collective_is_reported_with_rank_group_and_index(replay):
    traces = [
        make_trace(collective(1, 1), collective(2, 1, (1,), name="second"), cpu(3, 1, (2,))),
        make_trace(collective(1, 1)),
    ]
    with pytest.raises(TraceError) as caught:
        replay(traces, ranks=[4, 6])
    text = str(caught.value)
    assert "collective 2 of group 1" in text and "rank 4 at node 2 'second'" in text
    assert "rank 6, which has 1 of them" in text and "2 nodes never end" in text


@BOTH
def test_crossed_groups_are_reported_as_a_deadlock(replay):
    groups = {"1": [0, 1], "2": [0, 1]}
    traces = [
        make_trace(collective(1, 1, group="1"), collective(2, 1, (1,), group="2")),
        make_trace(collective(1, 1, group="2"), collective(2, 1, (1,), group="1")),
    ]
    with pytest.raises(TraceError, match="rank 1, which never gets there"):
        replay(traces, comm_groups=groups)


@BOTH
def test_missing_receive_is_reported(replay):
    with pytest.raises(TraceError, match="send 1 of rank 0 to rank 1, tag 0, 8 bytes .* has 0 of them"):
        replay([make_trace(send(1, 1, dst=1)), make_trace(cpu(1, 1))])


@BOTH
@pytest.mark.parametrize("other", [{"comm_type": 2}, {"comm_size": 16}])
def test_collectives_of_different_type_or_size_are_reported(replay, other):
    with pytest.raises(
        TraceError, match="collective 1 of group 1 is ALL_REDUCE of 8 bytes on rank 0 .* but "
    ):
        replay([make_trace(collective(1, 1)), make_trace(collective(1, 1, **other))])


@BOTH
def test_all_to_all_may_differ_in_size(replay):
    kind = CollectiveType.ALL_TO_ALL
    traces = [make_trace(collective(1, 5, comm_type=kind, comm_size=size)) for size in (8, 9)]
    assert times(replay(traces)) == [(0, 5)]


@BOTH
def test_group_used_by_a_rank_outside_it(replay):
    with pytest.raises(TraceError, match="rank 2 has collectives of group 1, whose members are ranks 0, 1"):
        replay([make_trace(collective(1, 1)) for _ in range(3)], comm_groups={"1": [0, 1]})


@BOTH
def test_ranks_start_apart_when_they_share_a_clock(replay):
    def rank(begin: int, clock: str, duration: int) -> ExecutionTrace:
        nodes = cpu(1, 10, start=5), collective(2, duration, (1,), start=15)
        return make_trace(*nodes, trace_start_ns=begin, clock_domain=clock)

    together = replay([rank(1_000_000, "host", 43), rank(1_040_000, "host", 3)])
    assert together.release_ns == [0, 40_000]
    assert times(together, 0)[1] == (10, 53) and times(together, 1)[1] == (50, 53)
    # Clocks of two hosts tell nothing; that the collective ends on both at once does.
    apart = replay([rank(1_000_000, "host", 43), rank(7_000_000, "other", 3)])
    assert apart.release_ns == [0, 40_000] and times(apart, 0)[1] == (10, 53)
    assert any("clocks aligned by 1 collectives" in note for note in apart.notes)
    assert not any("start skew" in note for note in together.notes), "40 µs are no news"
    (skew,) = replay([rank(1_000_000, "host", 103), rank(1_100_000, "host", 3)]).notes
    assert skew.startswith("start skew: rank 1 begins 0.10 ms after rank 0") and "one host's" in skew
    late = replay([rank(1_000_000, "host", 103), rank(9_100_000, "other", 3)])
    assert any("start skew: rank 1 begins 0.10 ms after rank 0" in note for note in late.notes)


@pytest.mark.parametrize(
    "metadata",
    [
        {"trace_start_ns": 7},
        {"trace_start_ns": 7, "clock_domain": ""},
        {"clock_domain": "host"},
        {"trace_start_ns": "7", "clock_domain": "host"},
    ],
)
def test_incomplete_clock_metadata_is_not_used(metadata):
    traces = [make_trace(cpu(1, 1, start=1), **metadata) for _ in range(2)]
    assert build_graph(traces).clock_ns is None


@BOTH
def test_with_one_clock_each_rank_keeps_its_own_transfer_time(replay):
    # Of two ranks that share cores, one is woken up 7 µs later than the other when the data is there.
    def rank(work: int, duration: int) -> ExecutionTrace:
        nodes = (
            cpu(1, work, start=1),
            collective(2, duration, (1,), start=1 + work),
            cpu(3, 1, (2,), start=90),
        )
        return make_trace(*nodes, trace_start_ns=0, clock_domain="host")

    result = replay([rank(10, 30), rank(35, 12)])
    assert times(result, 0)[1] == (10, 40) and times(result, 1)[1] == (35, 47)


@BOTH
def test_collective_that_ended_before_another_rank_began_takes_no_time(replay):
    def rank(work: int, duration: int) -> ExecutionTrace:
        nodes = cpu(1, work, start=1), collective(2, duration, (1,), start=1 + work)
        return make_trace(*nodes, trace_start_ns=0, clock_domain="host")

    result = replay([rank(10, 5), rank(20, 5)])
    assert times(result, 1)[1] == (20, 25) and times(result, 0)[1][1] == pytest.approx(20, abs=0.002)


@BOTH
def test_ranks_of_two_runs_are_rejected(replay):
    traces = [
        make_trace(cpu(1, 1, start=1), trace_start_ns=day * 86_400 * 10**9, clock_domain="host")
        for day in (1, 2)
    ]
    with pytest.raises(TraceError, match="begin 86400 s apart"):
        replay(traces)


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["lane", "tid", "stream", "is_cpu_op", "comm_type", "comm_size", "comm_dst"])
@pytest.mark.parametrize("value", ["text", 2.5, float("nan"), -(2**63)])
def test_attributes_of_another_kind_are_ignored(replay, name, value):
    node = collective(1, 5, name="c") if name in ("comm_type", "comm_size") else cpu(1, 5)
    traces = [make_trace({**node, name: value}, send(2, 3, dst=7, deps=(1,))) for _ in range(2)]
    assert makespan_ns(replay(traces)) == 8_000


@BOTH
def test_group_name_may_be_a_number(replay):
    traces = [make_trace(collective(1, 5 + rank, group=3)) for rank in range(2)]
    assert times(replay(traces), 1) == [(0, 5)]


def test_collectives_of_two_groups_with_the_same_ranks_need_an_order() -> None:
    """On each rank the two run on streams of their own, and nothing says which is first."""
    order = [1, 2], [2, 1]
    nodes = (
        [collective(at, 10, group=str(of), stream=of, comm_type=0) for at, of in enumerate(each, 1)]
        for each in order
    )
    traces = [make_trace(*each) for each in nodes]
    graph = build_graph(traces, [0, 1])
    groups = {"1": [0, 1], "2": [0, 1]}
    pairs = missing_order(graph, match(graph, groups))
    assert [[graph.groups[graph.group[node]] for node in pair] for pair in pairs.tolist()] == [["1", "2"]] * 2
    # One group alone holds nothing up: the other's are unmatched, as a member isn't there.
    assert not len(missing_order(graph, match(graph, {"1": [0, 1], "2": [0, 1, 2]})))
    # ASTRA-sim replays broadcasts without waiting.
    for each in traces:
        each.attributes["comm_type"].values[:] = CollectiveType.BROADCAST
    graph = build_graph(traces, [0, 1])
    assert not len(missing_order(graph, match(graph, groups)))


def test_collectives_of_a_group_that_threads_begin_in_any_order_need_one() -> None:
    """gloo's threads took up two asynchronous all-reduces in one order on rank 0, in the other on rank 1."""
    sizes = (8, 16), (16, 8)
    traces = [
        make_trace(
            *(
                collective(at, 10, comm_size=size, comm_sequence=size // 8 - 1, stream=at)
                for at, size in enumerate(each, 1)
            )
        )
        for each in sizes
    ]
    graph = build_graph(traces, [0, 1])
    assert times(replay_device(traces), 0) == [(0, 10), (0, 10)]
    with pytest.raises(TraceError, match="they issue them in different orders"):
        replay_astra(traces)
    pairs = missing_order(graph, match(graph, {"1": [0, 1]}))
    assert graph.attribute("comm_size", 0)[pairs].tolist() == [[8, 16], [8, 16]]
    # The same without a difference: whichever comes first, they match.
    for each in traces:
        each.attributes["comm_size"].values[:] = 8
    graph = build_graph(traces, [0, 1])
    assert not len(missing_order(graph, match(graph, {"1": [0, 1]})))


def test_corrected_clocks_tell_who_starts_first():
    def rank(begin: int, offset: int, duration: int) -> ExecutionTrace:
        nodes = cpu(1, 10, start=5), collective(2, duration, (1,), start=15)
        return make_trace(*nodes, trace_start_ns=begin, clock_offset_ns=offset)

    late = replay_device([rank(1_000_000, 0, 43), rank(7_000_000, -5_960_000, 3)])
    assert late.release_ns == [0, 40_000] and times(late, 0)[1] == (10, 53)


def test_operations_are_complete_with_all_of_their_sides():
    more = cpu(1, 5), collective(2, 5, (1,)), collective(3, 5, (2,), "2")
    graph = build_graph([make_trace(*more), make_trace(*more[:2])], [0, 1])
    matching = match(graph, {"1": [0, 1], "2": [0, 1]})
    assert matching.complete().tolist() == [1, 4] and (matching.channel >= 0).sum() == 3
    alone = build_graph([make_trace(cpu(1, 5)), make_trace(cpu(1, 5))], [0, 1])
    assert match(alone).complete().tolist() == []


def test_groups_in_a_row_of_ranks_need_no_order():
    """No two ranks can wait for each other, in whatever order rank 1 communicates."""
    one, two = collective(1, 5, lane=8), collective(2, 5, (), "2", lane=9)
    graph = build_graph([make_trace(one), make_trace(one, two), make_trace(two)], [0, 1, 2])
    assert missing_order(graph, match(graph, {"1": [0, 1], "2": [1, 2]})).tolist() == []
    ring = [
        make_trace(one, {**two, "pg_name": "3"}),
        make_trace(one, two),
        make_trace(two, {**one, "id": 3, "pg_name": "3"}),
    ]
    graph = build_graph(ring, [0, 1, 2])
    assert len(missing_order(graph, match(graph, {"1": [0, 1], "2": [1, 2], "3": [0, 2]}))) == 3


def test_clocks_are_aligned_by_way_of_a_rank_that_both_meet():
    """Rank 2 ends a collective with rank 0 and one with rank 1, which have none in common."""

    def rank(clock: str, *collectives: dict) -> ExecutionTrace:
        return make_trace(cpu(1, 10, start=5), *collectives, trace_start_ns=len(clock), clock_domain=clock)

    def met(number: int, group: str, begin: int, duration: int) -> dict:
        return collective(number, duration, (number - 1,), group, start=begin)

    ranks = [
        rank("one", met(2, "1", 15, 43)),
        rank("of three", met(2, "2", 15, 3)),
        rank("hosts", met(2, "1", 15, 3), met(3, "2", 18, 30)),
    ]
    assert replay_device(ranks, comm_groups={"1": [0, 2], "2": [1, 2]}).release_ns == [0, 70_000, 40_000]
