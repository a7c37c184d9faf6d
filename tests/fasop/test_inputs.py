"""Files that users write: what they may say, and one sentence for each way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasop.errors import PlanError
from fasop.inputs.clusters import PRESETS as CLUSTER_PRESETS
from fasop.inputs.clusters import load_clusters
from fasop.inputs.costs import CostFile, Costs, Entry, read_costs, write_costs
from fasop.inputs.models import PRESETS as MODEL_PRESETS
from fasop.inputs.models import Model, find_model, load_models
from fasop.inputs.settings import read_yaml
from tests.fasop import fasop_cases as cases

GPU = "memory_gib: 20, price_per_hour: 3, inter_bandwidth: 40e9, intra_bandwidth: 128e9"


def cluster_file(folder: Path, gpus: str, size: str = "4") -> Path:
    path = folder / "cluster.yaml"
    path.write_text(
        f"clusters:\n  mine:\n    gpus_per_node: {size}\n    gpus: {{{gpus}}}\n", encoding="utf-8"
    )
    return path


def test_all_presets_load() -> None:
    counts = {name: len(load_clusters(name)) for name in read_yaml(CLUSTER_PRESETS, "clusters")}
    assert counts.pop("paper-pareto") == 80
    assert set(counts.values()) == {1}
    wanted = {"paper-bert", "paper-bert-het", "paper-gpt2xl", "paper-gpt2xl-het", "paper-t5", "paper-t5-het"}
    assert wanted | {"seed-345m", "seed-1.5b"} <= set(counts)
    models = load_models(MODEL_PRESETS)
    assert set(models) == {"gpt2-xl", "gpt2-345m", "bert-large", "t5"}
    assert {name: len(model.units) for name, model in models.items()} == {
        **{"gpt2-xl": 50, "gpt2-345m": 26},
        **{"bert-large": 26, "t5": 50},
    }


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    path = cluster_file(
        tmp_path, f"L4: {{nodes: 2, {GPU}, inter_latency: 2e-5}}, V100: {{nodes: 0-1, {GPU}}}"
    )
    few, more = load_clusters(str(path))
    assert (few.gpu_count, more.gpu_count) == (8, 12)
    assert few.gpus[0].inter_latency == 2e-5 and few.gpus[0].inter_bandwidth == 40e9
    assert more.price_per_hour == 9
    assert load_clusters(f"{path}:mine") == [few, more]


@pytest.mark.parametrize(
    ("gpus", "size", "sentence"),
    [
        (f"L4: {{nodes: 0, {GPU}}}", "4", "no nodes: give at least 1"),
        (f"L4: {{nodes: -1, {GPU}}}", "4", "nodes: -1: give a count such as 4"),
        (f"L4: {{nodes: 1.5, {GPU}}}", "4", "nodes: 1.5: give a count"),
        (f"L4: {{nodes: 5-2, {GPU}}}", "4", "nodes: '5-2': give a count"),
        (f"L4: {{nodes: 1, {GPU}}}", "0", "gpus_per_node is 0: give at least 1"),
        (f"L4: {{nodes: 1, {GPU}}}", "four", "gpus_per_node: 'four': give a whole number"),
        (f"L4: {{nodes: 1, {GPU}, bandwith: 3}}", "4", "unknown setting 'bandwith'"),
        ("L4: {nodes: 1, memory_gib: 3}", "4", "lacks price_per_hour"),
        (f"L4: {{nodes: 1, {GPU}, speed: 0}}", "4", "speed: 0: give a number above 0"),
        (f"L4: {{nodes: 1, {GPU}, speed: fast}}", "4", "'fast' is no number"),
        (f"L4: {{nodes: 1, {GPU}, shared_bus: 3}}", "4", "shared_bus: 3: give true or false"),
        (f"L4: {{nodes: 1, {GPU.replace('20', '.nan')}}}", "4", "memory_gib: nan: give a number above 0"),
        ("", "4", "no GPU types under 'gpus'"),
    ],
)
def test_a_cluster_that_makes_no_sense(tmp_path: Path, gpus: str, size: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_clusters(str(cluster_file(tmp_path, gpus, size)))
    assert sentence in str(caught.value) and "cluster mine" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clusters: [1, 2]", "no entries under the key 'clusters'"),
        ("clusters: {a: 3}", "expected settings as 'name: value', got 3"),
        ("clusters: {a: {base: b}}", "base 'b' is no entry"),
        ("clusters: {a: {}, b: {}}", "holds 2 clusters: choose one"),
        ("clusters: {a: {gpus_per_node: 1", "not YAML"),
        ("", "no entries under the key"),
    ],
)
def test_a_cluster_file_that_is_none(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        load_clusters(str(path))
    assert sentence in str(caught.value)


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no cluster 'paper-brt'.*did you mean 'paper-bert'"):
        load_clusters("paper-brt")
    with pytest.raises(PlanError, match="nothing.yaml: can't be read"):
        load_clusters(str(tmp_path / "nothing.yaml"))
    with pytest.raises(PlanError, match="no model 'gtp2-xl': did you mean 'gpt2-xl'"):
        find_model("gtp2-xl")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PlanError, match="not a text file"):
        load_clusters(str(tmp_path / "binary.yaml"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("layers: 0", "layers is 0: give at least 1"),
        ("heads: 3", "can't be split over 3 heads: give heads 2"),
        ("layers: many", "layers: 'many': give a whole number"),
        ("encoder_layers: 4", "encoder_layers is 4: give 1 to 3"),
        ("size: 3", "unknown setting 'size'"),
    ],
)
def test_a_model_that_makes_no_sense(tmp_path: Path, changes: str, sentence: str) -> None:
    values = dict(hidden=64, seq=32, layers=4, vocab=100, heads=4, global_batch=8)
    key, value = changes.split(": ")
    text = ", ".join(f"{k}: {v}" for k, v in {**values, key: value}.items())
    path = tmp_path / "models.yaml"
    path.write_text(f"models: {{mine: {{{text}}}}}", encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        find_model("mine", str(path))
    assert sentence in str(caught.value) and "mine" in str(caught.value)


def test_a_model_without_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {mine: {hidden: 64, seq: 32}}", encoding="utf-8")
    with pytest.raises(PlanError, match="mine lacks layers, vocab, heads, global_batch"):
        find_model("mine", str(path))


def test_launch_layers_leave_out_what_is_no_layer() -> None:
    assert find_model("gpt2-xl").launch_layers((1, 11, 8, 8, 8, 8, 5, 1)) == (0, 11, 8, 8, 8, 8, 5, 0)
    assert find_model("t5").launch_layers((13, 12, 12, 13)) == (12, 12, 11, 13)


def small_costs(**changes: object) -> CostFile:
    model = cases.model()
    entry = Entry("small", "X", 1, 2, (1.0,) * 6, (3.0,) * 6)
    values = {"format": 1, "source": "made", "models": {"small": model}, "entries": (entry,)}
    return CostFile(**{**values, **changes})


def test_a_cost_file_comes_back_as_written(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", small_costs())
    assert read_costs(tmp_path / "costs.json") == small_costs()


def test_measured_backwards_and_micro_batches_are_used() -> None:
    costs = Costs([small_costs()], cases.model())
    at_two, at_four = (costs.of(cases.gpu("X"), 1, mbs) for mbs in (2, 4))
    assert at_two.forward == (1.0,) * 6 and at_two.backward == (3.0,) * 6
    assert at_four.forward == (2.0,) * 6 and at_four.backward == (6.0,) * 6


def test_a_faster_gpu_like_another() -> None:
    costs = Costs([small_costs()], cases.model())
    found = costs.of(cases.gpu("New", like="X", speed=2.0), 1, 2)
    assert found.forward == (0.5,) * 6 and found.notes == ("New: costs of X divided by 2",)
    with pytest.raises(PlanError, match="no costs of small on GPU 'New'.*give New 'like' .X. and 'speed'"):
        costs.of(cases.gpu("New"), 1, 2)


def test_gpt2_345m_takes_its_costs_from_bert_and_says_so() -> None:
    model, bert = find_model("gpt2-345m"), find_model("bert-large")
    (cluster,) = load_clusters("paper-bert")
    mine, theirs = (Costs([read_costs()], m).of(cluster.gpus[0], 1, b) for m, b in ((model, 4), (bert, 8)))
    work = (24 * 1024 + 4 * 1024) / (24 * 1024 + 4 * 512)
    assert mine.forward[1] == pytest.approx(theirs.forward[1] * work)
    assert mine.forward[25] == pytest.approx(theirs.forward[25] * 50257 / 30522)
    assert any("by ratio of work" in note for note in mine.notes) and not theirs.notes


def test_exact_grows_first_and_last_unit_with_the_micro_batch_where_hpdc24_does_not() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl-het")
    a100 = cluster.gpus[0]
    exact, tool = (Costs([read_costs()], model, hpdc24=flag) for flag in (False, True))
    assert exact.of(a100, 1, 4).forward[0] == pytest.approx(4 * exact.of(a100, 1, 1).forward[0])
    assert tool.of(a100, 1, 4).forward[0] == tool.of(a100, 1, 1).forward[0]
    assert tool.of(a100, 1, 4).forward[1] == pytest.approx(3 * exact.of(a100, 1, 4).forward[1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 9}, "costs of format 9: this program reads format 1"),
        ({"models": {}}, "an entry is for model 'small', whose shape is not under 'models'"),
        ({"entries": [{"model": "small", "gpu": "X", "tp": 1, "mbs": 1, "forward": [1]}]}, "give 6 costs"),
        ({"entries": [{"model": "small", "gpu": "X", "tp": 0, "mbs": 1, "forward": [1] * 6}]}, "at least 1"),
        ({"entries": 3}, "not a cost file"),
    ],
)
def test_a_cost_file_that_makes_no_sense(tmp_path: Path, change: dict, sentence: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, small_costs())
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **change}), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_costs(path)
    assert sentence in str(caught.value) and str(path) in str(caught.value)


def test_a_model_nobody_measured() -> None:
    model = Model("other", 64, 32, 4, 1000, 4, 8)
    with pytest.raises(PlanError, match="no costs for model other: set 'costs'"):
        Costs([read_costs()], model)
