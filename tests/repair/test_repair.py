"""Repair of damaged traces: every kind of damage, every truncation, and no intact record lost."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chakra_et.errors import TraceError
from chakra_et.repair.file import repair_file
from chakra_et.repair.format import mend

ROOT = Path(__file__).resolve().parents[2]


def host(nodes: int = 4, pid: int = 7) -> str:
    """A host trace in the observer's own layout."""
    empty = '{"values": [], "shapes": [], "types": []}'
    text = f'{{\n  "schema": "1.1.1-chakra.0.0.4", "pid": {pid}, "time": "t", "start_ts": 1,\n  "nodes": [\n'
    records = [
        f'      {{\n        "id": {number}, "name": "aten::op{number}", "ctrl_deps": 1,\n'
        f'        "inputs": {empty},\n        "outputs": {empty},\n'
        f'        "attrs": [{{"name": "rf_id", "type": "uint64", "value": {number}}}]\n      }}'
        for number in range(2, 2 + nodes)
    ]
    return text + ",\n".join(records) + '\n  ],\n  "finish_ts": 2\n}\n'


def device(events: int = 4) -> str:
    """A device trace in Kineto's own layout."""
    records = [
        f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "aten::op{number}", "pid": 1, "tid": 1,\n'
        f'    "ts": {number}.125, "dur": 1.000,\n    "args": {{\n      "External id": {number}\n    }}\n  }}'
        for number in range(events)
    ]
    head = '{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "traceEvents": [\n'
    return head + ",\n".join(records) + '\n  ],\n  "traceName": "x"\n}\n'


def records_of(path: Path) -> list[dict]:
    """The longest list in the document, as damage may have hit the key of the record array."""
    return max(
        (v for v in json.loads(path.read_bytes()).values() if isinstance(v, list)), key=len, default=[]
    )


# Damage → (text, kinds of repair that name it, records left). Each was met in a trace, or is what the
# observer does: it escapes no names, and several recordings to one path follow one another.
ODDITIES: dict[str, tuple[Callable[[], bytes], str, int]] = {
    "two-objects": (lambda: (host(4) + host(3)).encode(), "concatenated", 3),
    "footer-never-written": (lambda: host().split("\n  ],")[0].encode(), "truncated", 4),
    "cut-in-a-node": (lambda: host()[: host().index('"aten::op4"')].encode(), "truncated", 2),
    "trailing-garbage": (lambda: (host() + "!!").encode(), "trailing-garbage", 4),
    "comma-missing": (lambda: host().replace("},\n      {", "}\n      {", 1).encode(), "missing-comma", 4),
    "comma-twice": (lambda: host().replace("},\n      {", "},,\n      {", 1).encode(), "double-comma", 4),
    "name-with-quotes": (lambda: host().replace("aten::op3", 'my "op" 3').encode(), "unescaped-name", 4),
    "nan": (lambda: host().replace('"value": 3', '"value": NaN').encode(), "nan", 4),
    "invalid-utf8": (lambda: host().encode().replace(b"aten::op3", b"aten::\xff3"), "invalid-utf8", 4),
    "byte-order-mark": (lambda: b"\xef\xbb\xbf" + host().encode(), "bom", 4),
    "device-cut": (lambda: device()[: device().index('"aten::op3"')].encode(), "truncated", 3),
}


@pytest.mark.parametrize("name", ODDITIES)
def test_damage_is_repaired_and_listed(tmp_path: Path, name: str) -> None:
    damaged, kind, left = ODDITIES[name]
    path = tmp_path / "a_host.json"
    path.write_bytes(damaged())
    report = repair_file(path)
    assert report.changed and kind in {repair.kind for repair in report.repairs}
    assert len(records_of(path)) == left == report.nodes_kept
    assert report.backup is not None and report.backup.read_bytes() == damaged()
    again = repair_file(path)
    assert not again.changed and again.backup is None


@pytest.mark.parametrize(
    "text", [host(), device(), host().replace("\n", "\r\n"), json.dumps(json.loads(host()))]
)
def test_intact_file_is_not_changed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a_host.json"
    path.write_bytes(text.encode())
    before = path.stat().st_mtime_ns
    assert not repair_file(path).changed
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (text.encode(), before)


