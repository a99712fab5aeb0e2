"""Experts and routers as a user trains them: by the command, on data from disk, killed and restarted."""

import functools
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import atoll
from atoll.cli.main import VERBS, main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.diffusion.schedules import LINEAR
from atoll.errors import InputError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.expert import Expert
from atoll.networks.router import Router
from atoll.partition.partition import partition
from atoll.training import router as router_module
from atoll.training.expert import train_expert
from atoll.training.metrics_log import read_metrics
from atoll.training.router import calibration_error, fit_temperature, train_router
from atoll.training.settings import ExpertSettings, RouterSettings, read_recipe, recipe_names
from test_loop import figures

QUICK = ExpertSettings(
    model="xs/1", steps=30, batch=16, log_every=5, save_every=6, eval_every=15, sample_every=0, lr=2e-3
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Returns 300 avatars of 16 x 16 pixels in 3 clusters."""
    folder = tmp_path_factory.mktemp("data") / "avatars"
    prepare(Source("avatars", num=300, size=32), folder, PrepareSettings(size=32, codec="pca:8x12", holdout=0.1),
            0, progress=False)  # fmt: skip
    partition(folder, 3, cap=1.3, progress=False)
    return folder


def copy_of(data: Path, out: Path) -> Path:
    """Returns a copy without checksums, so that its shards may be changed."""
    shutil.copytree(data, out, ignore=shutil.ignore_patterns("SHA256SUMS"))
    return out


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "atoll.cli.main", *map(str, arguments)]


def alone(*arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def flags(**changes: object) -> list[str]:
    chosen = {"model": "xs/1", "steps": 120, "batch": 16, "log-every": 5, "save-every": 7, "eval-every": 40,
              "sample-every": 60, **changes}  # fmt: skip
    return [part for name, value in chosen.items() for part in (f"--{name}", str(value))]


class TestKilled:
    @pytest.mark.bits
    @pytest.mark.timeout(600)  # seven processes, one after the other: half a minute on an idle machine
    @pytest.mark.parametrize(
        "kind", ["fm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddpm", "muon", "router"))]
    )
    def test_it_ends_as_if_nothing_had_happened(self, data, tmp_path, kind):
        """Killed at random moments, it gives the same weights, EMA weights and metrics, bit for bit."""
        verb = ["train", data, "--cluster", 1, "--objective", kind]
        if kind == "router":
            verb = ["train-router", data]
        elif kind == "muon":
            verb = ["train", data, "--cluster", 1, "--optimizer", "muon"]
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        changes = {"router": {"sample-every": 0}, "muon": {"model": "xs/1:local"}}.get(kind, {})
        subprocess.run(command(*verb, "--out", whole, *flags(**changes)), check=True, capture_output=True)
        rng = random.Random(kind)
        kills = 0
        while kills < (3 if kind == "fm" else 5):
            process = alone(*verb, "--out", cut, *flags(**changes))
            deadline = time.monotonic() + 300
            steps = len(read_metrics(cut))
            while len(read_metrics(cut)) <= steps and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)  # until it trains: startup takes longer than training
            time.sleep(rng.random() * 0.25)
            process.kill()
            killed = process.wait() == -signal.SIGKILL
            process.communicate()
            kills += 1
            if not killed:
                break
        done = subprocess.run(command(*verb, "--out", cut, *flags(**changes)), check=True, capture_output=True)
        assert done.returncode == 0
        assert kills >= 2
        last = "state/000000120.safetensors"
        one, other = load_file(whole / last), load_file(cut / last)
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
        assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
        assert figures(whole) == figures(cut)
        kept = json.loads((whole / "config.json").read_text())
        assert kept == json.loads((cut / "config.json").read_text())
        if kind != "router":
            pictures = sorted(p.name for p in (whole / "samples").iterdir())
            assert pictures == ["000000060.png", "000000120.png"]
            for name in pictures:
                assert (whole / "samples" / name).read_bytes() == (cut / "samples" / name).read_bytes()

    def test_sigterm_saves_and_exits_cleanly(self, data, tmp_path):
        process = alone("train", data, "--cluster", 0, "--out", tmp_path / "a", *flags(steps=100000))
        while len(read_metrics(tmp_path / "a")) < 2:
            time.sleep(0.02)
            assert process.poll() is None
        process.terminate()
        out, _ = process.communicate()
        assert process.returncode == 0, out
        assert "stopped at step" in out
        assert "Traceback" not in out

    @pytest.mark.slow
    def test_a_second_process_is_refused_while_the_first_lives(self, data, tmp_path):
        first = alone("train", data, "--cluster", 0, "--out", tmp_path / "a", *flags(steps=100000))
        try:
            while len(read_metrics(tmp_path / "a")) < 1:
                time.sleep(0.02)
                assert first.poll() is None
            with pytest.raises(InputError, match="another process is at work on"):
                train_expert(data, 0, QUICK, tmp_path / "a", progress=False)
        finally:
            first.kill()
            first.communicate()


WATCHED = """
import os, socket, sys
allowed, forbidden = sys.argv[1], sys.argv[2].split(",")
def hook(event, args):
    if event.startswith("socket."):
        raise RuntimeError(f"isolation broken: {event} {args[1:]}")
    if event in ("open", "os.listdir", "os.scandir") and args and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        if any(path.startswith(place) for place in forbidden):
            raise RuntimeError(f"isolation broken: {event} {path}")
sys.addaudithook(hook)
from atoll.cli.main import main
main(sys.argv[3:])
"""


class TestIsolation:
    """An expert needs only its own cluster, the card and the encoders; it opens no socket or other cluster's file."""

    @pytest.mark.bits
    def test_others_may_be_absent(self, data, tmp_path):
        there = tmp_path / "only-one"
        there.mkdir()
        for name in ("dataset.json", "vae", "text_encoder"):
            source = data / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, there / name)
        shutil.copytree(data / "clusters" / "02", there / "clusters" / "02")
        run = subprocess.run(
            [sys.executable, "-c", WATCHED, "-", str(data), "train", str(there), "--cluster", "2", "--out",
             str(tmp_path / "far"), *flags(steps=20, **{"sample-every": 20})],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        here = tmp_path / "near"
        main(["train", str(data), "--cluster", "2", "--out", str(here), *flags(steps=20, **{"sample-every": 20})])
        assert (tmp_path / "far" / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()

    @pytest.mark.slow
    def test_others_may_be_poisoned(self, data, tmp_path):
        poisoned = copy_of(data, tmp_path / "poisoned")
        for place in ("00", "02"):
            for path in (poisoned / "clusters" / place).iterdir():
                path.write_bytes(b"\x80\x04poison")
        forbidden = ",".join(str(poisoned / "clusters" / place) for place in ("00", "02"))
        run = subprocess.run(
            [sys.executable, "-c", WATCHED, "-", forbidden, "train", str(poisoned), "--cluster", "1", "--out",
             str(tmp_path / "a"), *flags(steps=20, **{"sample-every": 20})],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        main(["train", str(data), "--cluster", "1", "--out", str(tmp_path / "b"),
              *flags(steps=20, **{"sample-every": 20})])  # fmt: skip
        one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
        assert one == other

    @pytest.mark.slow
    def test_the_watch_would_have_noticed(self, data, tmp_path):
        """Runs the same check on a run that violates isolation."""
        forbidden = str(data / "clusters" / "00")
        for arguments in (["train", str(data), "--cluster", "0"], ["train", str(data), "--cluster", "all"]):
            run = subprocess.run(
                [sys.executable, "-c", WATCHED, "-", forbidden, *arguments, "--out", str(tmp_path / "a"), *flags()],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert run.returncode != 0
            assert "isolation broken" in run.stderr


SHAPES_BELOW = {"fm": 1.15, "ddpm": 0.32, "x0": 0.32, "v": 0.65}  # held out, after 150 steps; all begin at 1 or 2


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "shapes"
    prepare(Source("shapes", num=600, size=16), folder, PrepareSettings(size=16, holdout=0.1), 0, progress=False)
    return folder


class TestLearning:
    @pytest.mark.bits
    @pytest.mark.parametrize(
        "objective",
        [pytest.param(name, marks=pytest.mark.slow) if name != "fm" else name for name in SHAPES_BELOW],
    )
    def test_held_out_loss_falls(self, shapes, tmp_path, objective, report):
        settings = replace(
            QUICK, model="64x3/1", steps=150, batch=32, lr=3e-3, eval_every=150, save_every=150, objective=objective
        )
        losses = []
        for name in "ab":
            train_expert(shapes, None, settings, tmp_path / name, progress=False)
            expert = Expert.load(tmp_path / name)
            losses.append(expert.network.card["training"]["held_out"]["loss"])
        first = read_metrics(tmp_path / "a")[0]["loss"]
        report(f"held-out loss on shapes after 150 steps, {objective}: {losses[0]:.4f} (first {first:.3f})")
        assert losses[0] == losses[1]
        assert losses[0] < SHAPES_BELOW[objective]
        assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
            tmp_path / "b" / "model.safetensors"
        ).read_bytes()


class TestExpert:
    @pytest.fixture(scope="class")
    def expert(self, data, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("expert") / "e"
        train_expert(data, 1, replace(QUICK, objective="ddpm", sample_every=30), folder, progress=False)
        return folder

    def test_it_describes_itself(self, data, expert):
        found = json.loads((expert / "config.json").read_text())
        about = json.loads((data / "dataset.json").read_text())
        assert found["objective"]["prediction"] == "eps"
        assert found["objective"]["schedule"] == "cosine"
        assert found["latent_space"] == {"shape": about["latent_shape"], "codec": about["codec"]}
        assert found["text_encoder"] == about["text"]
        assert found["data"]["cluster"] == 1
        assert len(found["data"]["fingerprint"]) == 64
        assert found["license"] == about["license"]
        assert found["init"] is None
        assert found["training"]["settings"]["steps"] == 30
        assert found["training"]["samples"] == 480
        assert str(data) not in json.dumps(found)  # no local path
        assert str(expert) not in json.dumps(found)

    def test_it_loads_alone(self, expert, tmp_path):
        for name in ("config.json", "model.safetensors", "calibration.safetensors"):
            shutil.copy(expert / name, tmp_path / name)
        loaded = Expert.load(tmp_path)
        assert loaded.calibration is not None
        assert loaded.transfer().conversion == "calibrated"
        assert loaded.transfer("paper").conversion == "paper"

    def test_the_calibration_is_the_regression_it_says(self, data, expert):
        """For a network that outputs zero, x0_hat is x / alpha, and the best gain is known."""
        loaded = Expert.load(expert)
        gains = loaded.calibration.gain
        assert float(gains[0]) < 0.2  # pure noise: the cluster's mean is the best prediction
        assert float(gains[-1]) > 0.95
        dataset = Dataset.open(data, 1)
        train = dataset.column("split")[:] == 0
        mean = torch.from_numpy(dataset.column("latents")[:][train]).double().mean(0)
        torch.testing.assert_close(loaded.calibration.mean.double(), mean, rtol=1e-5, atol=1e-5)

    def test_a_missing_calibration_is_named(self, expert, tmp_path):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(expert / name, tmp_path / name)
        with pytest.raises(InputError, match=r"calibration.safetensors"):
            Expert.load(tmp_path)

    @pytest.mark.slow
    def test_it_begins_from_another(self, data, expert, tmp_path):
        train_expert(data, 0, replace(QUICK, steps=6), tmp_path / "b", init=expert, progress=False)
        found = json.loads((tmp_path / "b" / "config.json").read_text())
        assert found["init"]["name"] == "e"
        assert found["init"]["objective"]["prediction"] == "eps"
        first = load_file(tmp_path / "b" / "state" / "000000000.safetensors")
        assert torch.equal(first["weights.out.weight"], load_file(expert / "model.safetensors")["out.weight"])

    @pytest.mark.slow
    def test_all_of_the_data_make_the_monolith(self, data, tmp_path):
        train_expert(data, None, replace(QUICK, steps=6), tmp_path / "m", progress=False)
        assert Expert.load(tmp_path / "m").network.card["data"]["cluster"] is None


class TestRouter:
    @pytest.fixture(scope="class")
    def trained(self, data, tmp_path_factory):
        folder = tmp_path_factory.mktemp("router") / "r"
        settings = RouterSettings(model="xs/1", steps=150, batch=32, lr=2e-3, eval_every=150, save_every=150)
        return folder, train_router(data, settings, folder, progress=False)

    @pytest.mark.slow
    def test_it_tells_clusters_apart(self, trained, report):
        folder, told = trained
        router = Router.from_pretrained(folder)
        held_out = router.card["training"]["held_out"]
        report(f"router on 300 avatars after 150 steps: accuracy {held_out['accuracy']:.3f}, from centroids "
               f"{held_out['centroids']['accuracy']:.3f}")  # fmt: skip
        assert held_out["accuracy"] > 0.6
        assert len(held_out["accuracy_by_t"]) == 5
        assert router.card["temperature"] > 0
        assert held_out["loss"] <= held_out["loss_at_temperature_1"] + 0.05
        assert [line for line in told if "centroids" in line] == [told[-4]]  # the last lines are the router's own
        assert told[-3].startswith("router, trained: ")
        assert f"temperature {router.card['temperature']:.3f}" in told[-1]

    @pytest.mark.slow
    def test_blind(self, data, tmp_path):
        settings = RouterSettings(model="xs/1", steps=5, batch=16, text=False)
        train_router(data, settings, tmp_path / "r", progress=False)
        router = Router.from_pretrained(tmp_path / "r")
        assert router.config.text_dim is None
        assert router.card["text_encoder"] is None

    def test_from_centroids(self, data, tmp_path, capsys):
        main(["train-router", str(data), "--method", "centroids", "--out", str(tmp_path / "c")])
        assert "from centroids" in capsys.readouterr().out
        router = CentroidRouter.from_pretrained(tmp_path / "c")
        dataset = Dataset.open(data)
        train = dataset.column("split")[:] == 0
        latents = torch.from_numpy(dataset.column("latents")[:][train]).float()
        labels = torch.from_numpy(dataset.clusters()[train])
        shares = torch.bincount(labels).double() / len(labels)
        torch.testing.assert_close(router.shares.double(), shares, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(router.means[1], latents[labels == 1].mean(0), rtol=1e-3, atol=1e-4)
        within = (latents[labels == 1] - latents[labels == 1].mean(0)).pow(2).mean()
        torch.testing.assert_close(router.variances[1], within, rtol=1e-3, atol=1e-4)
        logits = router(latents[:64], torch.tensor(0.0))
        assert (logits.argmax(1) == labels[:64]).float().mean() > 0.5

    def test_the_clusters_of_rows_are_those_of_their_folders(self, data):
        dataset = Dataset.open(data)
        rows, clusters = dataset.column("row")[:], dataset.clusters()
        for k in range(3):
            assert set(Dataset.open(data, k).column("row")[:]) == set(rows[clusters == k])

    def test_temperature_against_scipy(self):
        scipy = pytest.importorskip("scipy.optimize")
        generator = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(500, 4, generator=generator, dtype=torch.float64)
        labels = torch.distributions.Categorical(logits=logits / 2.5).sample()

        def loss(inverse):
            return float(torch.nn.functional.cross_entropy(logits * inverse, labels))

        best = scipy.minimize_scalar(loss, bounds=(1e-3, 10), method="bounded", options={"xatol": 1e-10})
        assert fit_temperature(logits, labels) == pytest.approx(1 / best.x, rel=1e-4)

    def test_calibration_error_of_known_answers(self):
        """Two bins: confidence 1 and always right, and confidence 0.6 but right half of the time."""
        sure = torch.tensor([[30.0, 0.0]]).repeat(50, 1)
        unsure = torch.log(torch.tensor([[0.6, 0.4]])).repeat(50, 1)
        labels = torch.cat([torch.zeros(50), torch.arange(50) % 2]).long()
        found = calibration_error(torch.cat([sure, unsure]).double(), labels)
        assert found == pytest.approx(0.5 * 0.1, abs=1e-6)

    def test_noise_is_canonical(self, data):
        """At t = 1 the router gets pure noise: its loss does not depend on the image."""
        task = router_module.RouterTask(
            Dataset.open(data), RouterSettings(model="xs/1", text=False), torch.device("cpu")
        )
        t, eps = torch.ones(8), torch.randn(8, *task.view.shape)
        batch = task.read(np.arange(8), (t, eps, torch.zeros(8, dtype=torch.bool)))
        seen = []

        def network(x, t):
            seen.append(x)
            return torch.zeros(8, 3)

        task.loss(network, batch, batch)
        assert torch.equal(seen[0], eps)
        task.loss(network, batch._replace(t=0 * t), batch)
        assert torch.equal(seen[1], batch.latents.float())
        assert LINEAR.data_time == 0


class TestDistributed:
    @pytest.mark.slow
    def test_two_processes_are_one_with_twice_the_batch(self, data, tmp_path, report):
        """Run through accelerate on the CPU (gloo)."""
        pytest.importorskip("accelerate")
        common = ["train", str(data), "--cluster", "0", *flags(steps=25, **{"log-every": 1, "sample-every": 0})]
        one = subprocess.run(command(*common, "--out", tmp_path / "one"), capture_output=True, text=True, check=False)
        assert one.returncode == 0, one.stderr
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "atoll.cli.main"]
        two = subprocess.run(
            [*launch, *common, "--out", str(tmp_path / "two"), "--micro-batch", "3", "--device", "cpu"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert two.returncode == 0, two.stderr
        curves = [[line["loss"] for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("one", "two")]
        assert len(curves[0]) == len(curves[1]) == 25
        apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
        report(f"loss curve of two processes against one with twice the batch each: {apart:.1e} apart at most")
        assert apart < 1e-4
        assert Expert.load(tmp_path / "two").network.card["training"]["processes"] == 2
        assert Expert.load(tmp_path / "one").network.card["training"]["processes"] == 1


class TestCommand:
    def test_recipes_and_flags(self, data, tmp_path, capsys):
        recipe = tmp_path / "r.toml"
        recipe.write_text('seed = 5\n[expert]\nmodel = "xs/1"\nsteps = 4\nbatch = 8\nlr = 1e-3\n[router]\nsteps = 3\n')
        main(
            [
                "train",
                str(data),
                "--cluster",
                "0",
                "--recipe",
                str(recipe),
                "--lr",
                "5e-4",
                "--out",
                str(tmp_path / "a"),
            ]
        )
        settings = json.loads((tmp_path / "a" / "run.json").read_text())["settings"]
        assert (settings["seed"], settings["steps"], settings["lr"], settings["model"]) == (5, 4, 5e-4, "xs/1")

    def test_dry_run(self, data, tmp_path, capsys):
        main(["train", str(data), "--cluster", "0", "--model", "xs/1", "--dry-run", "--out", str(tmp_path / "a")])
        told = capsys.readouterr().out
        for word in ("parameters", "memory", "samples/s", "batch"):
            assert word in told
        assert not (tmp_path / "a").exists()

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--cluster", "7"], "has no cluster 7: there are 00, 01, 02"),
            (["--cluster", "x"], "--cluster must be a number or all"),
            (["--cluster", "0", "--objective", "fmm"], "unknown objective 'fmm': did you mean 'fm'"),
            (["--cluster", "0", "--model", "huge"], "unknown model size 'huge'"),
            (["--cluster", "0", "--steps", "0"], "steps must be from 1 to 1e+09, but is 0"),
            (["--cluster", "0", "--schedule", "lin"], "unknown schedule 'lin'"),
            (["--cluster", "0", "--model", "xs/3"], "input_size 4 is not a multiple of patch_size 3"),
            (["--cluster", "0", "--init", "nowhere"], "nowhere"),
            (["--cluster", "0", "--lr", "nan"], "lr must be from 1e-12 to 1e+12, but is nan"),
        ],
    )
    def test_mistakes_get_one_sentence(self, data, tmp_path, capsys, arguments, sentence):
        with pytest.raises(SystemExit) as stop:
            main(["train", str(data), *arguments, "--out", str(tmp_path / "a")])
        assert stop.value.code == 2
        told = capsys.readouterr().err
        assert sentence in told
        assert "Traceback" not in told

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            ("[expert]\nlearning_rate = 1\n", "unknown key of [expert] of"),
            ("[router]\nobjective = 'fm'\n", "unknown key of [router] of"),
            ("expert = 3\n", "must be a table"),
            ("[expert\n", "cannot read the recipe"),
            ("[expert]\nsteps = 'many'\n", "steps of [expert]"),
        ],
    )
    def test_recipes_that_are_wrong(self, data, tmp_path, capsys, content, sentence):
        (tmp_path / "r.toml").write_text(content)
        with pytest.raises(SystemExit):
            main(["train", str(data), "--recipe", str(tmp_path / "r.toml"), "--out", str(tmp_path / "a")])
        assert sentence in capsys.readouterr().err

    def test_a_run_does_not_lie_among_its_data(self, data, tmp_path, capsys):
        for verb in (["train", str(data), "--cluster", "0"], ["train-router", str(data)], ["train-all", str(data)],
                     ["train-router", str(data), "--method", "centroids"]):  # fmt: skip
            with pytest.raises(SystemExit):
                main([*verb, "--out", str(data / "text_encoder")])
            assert "choose an --out outside of the data" in capsys.readouterr().err

    @pytest.mark.slow
    def test_a_trained_router_is_not_overwritten(self, data, tmp_path, capsys):
        router = ["train-router", str(data), "--out", str(tmp_path / "r")]
        main([*router, *flags(steps=3, **{"sample-every": 0})])
        before = (tmp_path / "r" / "model.safetensors").read_bytes()
        with pytest.raises(SystemExit):
            main([*router, "--method", "centroids"])
        assert "holds a Router: choose another --out" in capsys.readouterr().err
        assert (tmp_path / "r" / "model.safetensors").read_bytes() == before

    @pytest.mark.slow
    def test_train_all(self, data, tmp_path, capsys):
        chosen = ["train-all", str(data), "--objectives", "1ddpm:2fm", "--router", "--out", str(tmp_path / "run")]
        chosen += ["--router.model", "xs/1", "--router.steps", "4", "--router.no-text"]
        main([*chosen, *flags(steps=10, **{"sample-every": 0})])
        told = capsys.readouterr().out
        assert "4 of 4 are trained" in told
        settings = [
            json.loads((tmp_path / "run" / name / "run.json").read_text())["settings"]
            for name in ("expert_0", "router")
        ]
        assert [each["steps"] for each in settings] == [10, 4]
        assert [each["batch"] for each in settings] == [16, RouterSettings().batch]  # plain flags are the experts'
        assert settings[1]["text"] is False
        kinds = [Expert.load(tmp_path / "run" / f"expert_{k}").objective.prediction for k in range(3)]
        assert kinds == ["eps", "velocity", "velocity"]
        Router.from_pretrained(tmp_path / "run" / "router")
        with pytest.raises(SystemExit):
            main(["train-all", str(data), "--objectives", "fm", "--out", str(tmp_path / "run"), *flags(steps=10)])
        assert "was begun with objective 'ddpm', not 'fm'" in capsys.readouterr().err

    def test_flags_of_the_experts_leave_the_router_of_a_recipe_alone(self, tmp_path, monkeypatch):
        recipe = tmp_path / "r.toml"
        recipe.write_text("seed = 5\n[expert]\nsteps = 4\n[router]\nsteps = 3\nlr = 0.5\n")
        found = []
        monkeypatch.setitem(VERBS, "train-all", listen(VERBS["train-all"], found))
        common = ["train-all", "data", "--out", "run", "--recipe", str(recipe)]
        for more in (["--steps", "70", "--router"], ["--router", "--router.steps", "9"], []):
            main([*common, *more])
        kept = [(each["settings"], each["router_settings"], each["router"]) for each in found]
        assert [(expert.steps, router.steps, router.lr, router.seed, flag) for expert, router, flag in kept] == [
            (70, 3, 0.5, 5, True), (4, 9, 0.5, 5, True), (4, 3, 0.5, 5, False)]  # fmt: skip

    def test_recipes_that_come_with_atoll(self, tmp_path, monkeypatch, capsys):
        """They are found by name from any folder; a path is a file."""
        monkeypatch.chdir(tmp_path)
        studies = ["", "_ddm", "_earlier", "_paper", "_paper_table1", "_quick"]
        names = [f"reproduce{which}" for which in studies]
        assert recipe_names() == ["laptop", "paper", "photos", "photos-gpu", *names]
        assert read_recipe("laptop", RouterSettings).model == "64x3"
        for name in recipe_names():
            read_recipe(name, ExpertSettings)
        (tmp_path / "mine.toml").write_text("steps = 7")
        assert read_recipe("mine.toml", ExpertSettings).steps == 7
        assert read_recipe("photos", PrepareSettings).size == 64
        assert read_recipe("mine.toml", PrepareSettings) == PrepareSettings()
        with pytest.raises(SystemExit):
            main(["train", "data", "--out", "run", "--recipe", "recipes/laptop.toml"])
        accepted = ", ".join([*recipe_names(), "the path of a TOML file"])
        assert f"unknown recipe 'recipes/laptop.toml': accepted are {accepted}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (os.mkfifo, "it is a FIFO"),
            (lambda path: path.touch() or os.truncate(path, 1 << 40), "it is larger than"),
            (lambda path: path.write_text("a = " + "[" * 20_000), "cannot read the recipe"),
            (lambda path: path.write_text("steps = " + "9" * 4000), "steps must be from 1 to"),
            (lambda path: path.write_text('"\\u001b[2J" = 1'), "unknown key"),
            (lambda path: path.write_text(".".join("a" * 20_000) + " = 1"), "unknown key"),
        ],
    )
    def test_recipes_of_strangers(self, tmp_path, capsys, make, sentence):
        make(tmp_path / "r.toml")
        with pytest.raises(SystemExit):
            main(["train", "data", "--recipe", str(tmp_path / "r.toml"), "--out", str(tmp_path / "a")])
        told = capsys.readouterr().err
        assert sentence in told
        assert "\x1b" not in told
        assert len(told) < 1000

    def test_what_reaches_the_terminal(self, monkeypatch, capsys):
        def fail(**_):
            warnings.warn("a caption says \x1b[2J", stacklevel=1)
            raise InputError("\x1b]0;title\x07 is wrong: " + "x" * 10**6)

        monkeypatch.setitem(VERBS, "demo", fail)
        with pytest.raises(SystemExit) as stop:
            main(["demo"])
        told = capsys.readouterr().err
        assert stop.value.code == 2
        assert told.startswith("atoll: a caption says \\x1b[2J\natoll: \\x1b]0;title\\x07 is wrong: xxx")
        assert len(told) < 3000

    def test_version_and_interruption(self, monkeypatch, capsys):
        def interrupt():
            raise KeyboardInterrupt

        main(["--version"])
        assert capsys.readouterr().out == f"atoll {atoll.__version__}\n"
        for verb, advice in (("demo", ": rerun the same command to resume"), ("doctor", "")):
            monkeypatch.setitem(VERBS, verb, interrupt)
            with pytest.raises(SystemExit) as stop:
                main([verb])
            assert stop.value.code == 130
            assert capsys.readouterr().err == f"atoll: interrupted{advice}\n"


def listen(command, found):
    """Returns a command with the same flags that only records how it was called."""

    @functools.wraps(command)
    def told(*args, **kwargs):
        call = inspect.signature(command).bind(*args, **kwargs)
        call.apply_defaults()
        found.append(call.arguments)

    return told


class TestFirstWeights:
    """`train-all --init` gives the same bits as `train --init` for each expert."""

    @pytest.fixture(scope="class")
    def pretrained(self, data, tmp_path_factory) -> Path:
        """Returns two networks with different weights, the second of another size."""
        folder = tmp_path_factory.mktemp("pretrained")
        for seed, (name, model) in enumerate((("a", "xs/1"), ("b", "64x3/1"))):
            train_expert(data, None, replace(QUICK, steps=2, model=model, seed=seed), folder / name, progress=False)
        return folder

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["all", "by number"])
    def test_all_experts_at_once(self, data, pretrained, tmp_path, how, capsys):
        a, b = pretrained / "a", pretrained / "b"
        init = str(a) if how == "all" else f"1={b},0={a}"
        inits = [a, a, a] if how == "all" else [a, b, None]
        few = flags(steps=4, model="mini", **{"sample-every": 0, "log-every": 4, "save-every": 4, "eval-every": 4})
        main(["train-all", str(data), "--init", init, "--out", str(tmp_path / "run"), *few])
        assert "3 of 3 are trained" in capsys.readouterr().out
        for k, first in enumerate(inits):
            expected = tmp_path / f"alone_{k}"
            more = [] if first is None else ["--init", str(first)]
            main(["train", str(data), "--cluster", str(k), *more, "--out", str(expected), *few])
            made = tmp_path / "run" / f"expert_{k}"
            assert (made / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
            card = json.loads((made / "config.json").read_text())
            assert (card["init"] or {}).get("name") == (None if first is None else first.name)

    @pytest.mark.slow
    def test_a_plan(self, data, pretrained, tmp_path, capsys):
        out = tmp_path / "run"
        how = ["--init", f"0={pretrained / 'b'}", "--objectives", "1ddpm:2fm", "--router", "--router.model", "xs/1"]
        main(["train-all", str(data), *how, "--at-a-time", "2", "--dry-run", "--out", str(out), *flags(model="mini")])
        head, *rows, total = capsys.readouterr().out.splitlines()
        assert head.split() == ["objective", "steps", "batch", "parameters", "memory", "first", "weights"]
        cells = [row.split() for row in rows]
        assert [row[:4] for row in cells[:3]] == [["expert", str(k), kind, "120"] for k, kind in
                                                  enumerate(("ddpm", "fm", "fm"))]  # fmt: skip
        assert [row[-1] for row in cells] == [str(pretrained / "b"), "random", "random", "random"]
        assert cells[3][:3] == ["router", str(RouterSettings().steps), str(RouterSettings().batch)]
        assert cells[0][5] != cells[1][5] == cells[2][5]  # parameters
        assert re.fullmatch(r"2 at a time: \d+\.?\d* [MG]B of memory in all", total)
        sizes = sorted(float(row[6]) * {"MB": 1, "GB": 1000}[row[7]] for row in cells[:3])
        found = float(total.split()[4]) * {"MB": 1, "GB": 1000}[total.split()[5]]
        assert found >= 0.98 * sum(sizes[-2:])
        assert not out.exists()

    def test_refused_before_anything_starts(self, data, tmp_path, capsys):
        for more in ([], ["--dry-run"]):
            with pytest.raises(SystemExit):
                main(["train-all", str(data), "--init", "*=nowhere", "--out", str(tmp_path / "run"), *more])
            assert "--init nowhere is not a folder" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("key", "value"),
        [("latent_space", []), ("latent_space", {"codec": 3}), ("text_encoder", None), ("license", {})],
    )
    def test_a_card_of_a_stranger(self, data, pretrained, tmp_path, key, value):
        copied = copy_of(pretrained / "a", tmp_path / "init")
        card = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**card, key: value}))
        if key == "license":
            train_expert(data, 0, replace(QUICK, steps=2), tmp_path / "a", init=copied, progress=False)
            return
        with pytest.raises(InputError, match="init is damaged, .*: copy it again from its source"):
            train_expert(data, 0, QUICK, tmp_path / "a", init=copied, progress=False)


