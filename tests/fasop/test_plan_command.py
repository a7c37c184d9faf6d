"""``python -m fasop plan``, as a user runs it."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fasop.__main__ import main
from fasop.commands.plan import Config
from fasop.errors import PlanError
from fasop.output.report import COLUMNS, MEAN_ERROR
from fasop.plans.plan import plans_json, read_plans

BERT = ["plan", "--model", "bert-large", "--cluster", "paper-bert-het"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence that a command ends with; status 2, nothing on stdout, no traceback."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    assert status == 2 and output.out == "" and "Traceback" not in output.err
    return output.err.strip().splitlines()[-1]


@pytest.mark.parametrize("cost_model", ["exact", "hpdc24"])
def test_a_table_the_reasons_and_the_stages(capsys: pytest.CaptureFixture[str], cost_model: str) -> None:
    text = run(capsys, *BERT, "--cost-model", cost_model, "--top", "3")
    lines = text.splitlines()
    assert "16 GPUs in nodes of 4 (1 × A100, 3 × A10), $57.20/h" in lines[0] and cost_model in lines[0]
    assert lines[2].split()[:4] == ["step", "s", "pipeline", "s"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"] and lines[6] == ""
    steps = [float(line.split()[1]) for line in lines[3:6]]
    assert steps == sorted(steps)
    assert "Plan 1 has the shortest step" in text
    assert "memory GiB" in text and "39.59" in text and "22.20" in text
    assert "OOM" not in text and "\x1b" not in text


def test_json_is_the_file_of_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, *BERT, "--top", "2", "--json")
    path = tmp_path / "plans.json"
    path.write_text(text, encoding="utf-8")
    plans = read_plans(path)
    assert len(plans) == 2 and json.loads(text)["format"] == 2
    assert plans_json(plans) + "\n" == text


@pytest.mark.parametrize(("cost_model", "rows"), [("hpdc24", 356), ("exact", 89)])
def test_all_rows_as_csv(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cost_model: str, rows: int
) -> None:
    path = tmp_path / "rows.csv"
    assert run(capsys, *BERT, "--cost-model", cost_model, "--all", "--csv", str(path)) == ""
    with path.open(encoding="utf-8") as handle:
        found = list(csv.DictReader(handle))
    assert len(found) == rows and tuple(found[0]) == COLUMNS
    times = [float(row["estimated time (s/step)"]) for row in found]
    assert times == sorted(times)
    assert {row["is_oom"] for row in found} == {"True", "False"}
    for row in found:
        assert int(row["tp"]) * int(row["dp"]) * int(row["pp"]) == 16
        assert (row["num_a100"], row["num_a10"]) == ("1", "3")
        assert sum(json.loads(row["partition"])) == 26


def test_csv_without_a_file_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *BERT, "--csv", "-", "--top", "4")
    assert len(list(csv.reader(io.StringIO(text)))) == 5


@pytest.mark.parametrize("cost_model", ["exact", "hpdc24"])
def test_oom_plans_only_when_asked_for(capsys: pytest.CaptureFixture[str], cost_model: str) -> None:
    few = ["--cost-model", cost_model, "--top", "400"]
    without = run(capsys, *BERT, *few)
    with_them = run(capsys, *BERT, *few, "--oom")
    assert " OOM" not in without and " OOM" in with_them


@pytest.mark.parametrize("cost_model", ["exact", "hpdc24"])
def test_time_against_cost_of_the_grid(capsys: pytest.CaptureFixture[str], cost_model: str) -> None:
    flags = ["--objective", "pareto", "--budget", "60", "--cost-model", cost_model, "--json"]
    plans = json.loads(run(capsys, "plan", "--model", "gpt2-xl", "--cluster", "paper-pareto", *flags))[
        "plans"
    ]
    assert len(plans) > 3
    times, prices = ([plan[key] for plan in plans] for key in ("step_time", "price_per_step"))
    assert times == sorted(times) and prices == sorted(prices, reverse=True)
    for plan in plans:
        counts = zip(plan["cluster"]["gpus"], plan["cluster"]["nodes"], strict=True)
        assert sum(gpu["price_per_hour"] * nodes for gpu, nodes in counts) <= 60


def test_chosen_degrees_and_a_step_time(capsys: pytest.CaptureFixture[str]) -> None:
    plans = json.loads(run(capsys, *BERT, "--pp", "4", "--mbs", "8", "--json"))["plans"]
    assert plans and all((plan["pp"], plan["mbs"]) == (4, 8) for plan in plans)
    limit = json.loads(run(capsys, *BERT, "--max-step-time", "1.0", "--json"))["plans"]
    assert limit and all(plan["step_time"] <= 1 for plan in limit)


def test_the_costs_that_were_not_measured_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for cost_model in ("exact", "hpdc24"):
        flags = ["--cluster", "seed-345m", "--cost-model", cost_model]
        text = run(capsys, "plan", "--model", "gpt2-345m", *flags)
        assert "note: gpt2-345m: costs of bert-large at as many tokens, by ratio of work" in text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([*BERT, "--top", "0"], "--top is 0: give at least 1"),
        ([*BERT, "--budget", "-1"], "--budget is -1.0: give a number above 0"),
        ([*BERT, "--json", "--csv", "-"], "--json and --csv exclude each other"),
        ([*BERT, "--tp", "3"], "no plan has tp 3"),
        ([*BERT, "--cost-model", "hpdc24", "--tp", "3"], "leave out one of them"),
        ([*BERT, "--cost-model", "hpdc24", "--max-tp", "8"], "use --cost-model exact"),
        ([*BERT, "--budget", "20"], "no cluster costs at most $20/h, paper-bert-het $57.20/h"),
        ([*BERT, "--max-step-time", "0.1"], "takes at most 0.1 s per step: raise"),
        ([*BERT, "--cost-model", "hpdc24", "--max-step-time", "0.1"], "takes at most 0.1 s per step"),
        ([*BERT, "--csv", "/no/such/folder/rows.csv"], "no such folder: make /no/such/folder first"),
        ([*BERT, "--global-batch", "0"], "--global-batch is 0"),
        (
            [*BERT, "--global-batch", "10000000"],
            "global_batch: 10000000: give a whole number from",
        ),
        ([*BERT, "--max-tp", "2", "--tp", "4"], "--tp 4 is above --max-tp 2: give --max-tp 4"),
        (
            ["plan", "--model", "bert-large", "--cluster", ""],
            "no cluster is named: give a preset",
        ),
        ([*BERT, "--costs", "nothing.json"], "nothing.json: can't be read"),
        (["plan", "--model", "bert-large"], "--cluster"),
        (["plot"], "no command 'plot', did you mean export?"),
    ],
)
def test_one_sentence_for_what_cannot_be(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, *argv)


def test_nothing_fits_but_with_recomputation_it_would(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def on(memory: float) -> list[str]:
        path = tmp_path / "small.yaml"
        bandwidths = "inter_bandwidth: 40e9, intra_bandwidth: 128e9"
        gpu = f"{{nodes: 2, memory_gib: {memory}, price_per_hour: 8, {bandwidths}}}"
        path.write_text(f"clusters: {{small: {{gpus_per_node: 4, gpus: {{A10: {gpu}}}}}}}", encoding="utf-8")
        return ["plan", "--model", "gpt2-xl", "--cluster", str(path)]

    assert "fits into memory: give --recompute auto" in refused(capsys, *on(0.5))
    assert run(capsys, *on(5), "--recompute", "auto")
    assert "fits into memory" in refused(capsys, *on(0.5), "--cost-model", "hpdc24")


def test_flags_that_are_given_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal named flags that were given, ``--attention unfused`` and ``--zero 0`` changed nothing on
    their own, and LoRA couldn't be planned.
    """
    argv = ["plan", "--model", "mixtral-8x7b", "--cluster", "8xA100", "--recompute", "auto", "--pp", "1"]
    argv += ["--mbs", "1", "--global-batch", "64"]
    assert "give --offload, --cp 0, a larger --max-tp, or more GPUs." in refused(capsys, *argv, "--fsdp")
    text = run(capsys, *argv, "--lora", "--top", "1")
    assert ", LoRA, " in text and "Nodes in rank order" not in text, "nobody named the nodes"
    small = [
        "plan",
        "--model",
        "mpt-125m",
        "--cluster",
        "4xA100",
        "--global-batch",
        "16",
        "--top",
        "1",
        "--json",
    ]
    each = [json.loads(run(capsys, *small, "--cp", cp))["plans"][0]["step_time"] for cp in "1240"]
    assert each[-1] == min(each[:-1]) and len(set(each[:-1])) == 3, "4 GPUs have no cp 8"
    assert "--cp 0 searches for the shortest step" in refused(capsys, *argv, "--cp", "0", "--all")
    options = Config("m", "c", attention="unfused", zero=0, lora=True, fast_dispatch=True).options(False)[0]
    assert (options.attention, options.zero, options.sequence_parallel) == ("unfused", 0, True)
    assert options.adapters and options.fast_dispatch
    assert Config("m", "c").options(False)[0].zero == 1 and Config("m", "c").options(True)[0].zero == 0


