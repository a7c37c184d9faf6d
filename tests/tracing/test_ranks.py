"""Several gloo ranks traced by torchrun, alive and dying."""

from __future__ import annotations

import re

import pytest
from trace_reading import device_ids, host_ids, load

from chakra_et.capture.check import inspect_pair

WORKER = "tests/tracing/worker.py"


def test_every_rank_has_its_own_pair_and_the_manifest_knows_all(torchrun, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    of_more_ranks = {f"t_rank{rank}_{kind}.json" for rank in (2, 31) for kind in ("host", "device")}
    of_more_ranks |= {"t_rank2_host.json.gz"}
    of_others = {"t2_rank2_host.json", "t_rank2.0.et", "t_rank2_host.json.backup"}
    for name in of_more_ranks | of_others:
        (folder / name).touch()
    done = torchrun(2, WORKER, "out", "t", 6, "--groups")
    assert done.returncode == 0, done.stdout

    names = {path.name for path in folder.iterdir()}
    assert of_others <= names and not of_more_ranks & names and len(names - of_others) == 5
    manifest = load(folder / "t_manifest.json")
    assert manifest["complete"] and manifest["missing_ranks"] == []
    assert (manifest["world_size"], manifest["backend"]) == (2, "gloo")
    assert [record["rank"] for record in manifest["ranks"]] == [0, 1]
    assert len({record["pid"] for record in manifest["ranks"]}) == 2
    groups = {group["name"]: group for group in manifest["process_groups"]}
    assert [(group["description"], group["ranks"]) for group in groups.values()] == [
        ("default_pg", [0, 1]),
        ("pair", [0, 1]),
    ]
    assert all("gloo" in group["backend"] for group in groups.values())
    for record in manifest["ranks"]:
        files = {kind: folder / entry["name"] for kind, entry in record["files"].items()}
        assert set(files) == {"host", "device"}
        assert host_ids(load(files["host"])) == device_ids(load(files["device"]))
        assert inspect_pair(files["host"], files["device"], 3).problems == []
        assert record["steps"] == [2, 3, 4] and len(record["step_times_us"]) == 3
        recorded = [node["name"] for node in load(files["host"])["nodes"]]
        assert recorded.count("## process_group:init ##") == 1
        assert recorded.count("gloo:all_reduce") >= 2


@pytest.mark.parametrize("fault", [pytest.param("raise", marks=pytest.mark.slow), "kill"])
def test_rank_that_ends_leaves_the_others_capture(torchrun, tmp_path, fault):
    """Seen on torch 2.4: the survivor crashed on stopping the profiler right after the failure."""
    done = torchrun(2, WORKER, "out", "t", 6, "--fault", f"{fault}:3:1", timeout=120)
    assert done.returncode != 0
    folder = tmp_path / "out"
    manifest = load(folder / "t_manifest.json")
    assert not manifest["complete"]
    survivor = manifest["ranks"][0]
    assert survivor["steps"] == [2] and survivor["unfinished_step"] == 3
    # The failed collective, or the launcher's SIGTERM where that comes first.
    assert re.search(r"after 1 of 3 active steps \((RuntimeError|SystemExit)", survivor["reason"])
    assert inspect_pair(folder / "t_host.json", folder / "t_device.json", 2).problems == []
    if fault == "kill":
        assert manifest["missing_ranks"] == [1] and "no report from rank 1" in manifest["reason"]
        assert not (folder / "t_rank1_host.json").exists()
    else:
        assert manifest["missing_ranks"] == []
        assert "rank 1: training ended" in manifest["reason"] and "not a number" in manifest["reason"]
        assert inspect_pair(folder / "t_rank1_host.json", folder / "t_rank1_device.json", 2).problems == []
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_rank_0_goes_on_while_another_rank_counts_fewer_steps(torchrun, tmp_path):
    """It waited for 60 s within its step for a rank that waited for it in a collective."""
    done = torchrun(2, WORKER, "out", "t", 7, "--fault", "uncounted:2:1", timeout=120)
    assert done.returncode == 0, done.stdout
    (longest,) = re.findall(r"rank 0: the longest call of step\(\) took ([\d.]+) s", done.stdout)
    assert float(longest) < 30
    manifest = load(tmp_path / "out" / "t_manifest.json")
    assert manifest["complete"] and [record["steps"] for record in manifest["ranks"]] == [[2, 3, 4]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_room_names_its_folder_and_the_other_is_kept(torchrun, tmp_path, rank):
    done = torchrun(2, WORKER, "out", "t", 8, "--fault", f"tiny-files:3:{rank}", timeout=120)
    assert done.returncode == 0
    warned = f"trace t rank {rank}: the traces can't be written to out: the host and device trace is cut off"
    assert done.stdout.count(warned) == 1
    folder, other = tmp_path / "out", "" if rank else "_rank1"
    assert inspect_pair(folder / f"t{other}_host.json", folder / f"t{other}_device.json", 3).problems == []
    manifest = load(folder / "t_manifest.json")
    assert not manifest["complete"] and manifest["ranks"][rank]["files"] == {}
    assert not list(folder.glob("*.tmp"))
