"""The manifest of several ranks: gathering it, what it says of those that are missing, and its log lines."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest
import torch.distributed as dist
from trace_reading import load, train

from chakra_et.capture import manifest as trace_manifest
from chakra_et.capture.manifest import Mailbox, TraceFiles, summarise
from chakra_et.capture.tracer import ChakraTracer


@pytest.fixture
def group():
    """A real gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mailbox(store, rank, world_size=3):
    box = Mailbox("trace/0", rank, 1)
    box.store, box.world_size = store, world_size
    return box


def record(rank, **changes):
    check = {"host_nodes": 12, "device_events": 14, "linked": 10, "unlinked": 0, "problems": []}
    group = {"name": "0", "description": "default_pg", "backend": "gloo", "ranks": [0, 1, 2]}
    default = {
        "rank": rank,
        "complete": True,
        "reason": None,
        "files": {"host": {}},
        "steps": [3],
        "check": check,
        "process_groups": [group],
    }
    return default | changes


def build(records, world_size=3):
    facts = {"trace_name": "t", "run": {}, "schedule": {}, "backend": "gloo"}
    return trace_manifest.build_manifest({r["rank"]: r for r in records}, world_size, **facts)


def test_group_of_one_is_in_manifest_and_trace(group, tmp_path):
    with ChakraTracer(tmp_path, "t", 0, 1, 1, 0) as tracer:
        train(tracer, 2)
    manifest = load(tmp_path / "t_manifest.json")
    assert manifest["backend"] == "gloo"
    (listed,) = manifest["process_groups"]
    assert listed["ranks"] == [0] and "gloo" in listed["backend"]
    names = [node["name"] for node in load(tmp_path / "t_host.json")["nodes"]]
    assert names.count("## process_group:init ##") == 1


def test_backend_is_that_of_the_group_even_if_pytorch_chose_it(tmp_path):
    assert trace_manifest.backend() is None
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "undefined"
        assert trace_manifest.backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_tracer_refuses_a_world_size_that_the_group_does_not_have(group, tmp_path):
    with pytest.raises(ValueError, match="torch.distributed has rank 0 of 1"):
        ChakraTracer(tmp_path, "t", 1, 1, 1, 0, world_size=2)


def test_records_reach_rank_0_in_any_order():
    store = dist.HashStore()

    def late():
        time.sleep(0.1)
        mailbox(store, 1).send({"rank": 1, "late": True})

    mailbox(store, 2).send({"rank": 2})
    thread = threading.Thread(target=late)
    thread.start()
    records = {0: {"rank": 0}}
    mailbox(store, 0).collect(records, lambda: 30.0)
    thread.join()
    assert records == {0: {"rank": 0}, 1: {"rank": 1, "late": True}, 2: {"rank": 2}}


def test_dead_rank_is_waited_for_no_longer_than_asked():
    store = dist.HashStore()
    mailbox(store, 2).send({"rank": 2})
    patience = iter([60.0, 60.0, 0.0])  # a signal came meanwhile
    began = time.monotonic()
    records = {0: {"rank": 0}}
    mailbox(store, 0).collect(records, lambda: next(patience))
    assert sorted(records) == [0, 2]
    assert time.monotonic() - began < 5


class _Gone:
    """A store whose server is gone."""

    def set(self, *_):
        raise RuntimeError("Connection reset by peer")

    check = get = set


def test_store_that_is_gone_costs_only_the_other_ranks(caplog):
    records = {0: {"rank": 0}}
    mailbox(_Gone(), 0).collect(records, lambda: 60.0)
    assert records == {0: {"rank": 0}}
    mailbox(_Gone(), 1).send({})
    assert caplog.text.count("doesn't answer") == 2


def test_missing_and_broken_ranks_are_named():
    pair = {"name": "1", "description": "pair", "backend": "gloo", "ranks": [0, 2]}
    told = record(2, complete=False, reason="no room", process_groups=[pair])
    manifest = build([told, record(0)])
    assert not manifest["complete"]
    assert manifest["reason"] == "rank 2: no room; no report from rank 1"
    assert manifest["missing_ranks"] == [1]
    assert [entry["rank"] for entry in manifest["ranks"]] == [0, 2]
    assert [entry["name"] for entry in manifest["process_groups"]] == ["0", "1"]
    assert all("process_groups" not in entry for entry in manifest["ranks"])
    assert build([record(rank) for rank in range(3)])["complete"]


def test_log_has_one_line_for_each_rank_and_says_what_is_wrong(caplog, tmp_path):
    broken = {"host_nodes": 1, "linked": 0, "problems": ["no ids", "no steps"]}
    records = [
        record(0),
        record(1, check=broken),
        record(2, files={}, reason="no room", complete=False),
        record(3, steps=[], reason="ended early", complete=False),
        record(5, steps=[8, 9, 10]),
    ]
    with caplog.at_level(logging.INFO, logger="chakra_et"):
        summarise(build(records, 6), tmp_path)
    assert [entry.getMessage() for entry in caplog.records] == [
        "trace t rank 0: steps 3, 12 host nodes, 10 of them in the device trace",
        "trace t rank 1 can't be linked: no ids; no steps",
        "trace t rank 2: nothing was written",
        "trace t rank 3: steps none whole, 12 host nodes, 10 of them in the device trace; ended early",
        "trace t rank 5: steps 8 to 10, 12 host nodes, 10 of them in the device trace",
        "trace t rank 4: no report from it",
    ]


def test_manifest_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "m.json"
    trace_manifest.write_json(path, {"이름": tmp_path})
    assert json.loads(path.read_text(encoding="utf-8")) == {"이름": str(tmp_path)}
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        trace_manifest.write_json(path, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.json"]


def test_foreign_ranks_are_those_beyond_the_world(tmp_path):
    beyond = {"t_rank2_host.json", "t_rank10_device.json.gz"}
    others = {"t_rank1_host.json", "t2_rank2_host.json", "t_rank2.0.et", "t_rank2_host.json.backup"}
    for name in beyond | others:
        (tmp_path / name).touch()
    TraceFiles(tmp_path, "t", 0, compress=False).remove_foreign(2)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_a_restarted_rank_takes_back_what_it_sent_before(group):
    """After a restart by torchrun, the manifest had the record of the rank that had failed, and the
    conversion refused its new traces as those of another process."""
    Mailbox("trace/0", 1, 2).send(record(1, reason="node lost"))
    for expected in ({1}, set()):
        records = {}
        Mailbox("trace/0", 0, 2).collect(records, lambda: 0.0)
        assert records.keys() == expected
        Mailbox("trace/0", 1, 2)  # as the new process does before its first step
