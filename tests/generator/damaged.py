"""Write tests/fixtures/damaged: one folder per kind of damage, with the converter's result.

    python -m tests.generator.damaged

Each folder has the damaged trace of one run, a line on where such damage comes from, and the expected result:
the kinds of repair of each file, and the converted graph or the sentence that refuses it. A device trace that
is not damaged is not in the folder: it is kept once, beside them, as good_device.json.gz.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chakra_et.convert.pair import PairOptions
from chakra_et.convert.runs import RunOptions, convert_sets
from chakra_et.errors import TraceError
from chakra_et.repair.file import repair_file
from chakra_et.traces import sets as trace_sets
from tests.generator import Features, generate

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "damaged"
GOOD_DEVICE = FOLDER / "good_device.json.gz"
HOST, DEVICE = "run_host.json", "run_device.json"
Run = dict[str, bytes]
Change = Callable[[Run], None]


def good(seed: int = 21) -> Run:
    """The run before it is damaged: one process, one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        features = Features(seed=seed, operators=2, depth=2, resolution=1_000, world_size=1)
        return {path.name: path.read_bytes() for path in generate(features).write(Path(folder))}


def text(file: str, change: Callable[[bytes], bytes]) -> Change:
    def apply(run: Run) -> None:
        run[file] = change(run[file])

    return apply


