"""Parts trained separately become one folder, or an error says which of them does not fit."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from atoll.cards import ExpertCard, ModelIndex
from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.errors import InputError
from atoll.networks.expert import Expert
from atoll.partition.partition import partition
from atoll.sampling import assemble as module
from atoll.sampling.assemble import assemble, copy_model, find_model
from atoll.training import expert as expert_module
from atoll.training import router as router_module
from atoll.training.expert import train_expert
from atoll.training.router import make_centroid_router, train_router
from atoll.training.settings import ExpertSettings, RouterSettings

KINDS = ("fm", "ddpm", "fm")
QUICK = ExpertSettings(model="xs/1", steps=12, batch=16, save_every=12, eval_every=12, sample_every=0, lr=2e-3)
ROUTER = RouterSettings(model="xs/1", steps=12, batch=16, save_every=12, eval_every=12, lr=2e-3)


@cache
def parts(root: Path) -> tuple[Path, Path]:
    """Returns a data set of 3 clusters, with three experts, a monolith, and a router of each kind trained on it."""
    with pytest.MonkeyPatch.context() as patch:
        return _parts(root / "model-parts" / "avatars", root / "model-parts" / "run", patch)


def _parts(data: Path, run: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    prepare(Source("avatars", num=120, size=32), data, PrepareSettings(size=32, codec="pca:8x12", holdout=0.2),
            0, progress=False)  # fmt: skip
    partition(data, 3, cap=1.3, progress=False)
    for judge in (expert_module, router_module):
        patch.setattr(judge, "EVALUATED_AT_THE_END", 256)  # their quality does not matter here
    for k, kind in enumerate(KINDS):
        train_expert(data, k, replace(QUICK, objective=kind), run / f"expert_{k}", progress=False)
    train_router(data, ROUTER, run / "router", progress=False)
    make_centroid_router(data, ROUTER, run / "centroids")
    train_expert(data, None, replace(QUICK, steps=2), run / "monolith", progress=False)
    return data, run


@pytest.fixture
def data(tmp_path_factory) -> Path:
    return parts(tmp_path_factory.getbasetemp())[0]


@pytest.fixture
def run(tmp_path_factory) -> Path:
    return parts(tmp_path_factory.getbasetemp())[1]


@pytest.fixture
def mine(run, tmp_path) -> Path:
    """Returns a copy to damage."""
    return Path(shutil.copytree(run, tmp_path / "mine"))


def edit(folder: Path, *keys: str, value: object) -> None:
    """Changes a nested value of a config.json."""
    about = json.loads((folder / "config.json").read_text())
    place = about
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (folder / "config.json").write_text(json.dumps(about))


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class TestWhole:
    def test_the_folder(self, data, run, tmp_path):
        index = assemble([run], None, tmp_path / "model", data)
        parts = {f"expert_{k}/{name}" for k in range(3)
                 for name in ("config.json", "model.safetensors", "calibration.safetensors")}  # fmt: skip
        parts |= {f"{part}/{name}" for part in ("router", "vae", "text_encoder")
                  for name in ("config.json", "model.safetensors")}  # fmt: skip
        assert files_in(tmp_path / "model") == parts | {"model_index.json", "README.md"}
        assert index == ModelIndex.read(tmp_path / "model")
        assert index.objectives == KINDS
        assert set(index.files) == parts
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
        text = (tmp_path / "model" / "model_index.json").read_text()
        assert json.loads(text)["_class_name"] == "AtollPipeline"
        assert str(run) not in text  # no local path
        index.verify(tmp_path / "model")

    def test_its_page_for_the_hub(self, data, mine, tmp_path):
        edit(mine / "expert_0", "license", value="CC-BY-4.0 | <b>`x`\x1b[31m")
        index = assemble([mine], None, tmp_path / "model", data)
        page = (tmp_path / "model" / "README.md").read_text()
        head, _, text = page.removeprefix("---\n").partition("---\n")
        about = {key: json.loads(value) for key, value in (line.split(": ", 1) for line in head.splitlines())}
        assert about["library_name"] == "atoll"
        assert about["pipeline_tag"] == "text-to-image"
        assert about["datasets"] == ["avatars"]
        assert "| expert\\_1 | ddpm | avatars | 1 |" in text
        assert index.hash in text
        assert "\x1b" not in page
        assert "<b>" not in text.replace("\\<b\\>", "")
        assert str(mine) not in page

    def test_a_page_that_was_edited_is_kept(self, data, run, tmp_path):
        assemble([run], None, tmp_path / "model", data)
        assemble([run], None, tmp_path / "model", data)
        with (tmp_path / "model" / "README.md").open("a") as page:
            page.write("mine")
        with pytest.raises(InputError, match=r"holds README.md, which is not of the model"):
            assemble([run], None, tmp_path / "model", data)

    def test_order_does_not_matter(self, data, run, tmp_path):
        one = assemble([run], None, tmp_path / "a", data)
        folders = [run / "expert_2", run / "expert_0", run / "expert_1"]
        other = assemble(folders, run / "router", tmp_path / "b", data)
        assert one.hash == other.hash
        assert one == other

    def test_a_model_taken_apart_brings_its_own_codec(self, data, run, tmp_path):
        one = assemble([run], None, tmp_path / "a", data)
        assert assemble([tmp_path / "a"], None, tmp_path / "b").hash == one.hash

    def test_another_weight_is_another_hash(self, data, mine, run, tmp_path):
        path = mine / "expert_1" / "model.safetensors"
        expert = Expert.load(path.parent)
        expert.network.out.weight.data += 1
        path.unlink()  # it may be a hard link
        expert.save(path.parent)
        assert assemble([run], None, tmp_path / "a", data).hash != assemble([mine], None, tmp_path / "b", data).hash

    def test_weights_are_linked_and_configs_copied(self, data, run, tmp_path):
        assemble([run], None, tmp_path / "model", data)
        for name, linked in (("model.safetensors", True), ("config.json", False)):
            assert (tmp_path / "model" / "expert_0" / name).samefile(run / "expert_0" / name) == linked

    def test_where_links_cannot_be_made_files_are_copied(self, data, run, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError("another disk")

        one = assemble([run], None, tmp_path / "a", data)
        monkeypatch.setattr(module.os, "link", refuse)
        other = assemble([run], None, tmp_path / "b", data)
        assert one == other
        assert not (tmp_path / "b" / "expert_0" / "model.safetensors").samefile(run / "expert_0" / "model.safetensors")

    def test_a_monolith_needs_no_router(self, data, run, tmp_path):
        index = assemble([run / "monolith"], None, tmp_path / "model", data)
        assert (index.num_experts, index.router, index.experts[0].cluster) == (1, None, None)

    def test_one_expert_alone(self, data, run, tmp_path):
        index = assemble([run / "expert_1"], None, tmp_path / "model", data)
        assert index.objectives == ("ddpm",)
        assert index.experts[0].cluster == 1

    def test_a_router_from_centroids(self, data, run, tmp_path):
        index = assemble([run], run / "centroids", tmp_path / "model", data)
        assert index.router.model == "CentroidRouter"

    def test_licences(self, data, mine, tmp_path):
        edit(mine / "expert_0", "license", value="CC-BY-4.0")
        index = assemble([mine], None, tmp_path / "model", data)
        assert index.license == "CC-BY-4.0 (expert_0); unknown (expert_1, expert_2)"

    def test_no_licence(self, data, mine, tmp_path):
        for k in range(3):
            edit(mine / f"expert_{k}", "license", value=None)
        assert assemble([mine], None, tmp_path / "model", data).license == "unknown"

    def test_nothing_about_the_data(self, data, mine, tmp_path):
        edit(mine / "monolith", "data", value=None)
        assert assemble([mine / "monolith"], None, tmp_path / "model", data).experts[0].cluster is None

    def test_the_command(self, data, run, tmp_path, capsys):
        main(["assemble", str(run), "--data", str(data), "--out", str(tmp_path / "model")])
        told = capsys.readouterr().out
        assert "3 experts (0 fm, 1 ddpm, 2 fm)" in told
        assert ModelIndex.read(tmp_path / "model").hash in told


class TestMissing:
    def test_it_is_named(self, data, run, tmp_path):
        with pytest.raises(InputError, match="no expert of cluster 1: give one, or --allow-missing"):
            assemble([run / "expert_0", run / "expert_2"], run / "router", tmp_path / "model", data)
        with pytest.raises(InputError, match="no expert of cluster 0, 1"):
            assemble([run / "expert_2"], run / "router", tmp_path / "model", data)

    def test_it_may_be(self, data, run, tmp_path):
        folders = [run / "expert_0", run / "expert_2"]
        index = assemble(folders, run / "router", tmp_path / "model", data, allow_missing=True)
        assert index.objectives == ("fm", None, "fm")
        assert not (tmp_path / "model" / "expert_1").exists()
        assert ModelIndex.read(tmp_path / "model") == index

    def test_unfinished_training(self, data, mine, tmp_path):
        (mine / "expert_1" / "config.json").unlink()
        with pytest.raises(InputError, match="expert_1 has no config.json: train it to its end"):
            assemble([mine], None, tmp_path / "model", data)
        index = assemble([mine], None, tmp_path / "model", data, allow_missing=True)
        assert index.objectives == ("fm", None, "fm")


class TestRefused:
    def refused(self, sentence: str, tmp_path: Path, *arguments: object, **options: object) -> None:
        with pytest.raises(InputError, match=sentence):
            assemble(*arguments[:2], tmp_path / "model", *arguments[2:], **options)
        assert not (tmp_path / "model").exists()
        assert not list(tmp_path.glob(".*"))

    def test_two_of_one_cluster(self, data, run, tmp_path):
        twin = shutil.copytree(run / "expert_0", tmp_path / "twin")
        self.refused("expert_0 and .*twin are experts of the same cluster, 0", tmp_path, [run, twin], None, data)

    def test_a_cluster_the_router_does_not_know(self, data, mine, tmp_path):
        edit(mine / "expert_2", "data", "cluster", value=7)
        sentence = "expert_2 is of cluster 7, but the router .* knows the clusters 0 to 2"
        self.refused("there is no expert of cluster 2, 3, 4, 5, 6", tmp_path, [mine], None, data)
        edit(mine / "expert_2", "calibration", value=None)  # no statistics to join by
        self.refused(sentence, tmp_path, [mine], None, data)

    def test_a_monolith_among_experts(self, data, mine, tmp_path):
        edit(mine / "expert_2", "data", "cluster", value=None)
        self.refused("expert_2 is of all of the data", tmp_path, [mine], None, data)

    @pytest.mark.parametrize("part", ["expert_1", "router"])
    @pytest.mark.parametrize(
        ("keys", "sentence"),
        [
            (
                ("latent_space", "codec", "fingerprint"),
                r"does not fit: its codec \(pca:8x12, float32, 00000000\) is not that of",
            ),
            (("text_encoder", "fingerprint"), r"does not fit: its text encoder \(words:64x32, float32, 00000000\)"),
        ],
    )
    def test_other_latents_or_texts(self, data, mine, tmp_path, part, keys, sentence):
        edit(mine / part, *keys, value="0" * 64)
        self.refused(f"{part} {sentence}", tmp_path, [mine], None, data)

    @pytest.mark.parametrize(
        ("part", "keys", "value", "sentence"),
        [
            ("expert_1", ("data",), [1], "its 'data' must be a table of keys and values, but is .1."),
            ("expert_1", ("data", "cluster"), "1", "its 'data.cluster' must be a whole number, but is '1'"),
            ("expert_1", ("latent_space", "codec"), "x", "its 'latent_space.codec' must be a table of keys and values"),
            ("expert_1", ("license",), 5, "its 'license' must be a text, but is 5"),
            ("router", ("latent_space", "codec"), None, "its 'latent_space.codec' must be a table"),
            ("router", ("latent_space", "shape"), 4, "its 'latent_space.shape' must be a list, but is 4"),
            ("router", ("latent_space",), [], "its 'latent_space' must be a table"),
            ("router", ("text_encoder",), "x", "its 'text_encoder' must be a table"),
            ("router", ("temperature",), -1, "its 'temperature' must be greater than 0, but is -1"),
        ],
    )
    def test_damaged_cards(self, data, mine, tmp_path, part, keys, value, sentence):
        edit(mine / part, *keys, value=value)
        self.refused(f"{part}/config.json is damaged, {sentence}", tmp_path, [mine], None, data)

    def test_another_size(self, data, mine, tmp_path, monkeypatch):
        """The same codec, but images twice as wide."""
        read = ExpertCard.read

        def wider(folder: Path) -> ExpertCard:
            card = read(folder)
            space = card.latent_space.model_copy(update={"shape": [12, 8, 8]})
            return card.model_copy(update={"latent_space": space}) if folder.name == "expert_1" else card

        monkeypatch.setattr(ExpertCard, "read", wider)
        sentence = r"expert_1 does not fit: it takes latents \[12, 8, 8\], not \[12, 4, 4\]"
        self.refused(sentence, tmp_path, [mine], None, data)

    def test_data_of_another_codec(self, run, tmp_path):
        other = tmp_path / "other"
        prepare(Source("shapes", num=60, size=32), other, PrepareSettings(size=32, codec="pca:8x12"), 0,
                progress=False)  # fmt: skip
        self.refused("expert_0 does not fit: its codec .* is not that of .*other", tmp_path, [run], None, other)

    def test_data_without_a_codec(self, run, tmp_path):
        (tmp_path / "bare").mkdir()
        self.refused("a codec and a text encoder, and .*bare has not both", tmp_path, [run], None, tmp_path / "bare")
        self.refused("needs a codec and a text encoder: give --data", tmp_path, [run], None)

    def test_no_router(self, data, run, tmp_path):
        folders = [run / f"expert_{k}" for k in range(3)]
        self.refused("3 experts need a router: give --router", tmp_path, folders, None, data)
        self.refused("nowhere.*atoll train-router", tmp_path, folders, tmp_path / "nowhere", data)
        self.refused("describes a 'DiT', not one of Router", tmp_path, folders, run / "expert_0", data)

    def test_no_experts(self, data, run, tmp_path):
        self.refused("there are no experts", tmp_path, [], None, data)
        self.refused("nowhere holds no trained expert", tmp_path, [tmp_path / "nowhere"], None, data)
        self.refused("holds no trained expert", tmp_path, [data], None, data)
        self.refused("describes a 'Router', not a DiT", tmp_path, [run / "router"], None, data)

    def test_truncated_weights(self, data, mine, tmp_path):
        path = mine / "expert_1" / "model.safetensors"
        os.truncate(path, path.stat().st_size // 2)
        self.refused("expert_1.*is truncated", tmp_path, [mine], None, data)

    def test_a_full_disk_leaves_nothing(self, data, run, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module.shutil, "copyfileobj", full)
        self.refused("cannot write .*model .No space left on device", tmp_path, [run], None, data)

    def test_the_command_says_it_in_a_sentence(self, run, tmp_path, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["assemble", str(run), "--out", str(tmp_path / "model")])
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith("atoll: the model needs a codec and a text encoder")


class TestReplaced:
    def test_an_older_model_is(self, data, run, tmp_path):
        assemble([run / "expert_0"], None, tmp_path / "model", data)
        index = assemble([run], None, tmp_path / "model", data)
        assert ModelIndex.read(tmp_path / "model") == index
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_an_empty_folder_is(self, data, run, tmp_path):
        (tmp_path / "model").mkdir()
        assemble([run], None, tmp_path / "model", data)

    def test_what_is_no_model_is_not(self, data, mine, tmp_path):
        before = files_in(mine)
        with pytest.raises(InputError, match="is not a model that can be read"):
            assemble([mine], None, mine, data)
        assert files_in(mine) == before

    def test_what_else_lies_in_a_model_is_not(self, data, run, tmp_path):
        assemble([run], None, tmp_path / "model", data)
        (tmp_path / "model" / "samples").mkdir()
        with pytest.raises(InputError, match="holds samples, which is not of the model"):
            assemble([run], None, tmp_path / "model", data)
        assert (tmp_path / "model" / "samples").exists()

    @pytest.mark.parametrize("name", ["expert_0/notes.txt", "router/state/x", "expert_1/.hidden"])
    def test_what_lies_in_its_parts_is_not(self, data, run, tmp_path, name):
        model = tmp_path / "model"
        index = assemble([run], None, model, data)
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("mine")
        beyond = Path(name).relative_to(Path(name).parts[0]).parts[0]
        for again in (lambda: assemble([run], None, model, data), lambda: copy_model(model, index, model)):
            with pytest.raises(InputError, match=rf"model holds {Path(name).parts[0]}/{beyond}, which is not of"):
                again()
        assert (model / name).read_text() == "mine"

    def test_a_model_that_cannot_be_read_is_not(self, data, run, tmp_path):
        assemble([run], None, tmp_path / "model", data)
        (tmp_path / "model" / "model_index.json").write_text("{}")
        with pytest.raises(InputError, match="is not a model that can be read: choose another folder"):
            assemble([run], None, tmp_path / "model", data)

    def test_a_copy_of_half_a_part_is_not_made(self, data, run, tmp_path):
        index = assemble([run], None, tmp_path / "model", data)
        (tmp_path / "model" / "expert_1" / "calibration.safetensors").unlink()
        with pytest.raises(InputError, match="expert_1/calibration.safetensors is missing"):
            copy_model(tmp_path / "model", index, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    def test_a_file_is_not(self, data, run, tmp_path):
        (tmp_path / "model").write_text("mine")
        with pytest.raises(InputError, match="is not a model that can be read"):
            assemble([run], None, tmp_path / "model", data)

    def test_a_failure_keeps_the_older_model(self, data, run, tmp_path, monkeypatch):
        index = assemble([run / "expert_0"], None, tmp_path / "model", data)

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "file_digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            assemble([run], None, tmp_path / "model", data)
        assert ModelIndex.read(tmp_path / "model") == index
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_after_kill_9_the_same_command_makes_it(self, data, run, tmp_path):
        """Killed with half of the files written, it leaves nothing visible, and nothing after the next run."""
        program = """
