"""The tracing flags and the names that a trace may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_et.capture.tracer import ChakraTracer, TraceConfig, check_trace_name
from chakra_et.cli import parse
from chakra_et.names import SIDES, RunFiles, gz


@pytest.mark.parametrize("name", ["gpt2_2gpu_quick_trace", "한글 추적 1", "v1.2-a+b=c@d,(e)", "a_rank1_b"])
def test_names_that_are_taken(name):
    assert check_trace_name(name) == name


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (" x", "space"),
        ("x ", "space"),
        (".hidden", "dot"),
        ("..", "dot"),
        ("-x", "dash"),
        ("../x", "dot"),
        ("a/b", "'/'"),
        ("a\\b", r"'\\\\'"),
        ("a\nb", r"'\\n'"),
        ("a\0b", "x00"),
        ('a"b', "use letters"),
        ("<script>", "use letters"),
        ("a*", "use letters"),
        ("x_rank1", "another rank"),
        ("가" * 100, "180 bytes"),
    ],
)
def test_names_that_are_refused_in_one_sentence(name, word):
    with pytest.raises(ValueError, match=word) as raised:
        check_trace_name(name)
    assert "\n" not in str(raised.value)


@given(st.text())
def test_no_accepted_name_leaves_the_folder(name):
    try:
        check_trace_name(name)
    except ValueError:
        return
    run = RunFiles(Path("folder"), name)
    for path in (run.manifest_file, *(gz(run.trace_file(12345, side)) for side in SIDES)):
        assert path.parent == Path("folder") and len(path.name.encode()) <= 255


def test_flags_in_both_spellings():
    config = parse(TraceConfig, ["--enable-tracing", "--trace_name", "t", "--trace-active-steps", "1"])
    assert (config.enable_tracing, config.trace_name, config.trace_active_steps) == (True, "t", 1)
    defaults = TraceConfig()
    assert defaults.trace_wait_steps + defaults.trace_warmup_steps + defaults.trace_active_steps <= 10


@pytest.mark.parametrize(
    "flags",
    [
        ["--trace-wait-steps", "-1"],
        ["--trace-warmup-steps", "-1"],
        ["--trace-active-steps", "0"],
        ["--trace-output-dir", ""],
        ["--trace-name", "../up"],
    ],
)
def test_bad_flags_end_in_one_sentence(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(TraceConfig, flags)
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: " in last and ("trace name" in last or flags[0] in last)


def test_tracer_refuses_a_rank_that_torch_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="after init_process_group"):
        ChakraTracer(tmp_path, "t", 1, 1, 1, rank=1, world_size=2)


def test_the_original_call_and_the_short_one_mean_the_same(tmp_path):
    original = ChakraTracer(tmp_path, "t", 2, 1, 3, 0, 1)
    short = ChakraTracer(tmp_path, "t")
    assert original.schedule == short.schedule == {"wait_steps": 2, "warmup_steps": 1, "active_steps": 3}
    assert ChakraTracer(str(tmp_path), "t", active_steps=1).schedule["active_steps"] == 1
    with pytest.raises(ValueError, match="active_steps is 0: give a whole number of at least 1"):
        ChakraTracer(tmp_path, "t", active_steps=0)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"active_steps": -1}, "active_steps is -1: give a whole number of at least 1"),
        ({"warmup_steps": 1.5}, "warmup_steps is 1.5: give a whole number of at least 0"),
        ({"wait_steps": "2"}, "wait_steps is '2': give a whole number of at least 0"),
    ],
)
def test_the_tracer_names_its_own_arguments(tmp_path: Path, steps: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChakraTracer(tmp_path, "t", **steps)
