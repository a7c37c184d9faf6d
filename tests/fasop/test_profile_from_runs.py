"""``profile --from-runs``: layer costs learned from the steps of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fasop.__main__ import main
from fasop.errors import PlanError
from fasop.exact.estimate import estimate
from fasop.exact.training_runs import expressible, read_runs
from fasop.inputs.costs import CostFile, read_costs
from fasop.plans.layout import Described, read_layouts

LAYOUT = (
    "  {}: {{model: llama3-8b, cluster: 8xH100, tp: {}, dp: {}, mbs: {}, layers: {}, global_batch: {}, {}}}\n"
)
# tp, dp, micro-batch, layers, global batch
SHAPES = [(2, 4, 1, "32", 64), (4, 2, 1, "32", 64), (4, 1, 1, "16-16", 64), (2, 2, 1, "16-16", 32)]
SHAPES += [(2, 4, 2, "32", 64), (2, 2, 2, "16-16", 64), (4, 2, 2, "32", 32), (2, 1, 1, "8-8-8-8", 32)]


def layouts(path: Path, seconds: list[float], more: str = "recompute: none") -> Path:
    lines = [
        LAYOUT.format(f"run{at}", *shape, more + (f", measured: {each}" if each else ""))
        for at, (shape, each) in enumerate(zip(SHAPES, seconds, strict=False))
    ]
    path.write_text("layouts:\n" + "".join(lines))
    return path


def described(path: Path) -> list[Described]:
    return [each for each in read_layouts(str(path), []) if isinstance(each, Described)]


def learned(path: Path) -> CostFile:
    output = path.with_suffix(".json")
    assert main(["profile", "--from-runs", str(path), "--output", str(output)]) == 0
    return read_costs(output)


def of_layers(costs: CostFile, tp: int, mbs: int) -> float:
    return next(each.forward[1] for each in costs.entries if (each.tp, each.mbs) == (tp, mbs))


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> CostFile:
    """Costs of the layers by which steps are estimated without measurements."""
    path = layouts(tmp_path_factory.mktemp("runs") / "a.yaml", [1.0] * len(SHAPES))
    steps = [estimate(each.layout, [], each.options).step for each in described(path)]
    return learned(layouts(path, steps))


def test_layers_slower_than_computed_are_found(
    computed: CostFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of tp 2 take 1.3 times as long: learned from the steps alone, and used for plans."""

    def slower(tp: int) -> float:
        return 1.3 if tp == 2 else 1.0

    truth = replace(
        computed,
        entries=tuple(
            replace(each, forward=scaled(each.forward, by), backward=scaled(each.backward or (), by))
            for each in computed.entries
            for by in (slower(each.tp),)
        ),
    )
    path = layouts(tmp_path / "runs.yaml", [1.0] * len(SHAPES))
    steps = [estimate(each.layout, [truth], each.options).step for each in described(path)]
    costs = learned(layouts(path, steps))
    said = capsys.readouterr().out
    assert of_layers(costs, 2, 1) / of_layers(truth, 2, 1) == pytest.approx(1, abs=0.05)
    assert of_layers(costs, 4, 1) / of_layers(truth, 4, 1) == pytest.approx(1, abs=0.05)
    # A degree without runs follows its neighbour in part.
    assert 1.03 < of_layers(costs, 1, 1) / of_layers(computed, 1, 1) < 1.25
    assert "tp 2, mbs 1: layers × 1." in said and "from 3 runs" in said
    assert "tp 1, mbs 1" in said and "by its neighbours" in said
    off = said.split("off on average: ")[1]
    before, fit, without = (float(part.split("%")[0].split()[-1]) for part in off.split(", "))
    assert fit < 2 and without < before / 2
    file = str(path.with_suffix(".json"))
    assert main(["evaluate", str(path), "--costs", file]) == 0
    errors = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("run")]
    assert len(errors) == len(SHAPES) and all(abs(float(each.rstrip("%"))) < 4 for each in errors)
    arguments = ["plan", "--model", "llama3-8b", "--cluster", "8xH100", "--tp", "2", "--global-batch", "64"]
    assert main([*arguments, "--costs", file]) == 0
    # With the recipe of the runs: nothing says that costs were measured some other way.
    out = capsys.readouterr().out
    assert "flash attention" in out and "costs were measured with" not in out


def scaled(values: tuple[float, ...], by: float) -> tuple[float, ...]:
    return (values[0], *(each * by for each in values[1:-1]), values[-1])


def test_one_run_says_less_than_many(computed: CostFile, tmp_path: Path) -> None:
    path = layouts(tmp_path / "runs.yaml", [1.0] * len(SHAPES))
    steps = [1.5 * estimate(each.layout, [], each.options).step for each in described(path)]
    many = of_layers(learned(layouts(path, steps)), 2, 1)
    one = of_layers(learned(layouts(tmp_path / "one.yaml", steps[:1])), 2, 1)
    assert of_layers(computed, 2, 1) < one < many


def test_runs_that_cannot_be_taken_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(path: Path, said: str) -> None:
        assert main(["profile", "--from-runs", str(path), "--output", str(tmp_path / "no.json")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "no.json").exists()

    fails(layouts(tmp_path / "a.yaml", [0.0]), "give the seconds of its step")
    mixed = layouts(tmp_path / "b.yaml", [5.0, 5.0])
    text = mixed.read_text()
    mixed.write_text(text.replace("recompute: none", "attention: unfused", 1))
    fails(mixed, "attention isn't the first run's")
    mixed.write_text(text.replace("recompute: none", "seq: 4096", 1))
    fails(mixed, "another size or sequence length")
    experts = "tp: 1, dp: 8, mbs: 1, layers: 32, ep: 8, measured: 3"
    mixed.write_text(f"layouts: {{it: {{model: mixtral-8x7b, cluster: 8xH100, {experts}}}}}")
    fails(mixed, "costs of experts that ranks share")
    with pytest.raises(SystemExit) as stopped:
        main(["profile", "--from-runs", str(mixed), "--model", "gpt2-xl"])
    assert stopped.value.code == 2


def test_layers_of_vtrain_are_for_its_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "vtrain.csv"
    head = "num_gpus,gbs,mbs,hidden,heads,layers,seq,tp,dp,pp,step_ms\n"
    path.write_text(f"{head}4,4,2,2048,16,24,1024,1,1,4,500\n4,4,2,4096,16,24,1024,1,1,4,500\n")
    (known, _), (wider, _) = expressible(read_runs(path))
    assert known.costs and "1040 steps of vtrain_single.csv" in known.assumed[0]
    assert not wider.costs and not wider.assumed
    assert {each.gpu for each in known.costs[0].entries} == {"A100-80GB"}
    assert set(known.costs[0].models) == {"gpt-1024", "gpt-2048"}


def test_a_file_of_models_without_names_is_refused(tmp_path: Path) -> None:
    """Each row was refused with an AttributeError's words."""
    (tmp_path / "models.yaml").write_text("- model_type: llama\n")
    head = "source,system,gpu,num_gpus,precision,model,task,gbs,mbs,seq,tp,pp,cp,vp,ep,step_s\n"
    (tmp_path / "rows.csv").write_text(
        head + "Megatron-Bridge,DGX,H100,8,BF16,Llama3 8B,,128,1,8192,1,1,2,1,1,9\n"
    )
    with pytest.raises(PlanError, match="models.yaml: give the settings of models under their names"):
        read_runs(tmp_path / "rows.csv")