def document(file: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(run: Run) -> None:
        parsed = json.loads(run[file])
        change(parsed)
        run[file] = json.dumps(parsed, indent=1).encode()

    return apply


def packed(damage: Callable[[bytes], bytes]) -> Change:
    def apply(run: Run) -> None:
        run[f"{HOST}.gz"] = damage(gzip.compress(run.pop(HOST), 9, mtime=0))

    return apply


def _striped(run: Run) -> None:
    writers = [good(22)[HOST].replace(b"4242", b"4243"), run[HOST]]
    run[HOST] = b"".join(
        writer[at : at + 4096] for at in range(0, max(map(len, writers)), 4096) for writer in writers
    )


def _torn_turns(run: Run) -> None:
    """Blocks of different sizes, so the writers of the records cannot be separated."""
    one, other = run[HOST], good(22)[HOST].replace(b"4242", b"4243")
    a, b = len(one) // 3, len(other) // 4
    run[HOST] = one[:a] + other[:b] + one[a : 2 * a] + other[b:] + one[2 * a :]


def _named(raw: bytes, name: str) -> Change:
    """Operators called ``name``, which the observer writes unescaped (``raw``) and Kineto escapes."""

    def apply(run: Run) -> None:
        run[HOST] = run[HOST].replace(b'"aten::', b'"' + raw)
        parsed = json.loads(run[DEVICE])
        for event in parsed["traceEvents"]:
            event["name"] = event["name"].replace("aten::", name)
        run[DEVICE] = json.dumps(parsed, indent=1).encode()

    return apply


def _nodes(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    return parsed["nodes"]


def _doubled_ids(parsed: dict[str, Any]) -> None:
    nodes = _nodes(parsed)
    nodes.insert(len(nodes) // 2, dict(nodes[-3]))


def _absent_parents(parsed: dict[str, Any]) -> None:
    for node in _nodes(parsed)[4::3]:
        node["ctrl_deps"] += 10**6


def _cyclic_parents(parsed: dict[str, Any]) -> None:
    one, other = _nodes(parsed)[4:6]
    one["ctrl_deps"], other["ctrl_deps"] = other["id"], one["id"]
    _nodes(parsed)[7]["ctrl_deps"] = _nodes(parsed)[7]["id"]


def _without_numbers(parsed: dict[str, Any]) -> None:
    for event in parsed["traceEvents"][3:6]:
        event["ts"] = "soon"


MIDDLE = b"},\n      {"
DAMAGE: dict[str, tuple[str, Change]] = {
    "two_objects": ("Two recordings of the observer to one path follow one another.",
                    text(HOST, lambda t: good(22)[HOST] + t)),
    "footer_never_written": ("The process was killed before the observer's end was written.",
                             text(HOST, lambda t: t[: t.rindex(b"\n  ],")])),
    "cut_in_a_node": ("The process was killed while a node was written.",
                      text(HOST, lambda t: t[: len(t) * 2 // 3])),
    "device_cut": ("The disk was full while Kineto wrote.", text(DEVICE, lambda t: t[: len(t) * 2 // 3])),
    "cut_before_the_first_node": ("The process was killed right after the header.",
                                  text(HOST, lambda t: t[: t.index(b"[") + 1])),
    "beginning_lost": ("The first blocks of the file were never written.",
                       text(HOST, lambda t: t[len(t) // 3 :])),
    "leading_garbage": ("The log of the launcher went to the same file.",
                        text(HOST, lambda t: b"W1121 rank 0: slow\n" + t)),
    "trailing_garbage": ("A longer, older file was written over without being cut.",
                         text(HOST, lambda t: t + t[-200:])),
    "turns_of_equal_size": ("Two ranks with one path: buffered writers leave the file in stripes.", _striped),
    "turns_of_odd_size": ("Two ranks with one path, flushed at odd moments.", _torn_turns),
    "comma_missing": ("Seen with observers that were registered twice.",
                      text(HOST, lambda t: t.replace(MIDDLE, b"}\n      {", 1))),
    "comma_twice": ("Seen with observers that were registered twice.",
                    text(HOST, lambda t: t.replace(MIDDLE, b"},,\n      {", 1))),
    "comma_at_the_end": ("Written by hand or by a script that filtered nodes.",
                         text(HOST, lambda t: t.replace(b"}\n  ],", b"},\n  ],", 1))),
    "name_with_quotes": ("record_function('say \"hi\"'): the observer escapes no names.",
                         _named(b'a "b" \\c ', 'a "b" \\c ')),
    "name_with_a_newline": ("record_function with a newline in it: the observer escapes no names.",
                            _named(b"a\nb\t", "a\nb\t")),
    "nan_and_infinity": ("A scalar argument was NaN or infinite: no JSON number.",
                         text(HOST, lambda t: t.replace(b'"value": 0}', b'"value": NaN}', 1)
                              .replace(b'"value": -1}', b'"value": -Infinity}', 1))),
    "invalid_utf8": ("A name in another encoding.",
                     text(HOST, lambda t: t.replace(b"aten::", b"at\xe9n::", 1))),
    "byte_order_mark_and_crlf": ("The file went through an editor on Windows.",
                                 text(HOST, lambda t: b"\xef\xbb\xbf" + t.replace(b"\n", b"\r\n"))),
    "zeroed_block": ("The file system lost a block in a crash.",
                     text(HOST, lambda t: t[:4096] + bytes(512) + t[4608:])),
    "header_damaged": ("A bit flipped in the header.",
                       text(HOST, lambda t: t.replace(b'"schema": "', b'"schema": ', 1))),
    "footer_damaged": ("A bit flipped in the footer.",
                       text(HOST, lambda t: t.replace(b'"finish_ts": ', b'"finish_ts": x', 1))),
    "nested_too_deep": ("Hostile: brackets that a recursive parser does not survive.",
                        text(HOST, lambda t: t.replace(b"[]", b"[" * 5000 + b"]" * 5000, 1))),
    "gz_cut": ("The transfer of a compressed trace broke off.", packed(lambda t: t[: len(t) // 2])),
    "gz_damaged": ("A bit flipped in a compressed trace.",
                   packed(lambda t: t[: len(t) // 2] + bytes([t[len(t) // 2] ^ 255]) + t[len(t) // 2 + 1 :])),
    "gz_trailing_garbage": ("A tool padded the compressed file.", packed(lambda t: t + b"\0\0garbage")),
    "duplicate_ids": ("Two recordings merged by hand.", document(HOST, _doubled_ids)),
    "absent_parents": ("The parent's node was never written: its operator had not ended.",
                       document(HOST, _absent_parents)),
    "cyclic_parents": ("Hostile: nodes that are their own parents.", document(HOST, _cyclic_parents)),
    "times_of_the_wrong_type": ("Another tool's idea of a time.", document(DEVICE, _without_numbers)),
    "nothing_left": ("The disk was full from the start.", text(HOST, lambda t: b"")),
    "not_a_trace": ("The wrong file under the right name.", text(HOST, lambda t: b"<html>404</html>\n")),
}  # fmt: skip


def result(folder: Path) -> dict[str, Any]:
    """The result of repairing and converting a copy of the traces in ``folder``."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for path in folder.glob("run_*"):
            shutil.copy(path, copy)
        if not (copy / DEVICE).exists():
            (copy / DEVICE).write_bytes(gzip.decompress(GOOD_DEVICE.read_bytes()))
        repairs = {}
        for path in sorted(copy.iterdir()):
            try:
                report = repair_file(path, write=False)
                repairs[path.name] = sorted({repair.kind for repair in report.repairs})
            except TraceError as error:
                repairs[path.name] = str(error).replace(f"{copy}/", "")
        (converted,) = convert_sets(trace_sets.find(copy), PairOptions(), RunOptions(workers=0))
        outcome = converted.ranks[0]
        if isinstance(outcome, TraceError):
            return {"repairs": repairs, "refused": str(outcome).replace(f"{copy}/", "")}
        report = outcome.report
        kept = ("events_in", "events_kept", "nodes", "edges", "losses", "link_rate", "warnings", "notes")
        kept_result = {name: getattr(report, name) for name in kept}
        kept_result["link_rate"] = round(report.link_rate, 4)
        listed = sorted(report.repairs)
        return {"repairs": repairs, "listed": listed, "problems": converted.problems} | kept_result


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    undamaged = good()
    GOOD_DEVICE.write_bytes(gzip.compress(undamaged[DEVICE], 9, mtime=0))
    for name, (origin, change) in DAMAGE.items():
        run = dict(undamaged)
        change(run)
        if run[DEVICE] == undamaged[DEVICE]:
            del run[DEVICE]
        folder = FOLDER / name
        folder.mkdir()
        for file, content in run.items():
            (folder / file).write_bytes(content)
        (folder / "README.md").write_text(f"{origin}\n")
        expected = json.dumps(result(folder), indent=1, sort_keys=True)
        (folder / "expected.json").write_text(expected + "\n")


if __name__ == "__main__":
    main()