def changed(text: str, **values: object) -> str:
    """A file of one plan with some fields changed."""
    document = json.loads(text)
    document["plans"][0].update(values)
    return json.dumps(document)


def test_a_plan_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.json"
    text = run(capsys, *BERT, "--top", "1", "--json")
    for change, sentence in [
        (text[:100], "not a file of plans"),
        ("[]", "not a file of plans"),
        (text.replace('"format": 2', '"format": 1'), "plans of format 1: this program reads format 2"),
        (changed(text, pp=1), "values for 1 stages"),
        (changed(text, tp=64), "tp × dp × pp is"),
        (changed(text, placement=["A100"] * 4), "placement: 4 nodes of A100, cluster paper-bert-het has 1"),
    ]:
        path.write_text(change, encoding="utf-8")
        with pytest.raises(PlanError) as caught:
            read_plans(path)
        assert sentence in str(caught.value)
    with pytest.raises(PlanError, match="can't be read"):
        read_plans(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cluster.nodes": [1]}, "cluster: 1 counts of nodes for 2 GPU types"),
        ({"cluster.gpus.0.inter_bandwidth": 0}, "plans[0].cluster.gpus[0].inter_bandwidth: expected `float`"),
        ({"ep": 5}, "ep is 5: give 1, as bert-large has no experts"),
        ({"stage_forward.0": 0, "stage_backward.0": 0}, "plans[0].stage_forward[0]: expected `float` > 0"),
        ({"micro_batches": 1_000_000_000}, "plans[0].micro_batches: expected `int` <= "),
        ({"micro_batches": 3}, "is not the global batch, 256"),
        ({"stage_forward.0": -1}, "plans[0].stage_forward[0]: expected `float` > 0"),
        ({"stage_gpu.0": "H900"}, "stage_gpu: no 'H900' in the placement"),
        ({"options.gradient_bytes": 0}, "plans[0].options.gradient_bytes: expected `int` >= 2"),
        ({"virtual_stages": 100}, "virtual_stages is 100: give at most"),
        ({"tp": 32}, "tp × dp × pp is"),
        ({"hosts.0": "nowhere"}, "hosts: give one node of the cluster"),
    ],
)
def test_a_plan_edited_by_hand_must_still_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], sentence: str
) -> None:
    document = json.loads(run(capsys, *BERT, "--top", "1", "--json"))
    for key, value in changes.items():
        holder = document["plans"][0]
        *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        for part in path:
            holder = holder[part]
        holder[last] = value
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    for command in ("simulate", "export", "evaluate"):
        assert sentence in refused(capsys, command, str(path))


