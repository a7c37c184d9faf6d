"""Files that users write: what they may say, and one sentence for each way to be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import fasop
from fasop.errors import PlanError
from fasop.exact.communication import INTER_LOSS, Communication
from fasop.exact.memory import parameters
from fasop.inputs.clusters import PRESETS as CLUSTER_PRESETS
from fasop.inputs.clusters import Link, load_clusters
from fasop.inputs.costs import CostFile, Entry, read_costs, write_costs
from fasop.inputs.models import PRESETS as MODEL_PRESETS
from fasop.inputs.models import find_model
from fasop.inputs.read_files import read_yaml
from tests.fasop import fasop_cases as cases

ENTRY = {"model": "small", "gpu": "X", "tp": 1, "mbs": 1, "forward": [1] * 6}
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
    models = {name: find_model(name) for name in read_yaml(MODEL_PRESETS, "models")}
    assert {"gpt2-xl", "gpt2-345m", "bert-large", "t5", "llama3-8b", "mixtral-8x7b"} <= set(models)
    units = {name: len(models[name].units) for name in ("gpt2-xl", "gpt2-345m", "bert-large", "t5")}
    assert units == {"gpt2-xl": 50, "gpt2-345m": 26, "bert-large": 26, "t5": 50}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("qwen2.5-7b", 7.62), ("qwen2.5-72b", 72.7),
     ("mixtral-8x7b", 46.7), ("mixtral-8x22b", 140.6), ("gpt-22b", 22), ("gpt-175b", 175), ("gpt2-xl", 1.56)],
)  # fmt: skip
def test_presets_have_as_many_parameters_as_their_makers_state(name: str, billions: float) -> None:
    model = find_model(name)
    held = parameters(model, 1)[0].sum()
    if model.tied:
        held -= model.hidden * model.vocab
    assert held / 1e9 == pytest.approx(billions, rel=0.02)


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
        (f"L4: {{nodes: 1, {GPU}, speed: 0}}", "4", "speed: 0: expected times as fast between"),
        (f"L4: {{nodes: 1, {GPU}, speed: fast}}", "4", "speed: 'fast': expected times as fast"),
        (f"L4: {{nodes: 1, {GPU}, shared_bus: 3}}", "4", "shared_bus: 3: give true or false"),
        (
            f"L4: {{nodes: 1, {GPU.replace('20', '.nan')}}}",
            "4",
            "nan: expected GiB of one GPU between",
        ),
        ("", "4", "no GPU types under 'gpus'"),
        # Values in another unit than is expected gave absurd plans without a word.
        (f"L4: {{nodes: 1, {GPU.replace('20', '81559')}}}", "4", "81559: expected GiB of one GPU"),
        (f"L4: {{nodes: 1, {GPU.replace('40e9', '200')}}}", "4", "200 Gbit/s is 200e9, 25 GB/s is 200e9"),
        (f"L4: {{nodes: 1, {GPU}, inter_latency: 10}}", "4", "expected seconds per message between 0 and 1"),
        (f"L4: {{nodes: 1, {GPU}, gpus_per_node: 0}}", "0", "gpus_per_node is 0: give at least 1"),
        (f"L4: {{nodes: 2, {GPU}, hosts: [a]}}", "4", "1 hosts for 2 nodes"),
        (f"L4: {{nodes: 2, {GPU}, hosts: [a, a]}}", "4", "give a list of different names"),
        # An empty value became the name "None".
        (f"L4: {{nodes: 2, {GPU}, queue: }}", "4", "queue: None: give a name"),
        (f"L4: {{nodes: 2, {GPU}, gres: [a]}}", "4", "gres: ['a']: give a name"),
        (f"L4: {{nodes: 1, {GPU}, hosts: [null]}}", "4", "hosts: [None]: give a list of names"),
        (f"L4: {{nodes: 1000000000, {GPU}}}", "4", "nodes: 1000000000: give at most 10000"),
        (f"L4: {{nodes: 2, {GPU}, reserved_gib: 20}}", "4", "leaves nothing of memory_gib 20"),
    ],
)
def test_a_cluster_with_a_bad_setting(tmp_path: Path, gpus: str, size: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        load_clusters(str(cluster_file(tmp_path, gpus, size)))
    assert sentence in str(caught.value) and "cluster mine" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clusters: [1, 2]", "no entries under the key 'clusters'"),
        ("clusters: {a: 3}", "expected settings as 'name: value', got 3"),
        ("clusters: {a: {gpus: 3}}", "cluster a: no GPU types under 'gpus'"),
        (
            "clusters: {a: {gpus: {L4: [1]}}}",
            "cluster a: GPU L4: expected settings as 'name: value', got [1]",
        ),
        ("clusters: {a: {}, b: {}}", "holds 2 clusters: choose one"),
        ("clusters: {a: {gpus_per_node: 1", "not YAML"),
        ("clusters: {a: {gpus: {[1]: 4}}}", "a key is a list or a mapping: give a name"),
        ("clusters: {a: {day: 2024-99-99}}", "not YAML that can be read: month must be in 1..12"),
        ("", "no entries under the key"),
        ("clusters: {a: {gpus: {}, gpus: {}}}", "the key 'gpus' is there twice"),
        ("clusters:\n  a: {}\n  a: {}", "line 3: the key 'a' is there twice"),
    ],
)
def test_a_cluster_file_that_can_not_be_read(tmp_path: Path, text: str, sentence: str) -> None:
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
        ("layers: 0", "layers: 0: give a whole number from 1 to 500"),
        ("heads: 3", "can't be split over 3 heads: give heads 2"),
        ("layers: many", "layers: 'many': give a whole number"),
        ("encoder_layers: 4", "encoder_layers is 4: give 1 to 3"),
        ("size: 3", "unknown setting 'size'"),
        ("d_kv: -64", "d_kv: -64: give a whole number from 1"),
        ("hidden: ", "hidden: None: give a whole number"),
        ("top_k: ", "top_k: None: give a whole number"),
        ("ffn: 1", "ffn is 1: give more than the 4 heads"),
        ("layers: 1000000", "layers: 1000000: give a whole number from 1 to 500"),
        ("global_batch: 10000000", "global_batch: 10000000: give a whole number from 1 to 100000"),
        ("kv_heads: 3", "kv_heads is 3: give a divisor of the 4 heads"),
        ("gated: 1", "gated: 1: give true or false"),
        ("hidden: 64000000", "from 1 to 10000000"),
    ],
)
def test_a_model_with_a_bad_setting(tmp_path: Path, changes: str, sentence: str) -> None:
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
    with pytest.raises(PlanError, match="mine: lacks layers, vocab, heads, global_batch"):
        find_model("mine", str(path))


def test_launch_layers_leave_out_what_is_no_layer() -> None:
    (plan,) = fasop.plan("gpt2-xl", "paper-gpt2xl", pp=8, top=1)
    assert replace(plan, partition=(1, 11, 8, 8, 8, 8, 5, 1)).layers == (0, 11, 8, 8, 8, 8, 5, 0)
    of_t5 = replace(plan, model=find_model("t5"), pp=4, partition=(13, 12, 12, 13))
    assert of_t5.layers == (12, 12, 11, 13)


def small_costs(**changes: object) -> CostFile:
    model = cases.model()
    entry = Entry("small", "X", 1, 2, (1.0,) * 6, (3.0,) * 6)
    values = {"format": 1, "source": "made", "models": {"small": model}, "entries": (entry,)}
    return CostFile(**{**values, **changes})


def test_a_cost_file_comes_back_as_written(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", small_costs())
    assert read_costs(tmp_path / "costs.json") == small_costs()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 9}, "costs of format 9: this program reads format 1"),
        ({"models": {}}, "an entry is of model 'small', which isn't under 'models'"),
        ({"entries": [{**ENTRY, "forward": [1]}]}, "1 costs for 6 units"),
        ({"entries": [{**ENTRY, "tp": 0}]}, "entries[0].tp: expected `int` >= 1"),
        ({"entries": [{**ENTRY, "forward": [2e4] * 6}]}, "entries[0].forward[0]: expected `float` <= 10000"),
        ({"entries": 3}, "entries: expected `array`, got `int`"),
        ({"entries": [{**ENTRY, "forward": [0] * 6}]}, "a layer takes 0 s: give what was measured"),
        ({"entries": [{**ENTRY, "backward": [1e9] * 6}]}, "entries[0].backward[0]: expected `float` <= 1"),
        ({"entries": [{**ENTRY, "update": [1e300] * 6}]}, "entries[0].update[0]: expected `float` <= 1"),
        ({"growth": {"small": {"X": {"T": [[1, [0], 0]]}}}}, "expected `float` > 0"),
        ({"growth": {"small": {"X": {"T": [[1, [-2.0], 0]]}}}}, "expected `float` > 0"),
    ],
)
def test_a_cost_file_with_a_bad_setting(tmp_path: Path, change: dict, sentence: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, small_costs())
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **change}), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_costs(path)
    assert sentence in str(caught.value) and str(path) in str(caught.value)


def test_one_bad_model_does_not_block_the_others_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    good = "{hidden: 64, seq: 32, layers: 4, vocab: 100, heads: 4, global_batch: 8}"
    path.write_text(f"models: {{broken: {{hidden: 0}}, mine: {good}}}", encoding="utf-8")
    assert find_model("mine", str(path)).hidden == 64
    with pytest.raises(PlanError, match="model broken: lacks seq"):
        find_model("broken", str(path))


UNEVEN = """
clusters:
  mixed:
    gpus_per_node: 8
    gpus:
      H100: {nodes: 4, memory_gib: 76, price_per_hour: 98, inter_bandwidth: 3200e9,
             intra_bandwidth: 3600e9}
      A100: {nodes: 2, gpus_per_node: 4, memory_gib: 39, price_per_hour: 16, inter_bandwidth: 400e9,
             intra_bandwidth: 1840e9, hosts: [left, right]}
    links:
      - {between: [A100, H100], bandwidth: 5e9, latency: 0.03}