@pytest.mark.parametrize("text", [host(3), device(3)], ids=["host", "device"])
def test_every_truncation_is_repaired_or_rejected(tmp_path: Path, text: str) -> None:
    whole = text.encode()
    ends = [at for at in range(len(whole)) if json_records(whole[:at]) is not None]
    path = tmp_path / "a_host.json"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        complete = json_records(whole[:cut])
        try:
            repair_file(path, output=tmp_path / "out.json")
        except TraceError as error:
            assert not complete, f"cut at {cut}: {error}"
            assert "\n" not in str(error) and str(path) in str(error)
            continue
        out = tmp_path / "out.json"
        kept = records_of(out if out.exists() else path)
        assert len(kept) >= (complete or 0), f"cut at {cut}"
        out.unlink(missing_ok=True)
    assert ends


def json_records(text: bytes) -> int | None:
    """How many records of a cut trace are complete, None before the array begins."""
    start = max(text.find(b'"nodes": ['), text.find(b'"traceEvents": ['))
    if start < 0:
        return None
    depth = complete = 0
    for byte in text[text.index(b"[", start) + 1 :]:
        depth += (byte in b"{[") - (byte in b"}]")
        if depth < 0:
            break
        complete += byte == ord("}") and depth == 0
    return complete


def test_the_last_object_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a_host.json"
    path.write_text(host(4) + host(5) + host(2))
    assert repair_file(path).nodes_kept == 2 == len(records_of(path))


def test_truncated_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "a_device.json.gz"
    whole = gzip.compress(device(2000).encode())
    path.write_bytes(whole[: len(whole) // 2])
    report = repair_file(path)
    kinds = {repair.kind for repair in report.repairs}
    assert {"gz-truncated", "truncated"} <= kinds
    assert len(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]) == report.nodes_kept > 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no complete node"),
        (b"hello", "no complete node"),
        (b"[" * 100_000, "no complete node"),
        (b'{"nodes": [' + b'{"id": ' * 100_000, "no complete node"),
    ],
)
def test_file_without_records_is_rejected_in_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a_host.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        repair_file(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_gzip_bomb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a_host.json.gz"
    text = host().replace("aten::op3", " " * 3_000_000)
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(TraceError):
        repair_file(path, max_bytes=1_000_000)


def test_random_damage_gives_a_trace_or_one_sentence(tmp_path: Path) -> None:
    source = random.Random(20261121)
    path, out = tmp_path / "a_host.json", tmp_path / "out.json"
    for _ in range(300):
        text = bytearray((host(5) if source.random() < 0.5 else device(5)).encode())
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(text))
            what = source.random()
            if what < 0.4:
                text[at] = source.randrange(256)
            elif what < 0.7:
                del text[at : at + source.randint(1, 40)]
            else:
                text[at:at] = text[: source.randint(1, 60)]
        path.write_bytes(text)
        out.unlink(missing_ok=True)
        try:
            report = repair_file(path, output=out)
        except TraceError as error:
            assert "\n" not in str(error)
            continue
        assert len(records_of(out if report.changed else path)) == report.nodes_kept


