"""The papers' comparisons: equal budgets, parts trained once, and a labelled table."""

import functools
import inspect
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.main import VERBS, main
from atoll.errors import InputError
from atoll.experiments.graph import parts_of
from atoll.experiments.reproduce import reproduce
from atoll.experiments.studies import Lab, Recipe, get_studies, studies_of
from atoll.experiments.tables import render_results

PAPER = "reproduce_paper"
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


def lab_of(recipe, num, seed=0):
    found = Recipe.read(recipe)
    return Lab(Path(), replace(found, plan=replace(found.plan, num_experts=num)), seed)


NAMES = tuple(studies_of(lab_of("reproduce", 4)))


def parts_in(names, lab):
    return parts_of([row.model for study in get_studies(names, lab).values() for row in study.rows])


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_the_same_budget(name, recipe):
    """With any number of experts, one step of all of them has as many images as one of the monolith."""
    study = get_studies([name], lab_of(recipe, 4, seed=7))[name]
    for row in study.rows:
        experts = [part for part in row.model.parts if "router" not in part.folder.name]
        settings = [part.settings for part in experts]
        steps = {part.settings.steps for part in experts}
        assert steps == {4} or (name == "flops" and steps <= {1, 2})
        assert all(one.seed == 7 for one in settings)
        has_router = len(experts) < len(row.model.parts)
        if len({part.cluster for part in experts}) == len(experts) and has_router:
            assert sum(one.batch for one in settings) == 16
        assert has_router == (len(experts) > 1 and study.cluster is None)
        if study.cluster is not None:  # experts of one cluster, each with its share
            assert {one.batch for one in settings} == {4}


def test_parts_are_shared(recipe):
    parts = parts_in(("table1", "table4-scratch", "router", "table3-scratch"), lab_of(recipe, 4))
    # monolith, 4 FM, 2 DDPM, an FM expert on the cosine schedule, two routers
    assert len({part.folder for part in parts}) == len(parts) == 10


def test_kinds_become_settings(recipe):
    lab = lab_of(recipe, 2)
    ddpm, cosine, fm = (lab.part(kind, 2, 0).settings for kind in ("ddpm", "fm-cosine", "fm"))
    assert (ddpm.objective, ddpm.weighting) == ("ddpm", "min-snr")
    assert (cosine.objective, cosine.schedule) == ("fm", "cosine")
    assert fm.schedule is None
    assert fm.weighting is None
    assert lab.part("router", 2).settings.text
    assert not lab.part("blind-router", 2).settings.text


def test_what_is_wrong_with_a_recipe(recipe, tmp_path):
    with pytest.raises(InputError, match="comparison 'table9'"):
        get_studies(["table9"], lab_of(recipe, 4))
    with pytest.raises(InputError, match="a batch of 16 cannot be shared by 3 experts"):
        get_studies(["table1"], lab_of(recipe, 3))
    recipe.write_text(RECIPE.replace("varied", "vary"))
    with pytest.raises(InputError, match="vary"):
        Recipe.read(recipe)


def test_the_tables():
    """The best is bold if it leads by more than the deviations, and the papers' figures are shown beside it."""

    def row(name, distance, error, flops, **more):
        figures = {
            "frechet/simple": {"value": distance, "error": error},
            "flops_an_image": {"value": flops, "error": 1e3},
            "recall/simple": {"value": 0.5, "error": None},  # not among those shown
        }
        return {"name": name, "figures": figures, **more}

    rows = [
        row("real images", 0.5, None, 0),
        row("monolith", 4.9, 0.2, 1e8, hash=["a"], hddm="29.64"),
        row("top-1", 4.3, 0.1, 1.001e8, hash=["b"], hddm="30.60"),
    ]
    study = {"title": "Ensembles", "claim": "Better.", "cluster": 3, "rows": rows}
    results = {
        "data": {"name": "emoji", "pictures": 3000},
        "seeds": 3,
        "reference": {"split": "held_out", "pictures": "original images"},
        "recipe": {"plan": {"num_experts": 4, "num": 500}, "expert": {"steps": 10, "batch": 16}},
        "training_flops": {"monolith": 1e12, "router": 1e9},
        "studies": {"table1": study},
    }
    text = render_results(results)
    assert "| top-1 | **4.30 ± 0.10** | 100 M | 30.60 |" in text
    assert "| monolith | 4.90 ± 0.20 | 100 M | 29.64 |" in text
    assert "are of cluster 3 alone" in text
    assert "`frechet/simple`: Frechet distance (colour and edge features; not Inception FID); lower is better" in text
    assert "recall" not in text
    assert "**" not in render_results(json.loads(json.dumps(results).replace("4.3", "4.8")))