"""


def test_nodes_of_several_sizes_and_links(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(UNEVEN, encoding="utf-8")
    (cluster,) = load_clusters(str(path))
    assert cluster.gpu_count == 40 and [cluster.size(gpu) for gpu in cluster.gpus] == [8, 4]
    links = Communication(cluster)
    assert links.between("H100", "A100", 1e6) == (5e9, 0.03)
    assert links.between("H100", "H100", 1e6)[0] == pytest.approx(3200e9 / INTER_LOSS)
    # Where a link has rates by the size, they follow its logarithm.
    curve = Link(("A100", "A100"), 300e9, points=((1e6, 100e9), (16e6, 300e9)))
    links = Communication(replace(cluster, links=(curve,)))
    assert [links.between("A100", "A100", size)[0] for size in (1e5, 4e6, 1e9)] == [100e9, 200e9, 300e9]
    assert cluster.hosts()[:2] == [("node0", "H100"), ("node1", "H100")]
    assert cluster.assigned(("A100", "H100", "A100")) == ["left", "node0", "right"]


@pytest.mark.parametrize(
    ("link", "sentence"),
    [
        ("{between: [L4], bandwidth: 1e9}", "between: ['L4']: give two names"),
        ("{between: [L4, V9], bandwidth: 1e9}", "no GPU type 'V9'"),
        ("{between: [L4, L4]}", "lacks bandwidth"),
        ("{between: [L4, L4], bandwidth: 5}", "expected bit/s between"),
    ],
)
def test_a_link_with_a_bad_setting(tmp_path: Path, link: str, sentence: str) -> None:
    path = tmp_path / "cluster.yaml"
    text = f"clusters: {{mine: {{gpus_per_node: 4, gpus: {{L4: {{nodes: 2, {GPU}}}}}, links: [{link}]}}}}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        load_clusters(str(path))
    assert sentence in str(caught.value) and "link 0" in str(caught.value)