def test_costs_that_no_file_has_are_a_typo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.yaml"
    sizes = "hidden: 64, seq: 32, layers: 4, vocab: 100, heads: 4, global_batch: 8"
    path.write_text(f"models: {{mine: {{{sizes}, costs: bert-lage}}}}", encoding="utf-8")
    flags = ["--model", "mine", "--models-file", str(path), "--cluster", "paper-bert"]
    sentence = "no cost file has 'bert-lage': give the file with --costs, or did you mean 'bert-large'"
    assert sentence in refused(capsys, "plan", *flags)


def test_a_plan_with_missing_units_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.json"
    path.write_text(run(capsys, *BERT, "--top", "1", "--json"), encoding="utf-8")
    (plan,) = read_plans(path)
    first, *others = plan.partition
    path.write_text(plans_json([replace(plan, partition=(first + 1, *others))]))
    with pytest.raises(PlanError, match="partition has 27 units, bert-large has 26"):
        read_plans(path)


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "simulate" in capsys.readouterr().out


def test_what_tells_plans_apart_is_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "moe.yaml"
    cluster.write_text(
        "clusters: {moe: {gpus_per_node: 8, gpus: {H100: {nodes: 8, memory_gib: 79, price_per_hour: 98, "
        "inter_bandwidth: 3200e9, intra_bandwidth: 3600e9}}}}\n"
    )
    flags = ["--recompute", "full", "--attention", "flash", "--zero", "1", "--global-batch", "64"]
    out = run(capsys, "plan", "--model", "mixtral-8x7b", "--cluster", str(cluster), *flags, "--dp", "64")
    assert "mbs  ep  mem" in out and ", ep 8, micro-batches of 1):" in out
    auto = run(capsys, *BERT, "--recompute", "auto", "--top", "6").splitlines()[2:9]
    assert "mbs  recompute  mem" in auto[0]
    assert {"none", "selective"} <= set(" ".join(auto).split())


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_plans_that_are_not_told_apart_are_counted(
    capsys: pytest.CaptureFixture[str], repo_root: Path, objective: str
) -> None:
    table = (repo_root / "fasop" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"GPT on A100, all \| \d+ \| ([\d.]+)%", table) == [f"{100 * MEAN_ERROR:.1f}"]
    command = [*BERT, "--objective", objective]
    plans = json.loads(run(capsys, *command, "--json"))["plans"]
    key = "step_time" if objective == "time" else "price_per_step"
    last, percent = re.findall(r"Plans 1 (?:to|and) (\d+) are within ([\d.]+)%", run(capsys, *command))[0]
    assert float(last) == sum(plan[key] <= plans[0][key] * (1 + float(percent) / 100) for plan in plans) > 1
    assert "of each other" not in run(capsys, *command, "--top", "1")
    assert "of each other" not in run(capsys, *command, "--cost-model", "hpdc24")


