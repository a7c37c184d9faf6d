"""The graph has the times of an untraced step: structure from one step, times from others, less the cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.graph.link import aligned
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.convert.recording_cost import _per_operator, _root, recorder_rows, step_facts
from chakra_et.simulate.measured_steps import measured_times, step_rows, steps_sentence
from chakra_et.simulate.replays import longest_path
from chakra_et.traces.device_format import Recording, read_recording
from chakra_et.traces.sets import Pair
from chakra_et.validate.check import check

torch = pytest.importorskip("torch")


def capture(folder: Path, wait: int, warmup: int, active: int, branch_at: int = -1) -> Pair:
    from chakra_et.capture.tracer import ChakraTracer

    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with ChakraTracer(folder, "t", wait, warmup, active) as tracer:
        for number in range(wait + warmup + active):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 16)).square().mean()
            if number == branch_at:
                loss = loss.sinh().cosh()
            loss.backward()
            optimizer.step()
            tracer.step()
    return Pair(0, folder / "t_host.json", folder / "t_device.json")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return capture(tmp_path_factory.mktemp("untraced"), 4, 1, 2)


def total_ns(trace):
    times, end = measured_times(trace)
    return end - times[step_rows(trace)[1][0]]


def test_the_graph_has_the_active_steps_with_the_tensors_of_the_structure_step(pair):
    found = convert_pair(pair)
    assert step_rows(found.trace)[0] == ["ProfilerStep#5", "ProfilerStep#6"]
    texts = [found.trace.names[row] for row in range(len(found.trace))]
    first = found.trace.column("segment") == 0
    products = [row for row, name in enumerate(texts) if name == "aten::addmm" and first[row]]
    assert products and set(products) <= set(found.trace.inputs.rows.tolist())
    assert found.report.losses["structure-step"] > 0 and not found.report.warnings
    assert (
        found.report.notes["structure-matched"]
        == 2 * json.loads(pair.host.read_text())["nodes"].__len__() - 4
    )


def test_operators_that_a_timed_step_lacks_are_counted(pair, tmp_path):
    """They weren't: only those that the structure step lacks were."""
    device = json.loads(pair.device.read_text())
    events = device["traceEvents"]
    steps = [event for event in events if event.get("name") == "ProfilerStep#6"]
    (mark,) = (event for event in steps if event["cat"] == "user_annotation")
    within = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and mark["ts"] < event["ts"] < mark["ts"] + mark["dur"]
    ]
    gone = [event for event in within if event["name"] == "aten::addmm"]
    device["traceEvents"] = [event for event in events if event not in gone]
    path = tmp_path / pair.device.name
    path.write_text(json.dumps(device))
    assert "structure-alone" not in convert_pair(pair).report.notes
    assert convert_pair(Pair(0, pair.host, path)).report.notes["structure-alone"] == len(gone) > 0


def test_operators_of_each_step_have_ids_of_their_own(pair):
    trace = convert_pair(pair).trace
    products = [row for row in range(len(trace)) if trace.names[row] == "aten::addmm"]
    second = trace.start_micros[products] >= trace.start_micros[step_rows(trace)[1][1]]
    for name in ("rf_id", "seq_id"):
        numbers = trace.column(name)[products]
        assert 4 == len(set(numbers[second])) == len(set(numbers[~second]))
        assert numbers.min() > 0 and not set(numbers[second]) & set(numbers[~second])


def test_the_cost_of_recording_is_taken_off_and_what_was_recorded_is_kept(pair):
    converted = convert_pair(pair)
    untraced, report = converted.trace, converted.report
    cost = untraced.metadata["recording_cost_ns"]
    assert 50 < cost < 20_000
    raw = untraced.column("recorded_micros", -1)
    raw = np.where(raw < 0, untraced.duration_micros.astype(np.int64), raw)
    operators = report.events_kept
    between = recorder_rows(untraced)
    assert len(between) == 1 and raw[between] > 0 == untraced.duration_micros[between]
    taken = int(raw.sum()) - int(raw[between].sum()) - int(untraced.duration_micros.sum())
    assert taken == pytest.approx(cost * operators / 1000, rel=0.1, abs=20)
    assert abs(longest_path(untraced) - total_ns(untraced)) <= 2000 + untraced.start_micros.min()
    assert check(untraced, None, "t") == []
    measured = sum(report.steps_us.values()) * 1000
    assert measured == pytest.approx(total_ns(untraced))


def test_one_step_alone_is_scaled_by_what_the_observer_costs(tmp_path):
    found = convert_pair(capture(tmp_path, 0, 0, 1))
    assert step_rows(found.trace)[0] == ["ProfilerStep#0"]
    assert found.trace.metadata["recording_cost_ns"] > 1000
    before = found.trace.metadata["recorded_end_micros"]
    assert found.trace.metadata["measured_end_micros"] < before
    assert json.loads(found.trace.metadata["steps_micros"])["observed"] is True


def test_operators_that_the_structure_step_lacks_are_counted(tmp_path):
    found = convert_pair(capture(tmp_path, 1, 1, 2, branch_at=3))
    # sinh, cosh and their backward operators, of the last step only.
    assert 6 <= found.report.warnings["structure-differs"] <= 20
    assert found.report.notes["no-host-node"] == found.report.warnings["structure-differs"]


def test_operators_of_steps_that_are_left_out_are_not_counted_as_kept(tmp_path):
    pair = capture(tmp_path, 1, 1, 3, branch_at=3)
    lacking = [convert_pair(pair, PairOptions(step=str(n))).report.warnings for n in (2, 3, 4)]
    assert [found.get("structure-differs", 0) > 0 for found in lacking] == [False, True, False]


