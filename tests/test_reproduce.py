"""The papers' comparisons: equal budgets, parts trained once, and a table that says what it is."""

import json

import pytest

from atoll.cli.main import main
from atoll.errors import InputError
from atoll.evaluation.evaluate import Sampling
from atoll.evaluation.reproduce import Recipe
from atoll.evaluation.studies import COUNTS, NAMES, get_study, parts_of
from atoll.evaluation.tables import render_results

RECIPE = """
batch = 16
lr = 1e-3
steps = 4
save_every = 4
eval_every = 4
sample_every = 0
[expert]
model = "xs"
[router]
model = "xs"
[study]
num_experts = 2
seeds = 2
num = 8
features = ["simple"]
varied = 2
each = 2
steps = 2
ddpm_weighting = "min-snr"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_the_same_budget(name, recipe):
    """However many experts, one step of all of them has as many pictures as one of the monolith."""
    found = Recipe.read(recipe)
    for row in get_study(name, 4, Sampling()).rows:
        settings = [found.settings_of(part, seed=7) for part in row.model.experts]
        assert all(one.steps == 4 and one.seed == 7 for one in settings)
        if len({part.cluster for part in row.model.experts}) == len(row.model.experts) and name != "table3":
            assert sum(one.batch for one in settings) == 16
        assert (row.model.router is None) == (len(row.model.experts) == 1 or name == "table3")


def test_parts_are_shared():
    studies = [get_study(name, 4, Sampling()) for name in ("table1", "table4", "router", "table3")]
    parts = parts_of(studies)
    assert len(parts) == len(set(parts))
    # monolith, 4 FM, 2 DDPM, an FM expert on the cosine schedule, two routers
    assert len(parts) == 10


def test_kinds_become_settings(recipe):
    found = Recipe.read(recipe)
    by_kind = {part.kind: found.settings_of(part, 0) for part in get_study("table3", 2, Sampling()).parts}
    assert (by_kind["ddpm"].objective, by_kind["ddpm"].weighting) == ("ddpm", "min-snr")
    assert (by_kind["fm-cosine"].objective, by_kind["fm-cosine"].schedule) == ("fm", "cosine")
    assert by_kind["fm"].schedule is None
    assert by_kind["fm"].weighting is None
    routers = {part.kind: found.settings_of(part, 0) for part in get_study("router", 2, Sampling()).parts}
    assert routers["router"].text
    assert not routers["blind-router"].text


def test_what_is_wrong_with_a_recipe(recipe, tmp_path):
    with pytest.raises(InputError, match="comparison 'table9'"):
        get_study("table9", 4, Sampling())
    with pytest.raises(InputError, match="a batch of 16 cannot be shared by 3 experts"):
        Recipe.read(recipe).settings_of(get_study("table1", 3, Sampling()).parts[1], 0)
    assert max(COUNTS) <= 16
    recipe.write_text(RECIPE.replace("varied", "vary"))
    with pytest.raises(InputError, match="vary"):
        Recipe.read(recipe)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_data_to_tables(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["prepare", "shapes", "--num", "120", "--out", "data"])
    command = ["reproduce", "table3", "table4", "--data", "data", "--recipe", str(recipe), "--out", "out"]
    main(command)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["studies"]) == {"table3", "table4"}
    rows = {row["name"]: row for row in results["studies"]["table4"]["rows"]}
    assert list(rows) == ["real pictures", "2 FM", "1 DDPM, 1 FM"]
    assert len(set(rows["2 FM"]["hash"])) == 2  # a model for each seed of training
    assert len(rows["2 FM"]["figures"]["frechet/simple"]["values"]) == 2
    native, exact = ("DDPM, native", "DDPM to FM, exact")
    of = {row["name"]: row["figures"]["frechet/simple"]["value"] for row in results["studies"]["table3"]["rows"][1:]}
    assert of[native] != of[exact]
    text = (tmp_path / "out" / "results.md").read_text()
    assert text == render_results(results)
    assert "not Inception FID" in text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    capsys.readouterr()
    main(command)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")} == before
    assert (tmp_path / "out" / "results.md").read_text() == text
    recipe.write_text(RECIPE.replace("lr = 1e-3", "lr = 2e-3"))
    with pytest.raises(SystemExit):
        main(command)
    assert "begun with another recipe" in capsys.readouterr().err