import os, signal, sys
from atoll.sampling import assemble as module
place, seen = module._place, []
def dying(source, target):
    seen.append(target)
    if len(seen) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    place(source, target)
module._place = dying
module.assemble([sys.argv[1]], None, sys.argv[3], sys.argv[2])
"""
        out = tmp_path / "model"
        killed = subprocess.run([sys.executable, "-c", program, run, data, out], check=False, capture_output=True)
        assert killed.returncode == -9, killed.stderr
        assert not out.exists()
        index = assemble([run], None, out, data)
        index.verify(out)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


CODEC = {"spec": "pca:8x12", "dtype": "float32", "fingerprint": "0", "channels": 12, "factor": 8}


def entry(cluster: int, **changes: object) -> dict[str, object]:
    return {"folder": f"expert_{cluster}", "cluster": cluster, "objective": {"name": "fm"}, **changes}


class TestIndex:
    @pytest.fixture
    def model(self, data, run, tmp_path) -> Path:
        assemble([run], None, tmp_path / "model", data)
        return tmp_path / "model"

    def altered(self, model: Path, **changes: object) -> None:
        path = model / "model_index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"format": 2}, "has format 2"),
            ({"_class_name": "StableDiffusionPipeline"}, "does not describe an AtollPipeline"),
            ({"surprise": 1}, "unknown key"),
            ({"num_experts": 5}, "num_experts is 5, but 3 experts are listed"),
            ({"hash": "0"}, "was altered"),
            ({"files": {"../../etc/passwd": "0"}}, "must be named as FOLDER/NAME"),
            ({"experts": [{"folder": "../x"}, None, None]}, "must be a plain name"),
            ({"experts": [None, None, {"folder": "expert_2"}]}, "it lacks 'experts.2.cluster'"),
            ({"latent_space": {}}, "it lacks 'latent_space.shape'"),
            ({"latent_space": [1]}, "its 'latent_space' must be a table"),
            ({"latent_space": {"codec": None, "shape": [12, 4, 4]}}, "its 'latent_space.codec' must be a table"),
            ({"latent_space": {"codec": {}, "shape": 4}}, "its 'latent_space.shape' must be a list, but is 4"),
            (
                {"latent_space": {"codec": {}, "shape": [1, "a", 2]}},
                "its 'latent_space.shape.1' must be a whole number",
            ),
            ({"latent_space": {"codec": CODEC, "shape": [12, 4, 4, 4]}}, "its 'latent_space.shape' must"),
            ({"latent_space": {"codec": CODEC, "shape": [12, 4096, 4096]}}, "gives images of 32768 pixels a side"),
            ({"text_encoder": None}, "its 'text_encoder' must be a table of keys and values, but is None"),
            ({"text_encoder": "x"}, "its 'text_encoder' must be a table"),
            ({"files": ["a/b"]}, "its 'files' must be a table"),
            ({"files": {"a/b": 3}}, "its 'files.a/b' must be a text, but is 3"),
            ({"experts": 3}, "its 'experts' must be a list, but is 3"),
            ({"experts": ["x", None, None]}, "its 'experts.0' must be a table of keys and values, but is 'x'"),
            ({"experts": [entry(0, objective="fm"), None, None]}, "its 'experts.0.objective' must be a table"),
            ({"experts": [entry(0), entry(2), None]}, "has the expert of cluster 2 in the place of 1"),
            ({"experts": [entry(k, folder="a") for k in range(3)]}, "names 'a' for 3 parts"),
            ({"router": "router"}, "its 'router' must be a table of keys and values, but is 'router'"),
            ({"license": "mine"}, "was altered"),
        ],
    )
    def test_what_is_wrong_with_it_is_named(self, model, changes, sentence):
        self.altered(model, **changes)
        with pytest.raises(InputError, match=sentence):
            ModelIndex.read(model)

    def test_verify_names_the_file(self, model):
        index = ModelIndex.read(model)
        path = model / "expert_1" / "config.json"
        path.write_text(path.read_text() + " ")
        with pytest.raises(InputError, match="expert_1/config.json is not the file"):
            index.verify(model)

    def test_an_expert_is_no_model(self, run):
        with pytest.raises(InputError, match="expert_0 is a part, not a model: run `atoll assemble"):
            ModelIndex.read(run / "expert_0")

    def test_neither_a_folder_nor_a_hub_id(self, tmp_path):
        with pytest.raises(InputError, match="is not a folder: give one that is there, or a hub id"):
            find_model("nowhere")
        with pytest.raises(InputError, match="no folder some/where, and the hub did not give it either"):
            find_model("some/where")