def test_what_a_step_yields_and_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by hand from the model's sizes; shares and kinds of memory add up."""
    flags = ["plan", "--model", "gpt2-xl", "--cluster", "paper-gpt2xl-het", "--top", "2"]
    assert main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert main([*flags, "--tokens", "2T"]) == 0
    text = capsys.readouterr().out
    tokens = 64 * 1024 / plan["step_time"]
    assert f"It trains {tokens:,.0f} tokens/s" in text
    flops = 6 * (48 * 12 * 1600**2 + 1600 * 50257) + 12 * 48 * 1600 * 1024
    assert f"{tokens * flops / 32 / 1e12:.1f} TFLOP/s per GPU" in text
    (line,) = re.findall(r"Its step: (.*)\.", text)
    assert sum(map(float, re.findall(r"([\d.]+)%", line))) == pytest.approx(100, abs=0.5)
    whole, kinds = re.findall(r"fullest: ([\d.]+) of .*? GiB \((.*)\)", text)[0]
    assert sum(map(float, re.findall(r"[\d.]+", kinds))) == pytest.approx(float(whole), abs=0.05)
    priced = 2e12 / (64 * 1024) * plan["price_per_step"]
    assert "$ for 2T" in text and f"{priced:,.0f}"[:5] in text
    assert "recomputation none, unfused attention" in text and "6% on A100" in text
    assert "--tokens" in refused(capsys, *flags, "--tokens", "many")


