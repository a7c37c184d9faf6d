"""``chakra-et predict``: files in, prediction out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from tests.simulate.replay_traces import collective, cpu, make_trace


@pytest.fixture
def two(tmp_path: Path) -> str:
    """Two ranks, two steps each; the second rank computes longer."""
    for rank in range(2):
        nodes = []
        for step in range(2):
            at, begin = 4 * step, 200 * step + 1
            wait = 40 * (1 - rank)
            deps = (at,) if step else ()
            nodes += [
                cpu(at + 1, 10, deps, name=f"ProfilerStep#{step}", start=begin),
                cpu(at + 2, 90 + 40 * rank, (at + 1,), name="aten::mm", start=begin + 10),
                collective(
                    at + 3, 50 + wait, (at + 2,), start=begin + 100 + 40 * rank, name="gloo:all_reduce",
                    comm_size=10**6, transfer_micros=50, wait_micros=wait,
                ),
                cpu(at + 4, 10, (at + 3,), name="optimizer", start=begin + 190),
            ]  # fmt: skip
        trace = make_trace(
            *nodes, world_size=2, trace_start_ns=0, clock_offset_ns=0, clock_domain="one", version="1.0.0"
        )
        et_file.write(tmp_path / f"run.{rank}.et", trace)
    return str(tmp_path / "run")


def test_json(two: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["predict", two, "--scale", "aten::mm=0.5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step_us"] == {"before": 200, "after": 135}
    for rank in answer["ranks"]:
        assert rank["measured_us"] == rank["before_us"] == 200
        assert [step["after_us"] for step in rank["steps"]] == [135, 135]
        assert rank["bound_after"] == pytest.approx({"operator": 85 / 135, "transfer": 50 / 135})


def test_more_ranks(two: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["predict", two, "--ranks", "4", "--json", "--output", str(tmp_path / "four")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1, 2, 3]
    # 50 µs of all-reduce become 75; what the new ranks do has the mean of the measured ones.
    assert answer["step_us"]["after"] == pytest.approx(225, abs=2)
    assert main(["validate", str(tmp_path / "four")]) == 0
    assert main(["replay", str(tmp_path / "four"), "--semantics", "device", "--max-error", "0.01"]) == 0


def test_a_flag_given_twice_counts_twice(two: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["predict", two, "--scale", "aten::mm=0.5", "--scale", "optimizer=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_us"]["after"] == 145


def test_text_and_files(two: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "new" / "predicted"
    words = [
        "--rank",
        "1",
        "--bandwidth",
        "1Gbit/s",
        "--latency",
        "5us",
    ]
    assert main(["predict", two, *words, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "operator" in shown and "transfer" in shown and "wrote" in shown
    paths = [Path(f"{output}.{rank}.et") for rank in range(2)]
    # 10 + 90 µs, 2 latencies, 1 MB at 1 Gbit/s of which 1448/1514 is payload, half of gloo's 50, 10 µs.
    step = 10 + 90 + 10 + 8000 * 1514 / 1448 + 25 + 10
    for path in paths:
        trace = et_file.read(path)
        starts = trace.start_micros.astype(int)
        assert starts[4] - starts[0] == pytest.approx(step, abs=1)
        assert trace.column("wait_micros").max() <= 1  # rounded to µs
    assert main(["replay", str(output), "--semantics", "device", "--max-error", "0.01"]) == 0
    assert main(["validate", str(output)]) == 0
    assert main(["compare", two, str(output), "-o", str(tmp_path / "compare.html")]) == 0
    assert (tmp_path / "compare.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "aten::bmm=2"], "no node's name matches 'aten::bmm'"),
        (["--bandwidth", "100"], "has no unit"),
        (["--bandwidth", "1Gbit/s", "--latency", "5"], "has no unit"),
        (["--scale", "aten::mm"], "PATTERN=FACTOR"),
        (["--topology", "2xH100 NVLink", "--bandwidth", "1Gbit/s"], "--topology has its own bandwidth"),
        (["--network", "absent.json", "--latency", "5us"], "absent.json"),
        (["--output", ""], "NAME of the files"),
        (["--ranks", "0"], "--dp 0: use 1 to 1,024"),
        (["--bucket-mb", "0"], "--bucket-mb is 0.0: give a number above 0"),
        (["--bucket-mb", "4"], "no attribute lane, from which operators are told"),
        (["--shard", "zero"], "invalid choice: 'zero'"),
        (["--shard", "fsdp2"], "no attribute lane, from which operators are told"),
        (["--shard", "fsdp2", "--bucket-mb", "4"], "--bucket-mb changes what DDP does"),
        (["--shard", "fsdp2", "--accumulate", "4"], "--accumulate changes what DDP does"),
        (["--layers", "2x"], "no attribute lane"),
        (["--accumulate", "1"], "--accumulate is 1: give 2 to 1,024"),
        (["--bandwidth", "1Gbit/s:2Gbit/s:3Gbit/s"], "give the new one, or FROM:TO"),
    ],
)
def test_one_sentence(two: str, words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    try:
        status = main(["predict", two, *words])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown


def test_ranks_of_different_runs_are_refused(two: str, capsys: pytest.CaptureFixture) -> None:
    trace = et_file.read(f"{two}.1.et")
    trace.attributes["comm_size"].values[:] = 5
    et_file.write(f"{two}.1.et", trace)
    assert main(["predict", two, "--scale", "aten::mm=2"]) == 2
    assert "the ranks disagree" in capsys.readouterr().err


def test_a_sweep_predicts_each_combination_as_alone(two: str, capsys: pytest.CaptureFixture) -> None:
    def answer(*words: str) -> Any:
        assert main(["predict", two, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    rows = answer("--scale", "aten::mm=0.5", "--sweep", "dp=2,4", "latency=1us,1ms")
    given = [(dp, latency) for dp in ("2", "4") for latency in ("1us", "1ms")]
    assert [tuple(row.pop("with").values()) for row in rows] == given
    for row, (dp, latency) in zip(rows, given, strict=True):
        assert row == answer("--scale", "aten::mm=0.5", "--dp", dp, "--latency", latency)
    assert len({row["step_us"]["after"] for row in rows}) == 4


def test_a_sweep_on_a_cluster_and_what_it_refuses(two: str, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("distributed", reason="from a clone, pip install '.[cluster]'")
    words = ["predict", "--sweep", "gpu=A100:H100", "overlap", two]
    assert main(words) == 2
    assert "--sweep overlap" in capsys.readouterr().err
    words = ["predict", two, "--sweep", "batch=2x,2", "dp=4"]
    said = []
    for place in ([], ["--cluster", "local"]):
        assert main([*words, *place]) == 2  # each is refused: the run has no blocks of a known size
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].count("refused") == 2 and said[0].count("error: run.0: ") == 1
    assert main(["predict", two, "--sweep", "dp=2,4", "--cluster", "local"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert main(["predict", two, "--cluster", "local"]) == 2
    assert main(["predict", two, "--sweep", "dp=2", "--output", "there"]) == 2
    assert (
        main(["predict", two, "--sweep", "dp=" + ",".join(map(str, range(1, 102))), "tp=" + "1," * 100]) == 2
    )