def test_command_repairs_a_folder_and_lists_the_repairs(tmp_path: Path) -> None:
    (tmp_path / "a_host.json").write_text(host(4) + host(3))
    (tmp_path / "b_device.json").write_text(device())
    (tmp_path / "c_host.json").write_text("nothing")
    command = [sys.executable, str(ROOT / "fix_host_traces.py"), "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "concatenated" in done.stdout and "a_host.json.backup" in done.stdout
    assert "c_host.json" in done.stdout + done.stderr


def test_two_repairs_of_one_file_take_turns(tmp_path: Path) -> None:
    """The second finds the file repaired: one backup, and it is the original."""
    path = tmp_path / "a_host.json"
    path.write_text(host(4) + host(3))
    original = path.read_bytes()
    command = [sys.executable, str(ROOT / "fix_host_traces.py"), str(path)]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(records_of(path)) == 3
    assert {file.name for file in tmp_path.iterdir()} == {"a_host.json", "a_host.json.backup"}
    assert (tmp_path / "a_host.json.backup").read_bytes() == original


def test_repaired_file_lists_its_repairs_with_the_cut_first(tmp_path: Path) -> None:
    """A truncated trace converted as ``ok`` once it was repaired, as nothing in it told."""
    path = tmp_path / "a_device.json"
    damaged = device(60).replace("},\n", "}\n")
    path.write_text(damaged[: damaged.index('"aten::op55"')])
    repair_file(path)
    listed = json.loads(path.read_text())["chakra_et_repairs"]
    assert len(listed) == 21 and ": truncated: " in next(iter(listed))
    assert listed["further repairs, not listed one by one"] > 10
    # A second repair adds to the list.
    path.write_text(path.read_text().replace("},{", "},,{", 1).replace('"ph": "X"', '"ph": "\xff"', 1))
    first = path.read_text().encode("latin-1")
    path.write_bytes(first)
    assert repair_file(path).changed
    again = json.loads(path.read_text())["chakra_et_repairs"]
    assert set(listed) <= set(again) and sum(again.values()) > sum(listed.values())


def test_object_that_is_whole_is_not_listed_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "a_device.json"
    path.write_text(device()[: device().index('"aten::op2"')] + device())
    assert "truncated" in {repair.kind for repair in repair_file(path).repairs}
    listed = json.loads(path.read_text())["chakra_et_repairs"]
    assert listed and not any(": truncated: " in text for text in listed)


@pytest.mark.parametrize("value", ["[1]", '{"x": "y"}', '{"x": -1}', "null", "7"])
def test_any_value_in_place_of_the_list_of_repairs(tmp_path: Path, value: str) -> None:
    from chakra_et.traces import device as device_trace

    path = tmp_path / "a_device.json"
    path.write_text(device().replace('"traceName": "x"', f'"chakra_et_repairs": {value}'))
    assert not device_trace.load(path).findings.of("repair")


def test_secrets_are_not_copied_into_the_repaired_trace(tmp_path: Path) -> None:
    """Public traces carry environment dumps with tokens. The backup keeps them, a copy elsewhere doesn't."""
    secrets = ["hf_" + "a1B2" * 8, "hunter2", "wandb0key", "p4ss", "AKIA" + "ABCD" * 4]
    environment = {"HF_TOKEN": secrets[0], "command": f"train --password={secrets[1]} --lr 1",
                   "text": json.dumps({"WANDB_API_KEY": secrets[2]}), "tokens": 512, "pad_token": "</s>",
                   "url": f"https://user:{secrets[3]}@host/x", "id": secrets[4]}  # fmt: skip
    text = device().replace(
        '"schemaVersion": 1,', f'"schemaVersion": 1, "environment": {json.dumps(environment)},'
    )
    text = text.replace('"External id": 1', f'"External id": 1, "env": {json.dumps(environment)}')
    path = tmp_path / "a_device.json"
    path.write_text(text.replace("  },\n", "  }\n", 1))
    report = repair_file(path)
    kept = path.read_text()
    assert not [secret for secret in secrets if secret in kept]
    assert [repair.kind for repair in report.repairs].count("secret") == 1
    fixed = json.loads(kept)
    assert sum("secret" in listed for listed in fixed["chakra_et_repairs"]) == 1
    for found in (fixed["environment"], fixed["traceEvents"][1]["args"]["env"]):
        assert found["tokens"] == 512 and found["pad_token"] == "</s>" and found["command"].endswith("--lr 1")
    assert not repair_file(path).changed


def test_a_url_and_an_address_in_one_line_are_no_password(tmp_path: Path) -> None:
    from chakra_et.redact import redacted_json

    text = b'{"url":"http://host","name":"a@b", "packages": ["tiktoken==0.9.0"]}'
    assert redacted_json(text) is text


def test_a_long_record_without_the_end_of_a_name_takes_linear_time() -> None:
    """From the campaign: each of 3,000 names was tried to the end of 460 KB, which took 12 s."""

    def seconds(names: int) -> float:
        begin = time.process_time()
        assert mend(b'{"name": "x:,nttype": "string", "value": "y:,nt' * names, "host") is None
        return time.process_time() - begin

    few = min(seconds(2_000) for _ in range(3))
    assert seconds(16_000) < 24 * few