def test_first_weights(recipe):
    """The DiT that initialises the experts is shared by all seeds, and trained before them."""
    parts = parts_in(["init"], lab_of(recipe, 4))
    names = [part.folder.name for part in parts]
    own = {f"kmeans_4_{kind}_0{start}" for kind in ("fm", "ddpm") for start in ("", "_from_pretrained")}
    assert set(names) == {"dit", *own}
    expert, dit = (parts[names.index(name)] for name in ("kmeans_4_fm_0_from_pretrained", "dit"))
    assert expert.init == dit == lab_of(recipe, 4, seed=3).pretrained
    assert (dit.settings.model, dit.settings.objective, dit.settings.schedule) == ("xs:zero:blind", "ddpm", "ddpm")
    assert expert.verb[-2:] == ["--init", "pretrained/converted"]
    assert parts.index(dit) < parts.index(expert)


class TestPaperScale:
    def test_every_command_of_the_page_is_one(self, monkeypatch):
        """Each is parsed by the command line itself, up to the point where work would begin."""
        page = Path(__file__).parent.parent / "docs" / "hardware.md"
        found = []
        for verb, command in list(VERBS.items()):
            monkeypatch.setitem(VERBS, verb, _listen(command, verb, found))
        lines = page.read_text(encoding="utf-8").splitlines()
        commands = [shlex.split(line, comments=True) for line in lines if line.startswith("    atoll ")]
        for command in commands:
            main(command[1:])
        assert len(found) == len(commands)
        folders = [Path(kept["out"]) for _, kept in found if "out" in kept]
        made = {str(path) for out in folders for path in (out, out.parent)}  # or the folder of all experts
        for verb, kept in found:  # every input was made by a command above
            used = {"assemble": kept.get("experts", ()), "evaluate": kept.get("folders", ())[:-1]}.get(verb, ())
            assert {str(path) for path in used} <= made
        trained = [kept for verb, kept in found if verb == "train"]
        assert {kept["settings"].model for kept in trained} == {"b/2:zero"}
        assert {kept["settings"].batch for kept in trained} == {32, 256}

    @pytest.mark.slow
    def test_dry_run(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        main(["reproduce", "table1", "table3", "table4-scratch", "--recipe", PAPER, "--dry-run"])
        lines = capsys.readouterr().out.splitlines()
        assert not list(tmp_path.iterdir())
        _, batch, steps, parameters, *_, flops, _ = _line_of("kmeans_8_fm_7 ", lines)
        assert (batch, steps, parameters) == ("32", "400000", "606.0M")
        # 6 FLOPs a parameter and token would be 256 * 6 * 606e6; attention and the second forward pass come on top.
        least = 256 * 6 * 606e6 * 32 * 400_000
        assert 0.8 * least < float(flops) < 3 * least
        assert any(line.startswith("model monolith-fm: kmeans_8_fm_all") for line in lines)
        how = "threshold:0.1, euler, 50 steps, guidance 7.5"
        assert f"  threshold 0.1: kmeans-0ddpm-8fm-blind, {how}" in lines


def _line_of(name, lines):
    return next(line.split() for line in lines if line.startswith(name))


def _listen(command, verb, found):
    """Returns a command with the same flags that only records how it was called."""

    @functools.wraps(command)
    def told(*args, **kwargs):
        found.append((verb, inspect.signature(command).bind(*args, **kwargs).arguments))

    return told


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ('features = "simple"', "features must be a list of names"),
        ("features = [1]", "features must be a list of names"),
        ("metrics = [1]", "metrics must be a list of names"),
        ('metrics = ["frechett"]', "unknown metric 'frechett'"),
        ("counts = [1]", "counts must be a list of numbers from 2"),
        ("counts = 4", "counts must be a list of numbers"),
        ("times = [1.5]", "times must be a list of numbers from 0.0 to 1.0"),
        ("times = [nan]", "times must be a list of numbers"),
        ('features = ["simpel"]', "unknown features 'simpel'"),
        ('split = "heldout"', "unknown split 'heldout'"),
        ("reference = 1", "num_reference must be"),
        ('routing = "top9"', "unknown routing 'top9'"),
        ("guidance = nan", "the guidance scale must be a finite number"),
        ('ddpm_weighting = "foo"', "unknown weighting 'foo'"),
        ("num_experts = 3", "a batch of 16 cannot be shared by 3 experts"),
        ("[data]\nsize = 4", "size must be from 8 to"),
        ('[expert]\nweighting = "min-snr"', "weighting in .* is chosen by each comparison: leave it out"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_is_done(wrong, words, tmp_path):
    """Nothing is written, so that the recipe can be fixed."""
    key = wrong.partition(" =")[0]
    lines = [line for line in RECIPE.splitlines() if not line.startswith(f"{key} =")]
    head, table = wrong.split("\n") if wrong.startswith("[") else ("[study]", wrong)
    if head in lines:
        lines.insert(lines.index(head) + 1, table)
    else:
        lines += [head, table]
    path = tmp_path / "wrong.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=words):
        reproduce(["table4"], "shapes", tmp_path / "out", Recipe.read(path), progress=False)
    assert not (tmp_path / "out").exists()


def test_no_data(recipe, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for more, words in ((["--data", str(empty)], "one of fashion-mnist"), ([], "there is no data to work with")):
        with pytest.raises(SystemExit):
            main(["reproduce", "table1", *more, "--recipe", str(recipe), "--out", str(tmp_path / "out")])
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_data_to_tables(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe.write_text(RECIPE + '[data]\nnum = 120\nholdout = 0.3\n[pretrain]\ndata = "digits"\nsteps = 4\nnum = 60\n')
    command = ["reproduce", "table3", "table4", "init", "--data", "shapes", "--recipe", str(recipe), "--out", "out"]
    main(command)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["studies"]) == {"table3", "table4", "init"}
    assert results["data"]["pictures"] == 120
    begun = json.loads((tmp_path / "out/seed_0/parts/kmeans_2_fm_0_from_pretrained/run.json").read_text())
    assert begun["init"]["init"]["source"] == "dit.safetensors"
    assert results["reference"] == {"split": "held_out", "pictures": "original images"}
    rows = {row["name"]: row for row in results["studies"]["table4"]["rows"]}
    assert {"real images", "2 FM", "2 DDPM, 0 FM, the paper's conversion", "2 DDPM, 0 FM, calibrated"} <= set(rows)
    assert rows["2 FM"]["figures"]["training_flops"]["value"] > 0
    assert len(set(rows["2 FM"]["hash"])) == 2  # a model for each seed of training
    assert len(rows["2 FM"]["figures"]["frechet/simple"]["values"]) == 2
    native, exact = ("DDPM, native: ancestral, x0 clipped", "DDPM to FM, exact")
    of = {row["name"]: row["figures"]["frechet/simple"]["value"] for row in results["studies"]["table3"]["rows"][1:]}
    assert of[native] != of[exact]
    text = (tmp_path / "out" / "results.md").read_text()
    assert text == render_results(results)
    assert "not Inception FID" in text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    pictures = tmp_path / "out" / "evaluation" / "pictures"
    pictures.rename(kept := pictures.with_name("kept"))  # what was measured is not measured again
    capsys.readouterr()
    main(command)  # nothing is left to do
    assert not pictures.exists()
    kept.rename(pictures)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")} == before
    assert (tmp_path / "out" / "results.md").read_text() == text
    recipe.write_text(recipe.read_text().replace("num = 8", "num = 6"))  # affects evaluation, not training
    main([*command, "--seeds", "1"])
    for name in ("table3", "table4", "init"):
        assert (tmp_path / "out" / f"{name}.png").exists()
        assert (tmp_path / "out" / f"{name}_samples.png").exists()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([word.replace("shapes", "digits") for word in command])
    assert "begun with other settings or other data" in capsys.readouterr().err
    partitioned = tmp_path / "out" / "data" / "kmeans_2"  # whose rows lie in clusters, is data as well
    shutil.copytree(partitioned, tmp_path / "mine")
    other = ["reproduce", "table4", "--data", "mine", "--recipe", str(recipe), "--seeds", "1", "--out", "other"]
    main(other)
    assert json.loads((tmp_path / "other" / "results.json").read_text())["data"]["pictures"] == 120
    capsys.readouterr()
    recipe.write_text(recipe.read_text().replace("lr = 1e-3", "lr = 2e-3"))
    with pytest.raises(SystemExit):
        main(command)
    assert "begun with other settings" in capsys.readouterr().err