def test_what_fsdp_gathers_is_no_compute(capsys: pytest.CaptureFixture[str]) -> None:
    """It was: "compute 100.0%". Sharing the parameters makes the passes longer by what it communicates."""
    flags = ["plan", "--model", "llama3-8b", "--cluster", "64xH100", "--dp", "64", "--tp", "1", "--top", "1"]
    flags += ["--recompute", "full", "--mbs", "1"]
    step = {}
    for how in (["--zero", "1"], ["--zero", "3"]):
        assert main([*flags, *how, "--json"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        step[how[1]] = plan["stage_forward"][0] + plan["stage_backward"][0]
    shared = plan["parts"][0]["sharding"]
    assert shared == pytest.approx(step["3"] - step["1"]) and shared > 0
    assert "exposed collectives of sharding" in run(capsys, *flags, "--zero", "3")


def test_a_gpu_that_is_only_a_datasheet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In one try from the documents: cluster files took GPUs of the table only."""
    sheet = (Path(__file__).parents[2] / "docs" / "PREDICT.md").read_text().split("```yaml\n", 1)[1]
    (tmp_path / "h20.yaml").write_text(sheet.split("```", 1)[0])
    gpu = "nodes: 2, memory_gib: 95, price_per_hour: 30, inter_bandwidth: 3200e9, intra_bandwidth: 3600e9"
    cluster = tmp_path / "mine.yaml"
    cluster.write_text(f"clusters: {{it: {{gpus_per_node: 8, gpus: {{H20: {{{gpu}, like: h20.yaml}}}}}}}}")
    flags = [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        str(cluster),
        "--top",
        "1",
        "--tp",
        "1",
        "--mbs",
        "1",
    ]
    text = run(capsys, *flags)
    (mfu,) = map(float, re.findall(r"MFU ([\d.]+)%", text))
    assert (
        40 < mfu < 100 and f"H20: costs of {tmp_path / 'h20.yaml'}\n" in text and "not judged on H20" in text
    )
    assert "llama3-8b on h20.yaml: not measured" in text
    cluster.write_text(cluster.read_text().replace("h20.yaml", "h21.yaml"))
    assert "h21.yaml: can't be read" in refused(capsys, *flags)


def test_gpus_without_prices_show_no_dollars_and_none_are_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["plan", "--model", "gpt2-xl", "--cluster", "4xRTX4090", "--top", "2", "--mbs", "1"]
    text = run(capsys, *flags)
    assert "$" not in text and "prices not given" in text and "PCIe is that of one slow box" in text
    assert "has no prices" in refused(capsys, *flags, "--objective", "cost")


def test_auto_is_by_the_gpus_that_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 XL was measured on A100 and A10: on others it was planned without FlashAttention, too."""
    flags = ["plan", "--model", "gpt2-xl", "--top", "1", "--mbs", "1", "--dp", "4"]
    assert "flash attention" in run(capsys, *flags, "--cluster", "8xH100")
    assert "unfused attention" in run(capsys, *flags, "--cluster", "paper-gpt2xl")


def test_fused_attention_has_nothing_to_compute_again() -> None:
    """Half of the table was "selective", as large and slower."""
    config = Config("llama3-8b", "8xH100", recompute="auto")
    assert {each.recompute for each in config.options(False)} == {"none", "full"}
    assert len(config.options(True)) == 3


def test_a_sweep_as_parquet_and_as_a_picture_with_its_front(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    flags = ["--model", "gpt2-xl", "--cluster", "paper-gpt2xl-het", "--dp", "4", "--tp", "1", "--oom"]
    table, picture = tmp_path / "plans.parquet", tmp_path / "plans.svg"
    run(capsys, "plan", *flags, "--csv", str(table), "--picture", str(picture))
    rows = parquet.read_table(table).to_pydict()
    assert set(rows["dp"]) == {4} and len(rows["partition"][0]) == rows["pp"][0]
    points = list(zip(rows["estimated time (s/step)"], rows["price_per_step"], strict=True))
    front = [p for p in set(points) if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count("<circle") == len(points) + len(front) and drawn.count("<path") == 1
    assert "ends in .svg" in refused(capsys, "plan", *flags, "--picture", "plans.png")