def test_operators_that_the_structure_step_lacks_have_no_identity_of_those_around_them(tmp_path):
    """An evaluation's DataLoader had the step's rf_id, and the diagnosis took the whole step for loading."""
    trace = convert_pair(capture(tmp_path, 1, 1, 2, branch_at=3)).trace
    texts = [trace.names[row] for row in range(len(trace))]
    ids = trace.column("rf_id")
    lacking = ids[[row for row, name in enumerate(texts) if name in ("aten::sinh", "aten::cosh")]]
    assert lacking.min() > 0 and len(set(lacking)) == len(lacking)
    assert {texts[row] for row in np.flatnonzero(np.isin(ids, lacking))} == {"aten::sinh", "aten::cosh"}
    schema = trace.attributes["op_schema"]
    of_row = {int(row): schema.values[at] for at, row in enumerate(schema.rows)}
    mistaken = [name for row, name in enumerate(texts) if of_row[row] and not of_row[row].startswith(name)]
    assert not mistaken


def test_a_step_whose_end_the_tracer_did_not_see_is_left_out_whatever_it_holds(tmp_path):
    """A rank without further batches answered the others' collectives for 60 s, which counted as a step."""
    from chakra_et.capture.tracer import ChakraTracer

    with ChakraTracer(tmp_path, "t", 1, 1, 3) as tracer:
        for _ in range(4):
            torch.ones(4).sinh()
            tracer.step()
        for _ in range(9):
            torch.ones(4).cosh()
    found = convert_pair(Pair(0, tmp_path / "t_host.json", tmp_path / "t_device.json"))
    assert step_rows(found.trace)[0] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert found.report.warnings["steps-unfinished:4"] == 1


def test_sequences_align_past_what_one_side_lacks():
    assert aligned(list("abcd"), list("abcd")) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert aligned(list("abcd"), list("acxd")) == [(0, 0), (2, 1), (3, 3)]


@pytest.mark.parametrize(
    "field", [None, 3, {}, {"structure_step": "2"}, {"structure_step": 2, "step_us": [[1]]}]
)
def test_a_field_that_is_not_ours_is_ignored(field):
    assert read_recording(field) is None


def test_the_first_step_and_prepared_steps_are_not_untraced():
    recording = Recording(
        3, 3, [(90.0, 9.0), (10.0, 9.0), (12.0, 9.0), (80.0, 9.0), (14.0, 9.0), (16.0, 9.0)]
    )
    facts = json.loads(step_facts(recording))
    assert facts == {"traced": 15.0, "observed": False, "untraced": 11.0, "untraced_steps": 2}
    assert json.loads(step_facts(None)) == {"untraced": None}


def test_a_trace_without_steps_has_no_step_of_0_ms():
    """ "The traced step takes 0.000 ms", for traces in which no step is marked."""
    assert steps_sentence([{"steps_micros": '{"untraced": null}'}], [0.0]) == [
        "no step is marked in the trace; its times include the cost of recording"
    ]


def test_damaged_facts_of_steps_are_a_sentence():
    """A flipped byte in the name ``untraced`` was a KeyError of ``export --allow-missing-ranks``."""
    for damaged in ('{"unuraced": 1.0, "untraced_steps": 2}', '{"untraced": 1.0', '{"untraced": "1"}'):
        (said,) = steps_sentence([{"steps_micros": damaged}], [5.0])
        assert said.startswith("steps_micros of a file's metadata can't be read")


def test_a_traced_step_that_is_faster_than_the_untraced_ones_has_its_reason():
    """2,254 ms untraced against 2,056 traced, in a run that recorded from its third step on."""
    for traced, said in ((8e3, True), (9e3, False), (10e3, False)):
        facts = json.dumps({"untraced": 9e3, "untraced_steps": 1, "traced": traced})
        (sentence,) = steps_sentence([{"steps_micros": facts}], [8e3])
        assert ("record later" in sentence) is said
        assert f"(ratio {traced / 9e3:.2f}" in sentence


def test_the_first_half_of_the_untraced_steps_warms_up():
    steps = [(float(time), 0.0) for time in (900, 90, 50, 40, 20, 21, 22, 23, 80, 30)]
    assert [wall for wall, _ in Recording(8, 8, steps).untraced_us] == [20, 21, 22, 23]
    assert [wall for wall, _ in Recording(2, 2, steps).untraced_us] == [90]
    assert Recording(1, 1, steps).untraced_us == Recording(0, 0, steps).untraced_us == []


@pytest.mark.parametrize("untraced, cost", [(4, 500.0), (2, 100.0)])
def test_the_cost_is_near_what_the_tracer_measured(untraced, cost):
    """A step of 1,000 operators, 100 ns each by the measurement, that takes 800 µs longer than untraced."""
    steps = [(0.0, 5000.0)] * 4 + [(0.0, 9000.0), (0.0, 5800.0), (0.0, 5800.0)]
    assert _per_operator(Recording(4, untraced, steps), 100.0, 2000, 2) == pytest.approx(cost)


@pytest.mark.parametrize(
    "step, usual, cost",
    [
        (lambda cost: 50 - cost, 10.0, 50.0),  # the host sets the pace
        (lambda cost: max(50 - cost, 20), 10.0, 30.0),  # from 30 on the device does
        (lambda cost: 20.0, 10.0, 10.0),  # the device sets it anyway
        (lambda cost: 10.0 - cost, 10.0, 10.0),
        (lambda cost: -10.0 - cost, 10.0, 1.0),  # less than the least
    ],
)
def test_with_a_gpu_the_cost_is_that_by_which_the_graph_takes_as_long_as_untraced_steps(step, usual, cost):
    assert _root(lambda cost: step(cost) / 100, 1.0, 60.0, usual) == pytest.approx(cost, abs=0.3)