class TestBadData:
    def test_an_empty_cluster(self, data, tmp_path):
        broken = copy_of(data, tmp_path / "d")
        for path in (broken / "clusters" / "01").glob("*.safetensors"):
            path.unlink()
        with pytest.raises(InputError, match=r"cluster 1 of .* has no images to train on"):
            train_expert(broken, 1, QUICK, tmp_path / "a", progress=False)

    @pytest.mark.parametrize(("column", "value"), [("latents", np.nan), ("latents", 60000), ("tokens", -5)])
    def test_a_damaged_row_is_named(self, data, tmp_path, column, value):
        broken = copy_of(data, tmp_path / "d")
        path = next((broken / "clusters" / "01").glob("*.safetensors"))
        tensors = load_file(path)
        tensors[column] = tensors[column].clone()
        tensors[column][3].flatten()[5:6] = value
        tensors[column][3].view(-1)[5] = value
        save_file(tensors, path)
        with pytest.raises(InputError, match=r"cluster 1 of .*damaged"):
            train_expert(broken, 1, replace(QUICK, steps=100), tmp_path / "a", progress=False)

    def test_a_truncated_shard(self, data, tmp_path):
        broken = copy_of(data, tmp_path / "d")
        path = next((broken / "clusters" / "01").glob("*.safetensors"))
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(InputError, match="is truncated or not a shard"):
            train_expert(broken, 1, QUICK, tmp_path / "a", progress=False)

    @pytest.mark.slow
    def test_first_weights_of_another_latent_space(self, data, shapes, tmp_path):
        train_expert(shapes, None, replace(QUICK, steps=2), tmp_path / "init", progress=False)
        with pytest.raises(InputError, match=r"was made for latents .* but cluster 0 of .* has"):
            train_expert(data, 0, QUICK, tmp_path / "a", init=tmp_path / "init", progress=False)

    @pytest.mark.slow
    def test_first_weights_of_another_codec(self, data, tmp_path):
        train_expert(data, 0, replace(QUICK, steps=2), tmp_path / "init", progress=False)
        config = json.loads((tmp_path / "init" / "config.json").read_text())
        config["latent_space"]["codec"]["fingerprint"] = "0" * 64
        (tmp_path / "init" / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="its codec .* is not that of .*prepare the data with the same codec"):
            train_expert(data, 0, QUICK, tmp_path / "a", init=tmp_path / "init", progress=False)

    @pytest.mark.parametrize("key", ["counts", "latent_shape", "text", "license", "codec", "source"])
    def test_a_dataset_json_that_lacks_something(self, data, tmp_path, key):
        broken = copy_of(data, tmp_path / "d")
        about = json.loads((broken / "dataset.json").read_text())
        del about[key]
        (broken / "dataset.json").write_text(json.dumps(about))
        with pytest.raises(InputError, match=f"lacks '{key}'"):
            train_expert(broken, 1, QUICK, tmp_path / "a", progress=False)

    def test_a_missing_codec_shows_at_once(self, data, tmp_path):
        broken = copy_of(data, tmp_path / "d")
        shutil.rmtree(broken / "vae")
        with pytest.raises(InputError, match="vae"):
            train_expert(broken, 1, replace(QUICK, sample_every=30), tmp_path / "a", progress=False)
        assert not (tmp_path / "a" / "state").exists()

    def test_no_rows_held_out(self, data, tmp_path):
        broken = copy_of(data, tmp_path / "d")
        for path in (broken / "clusters").rglob("*.safetensors"):
            if path.name[0].isdigit():
                tensors = load_file(path)
                save_file({**tensors, "split": torch.zeros_like(tensors["split"])}, path)
        told = train_expert(broken, 1, QUICK, tmp_path / "a", progress=False)
        assert "training rows, for none are held out" in told[-1]

    @pytest.mark.slow
    def test_a_cluster_with_nothing_to_train_on(self, data, tmp_path):
        broken = copy_of(data, tmp_path / "d")
        for path in (broken / "clusters" / "01").glob("*.safetensors"):
            tensors = load_file(path)
            save_file({**tensors, "split": torch.ones_like(tensors["split"])}, path)
        with pytest.raises(InputError, match="has no images to train on"):
            train_expert(broken, 1, QUICK, tmp_path / "a", progress=False)
        train_router(broken, RouterSettings(model="xs/1", steps=2, batch=8), tmp_path / "r", progress=False)

    @pytest.mark.slow
    def test_first_weights_of_another_kind_or_size(self, data, tmp_path):
        train_router(data, RouterSettings(model="xs/1", steps=2, batch=8), tmp_path / "r", progress=False)
        with pytest.raises(InputError, match="describes a 'Router', not a DiT"):
            train_expert(data, 0, QUICK, tmp_path / "a", init=tmp_path / "r", progress=False)
        train_expert(data, 0, replace(QUICK, steps=2), tmp_path / "init", progress=False)
        with pytest.raises(InputError, match="is of size 64x2/1, not 64x3/1"):
            train_expert(
                data, 0, replace(QUICK, model="64x3/1"), tmp_path / "a", init=tmp_path / "init", progress=False
            )

    def test_a_router_needs_clusters(self, shapes, tmp_path):
        with pytest.raises(InputError, match="atoll partition"):
            train_router(shapes, RouterSettings(model="xs/1", steps=2), tmp_path / "r", progress=False)
