"""A student's target is the ensemble's velocity, whoever teaches it; the student is an expert like any other."""

import json
import math
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.schedules import LINEAR
from atoll.encoders.text import load_text_encoder
from atoll.engines.train_all import Part
from atoll.errors import InputError
from atoll.networks.expert import Expert
from atoll.partition.partition import partition
from atoll.sampling.assemble import assemble
from atoll.sampling.ensemble import Ensemble, Mixture
from atoll.sampling.expert import FolderExpert, VelocityExpert
from atoll.sampling.pipeline import AtollPipeline
from atoll.training import distill as module
from atoll.training.distill import ROUTINGS, DistillTask, Teacher, distill, resolved_settings
from atoll.training.few_steps import FewStepTask
from atoll.training.metrics_log import read_metrics
from atoll.training.settings import DistillSettings, read_recipe
from atoll.training.task import Batch
from test_assemble import parts
from test_ensemble import ClosedForm, perfect, transfers_of
from test_loop import figures
from test_training import alone

CPU = torch.device("cpu")
QUICK = DistillSettings(
    model="xs/1", steps=4, batch=12, log_every=2, save_every=4, eval_every=4, sample_every=0, lr=2e-3
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Returns 120 avatars in 3 clusters."""
    return parts(tmp_path_factory.getbasetemp())[0]


def replace_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replaces weights, as if the network had been saved with them."""
    path.unlink()
    save_file(weights, path)
    card = json.loads((path.parent / "config.json").read_text())
    card["sha256"][path.name] = digest(path)
    (path.parent / "config.json").write_text(json.dumps(card))


@pytest.fixture(scope="module")
def model(data, tmp_path_factory) -> Path:
    """Returns FM, DDPM and FM experts with a router, with perturbed weights so that texts matter."""
    run = tmp_path_factory.mktemp("teacher")
    shutil.copytree(parts(tmp_path_factory.getbasetemp())[1], run / "run")
    generator = torch.Generator().manual_seed(0)
    for path in sorted((run / "run").glob("*/model.safetensors")):
        replace_weights(
            path, {k: w + 0.05 * torch.randn(w.shape, generator=generator) for k, w in load_file(path).items()}
        )
    assemble([run / "run"], None, run / "model", data)
    return run / "model"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("atoll.training.distill", "atoll.training.expert"):
        monkeypatch.setattr(f"{name}.EVALUATED", 48)
        monkeypatch.setattr(f"{name}.EVALUATED_AT_THE_END", 64)


def without(model: Path, out: Path, expert: int) -> Path:
    shutil.copytree(model, out)
    shutil.rmtree(out / f"expert_{expert}")
    return out


def teacher_of(model: Path, **changes: object) -> Teacher:
    index = ModelIndex.read(model)
    return Teacher.open(model, index, resolved_settings(replace(QUICK, **changes), index, None), CPU)


def task_of(model: Path, data: Path, **changes: object) -> DistillTask:
    return DistillTask(Dataset.open(data), replace(QUICK, **changes), CPU, teacher_of(model, **changes))


def step_of(task: DistillTask, seed: int = 0, dropped: bool | None = None) -> Batch:
    drawn = task.draw(12, torch.Generator().manual_seed(seed))
    if dropped is not None:
        drawn = (*drawn[:2], torch.full((12,), dropped))
    return task.read(np.arange(seed, seed + 12), drawn)


def rows_of(task: DistillTask, rows: np.ndarray) -> np.ndarray:
    """Returns the data rows of a batch, in its order."""
    at = task.view.train[rows]
    return at[np.argsort(task.experts[at].numpy(), kind="stable")]


def target_of(task: DistillTask, batch: Batch) -> Tensor:
    """Returns the loss target, as the error of a network that outputs zero."""
    told: list[Tensor] = []
    teach = task.teacher.velocity

    def listen(*arguments: object) -> Tensor:
        told.append(teach(*arguments))
        return told[-1]

    object.__setattr__(task.teacher, "velocity", listen)
    loss = task.loss(lambda x, t, *text: torch.zeros_like(x), batch, batch)
    object.__delattr__(task.teacher, "velocity")
    torch.testing.assert_close(loss, (told[0] ** 2).flatten(1).mean(1))
    return told[0]


# --- perfect teachers ---------------------------------------------------------------------------------------------


class TestPerfectTeachers:
    """Closed-form experts of four predictions on four schedules, through the ensemble that samples."""

    oracle = ClusteredGaussians.random(4, 3, 6)
    times = (0.001, 0.05, 0.3, 0.5, 0.7, 0.95, 0.999)

    def points(self, t: Tensor, num: int = 64) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(7)
        x0, labels = self.oracle.sample(num, g)
        return (1 - t)[:, None] * x0 + t[:, None] * torch.randn(x0.shape, generator=g, dtype=x0.dtype), labels

    def teacher(self, by: str) -> Teacher:
        return Teacher(perfect(self.oracle, transfers_of("exact")), ROUTINGS[by])

    def test_by_the_router_it_is_the_marginal_velocity(self, report):
        t = torch.tensor(self.times, dtype=torch.float64).repeat_interleave(10)
        x, _ = self.points(t, len(t))
        found, truth = self.teacher("router").velocity(x, t), self.oracle.velocity(x, t)
        apart = float((found - truth).abs().max() / truth.abs().max())
        report(f"a student's target by the router, from perfect teachers: {apart:.1e} from the marginal velocity")
        assert apart < 1e-6

    def test_by_label_it_is_the_expert_s_whose_mean_is_the_marginal(self, report):
        """That is the sum over k of p(k | x_t) u_k(x_t), which a student of the labels learns."""
        t = torch.tensor(self.times, dtype=torch.float64).repeat_interleave(10)
        x, labels = self.points(t, len(t))
        teacher = self.teacher("label")
        each = [teacher.velocity(x, t, experts=torch.full_like(labels, k)) for k in range(4)]
        mixed = teacher.velocity(x, t, experts=labels)
        for k in range(4):
            x0, eps = self.oracle.estimate(x, LINEAR(t), k)
            torch.testing.assert_close(each[k], eps - x0, rtol=1e-6, atol=1e-6)
            assert torch.equal(mixed[labels == k], each[k][labels == k])
        mean = torch.einsum("bk,kbd->bd", self.oracle.posterior(x, LINEAR(t)), torch.stack(each))
        apart = float((mean - self.oracle.velocity(x, t)).abs().max())
        report(f"a student's target by label, its mean over p(k | x_t): {apart:.1e} from the marginal velocity")
        assert apart < 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("t", [0.4, 0.7, 0.9])
    def test_what_labels_say_beyond_the_marginal_cannot_be_learned(self, t):
        """On samples, target - marginal is orthogonal to functions of x_t; with wrong labels it is not."""
        num = 40_000
        times = torch.full((num,), t, dtype=torch.float64)
        x, labels = self.points(times, num)
        teacher, truth = self.teacher("label"), self.oracle.velocity(x, times)
        functions = torch.cat([torch.ones(num, 1, dtype=x.dtype), x, torch.sin(2 * x)], 1)  # [num, F]

        def largest(experts: Tensor) -> float:
            """Returns the largest product in standard errors, over all functions and dimensions."""
            rest = teacher.velocity(x, times, experts=experts) - truth
            products = functions[:, :, None] * rest[:, None]  # [num, F, D]
            return float((products.mean(0).abs() / (products.std(0) / math.sqrt(num) + 1e-12)).max())

        assert largest(labels) < 5
        assert largest(labels[torch.randperm(num, generator=torch.Generator().manual_seed(0))]) > 20

    @pytest.mark.parametrize("by", ["router", "label"])
    def test_so_the_right_student_has_no_loss_left(self, data, by):
        """Through the task itself, on latents as large as real images'."""
        task = task_of_oracle(data, by)
        batch = step_of(task)
        oracle, at = ORACLES[task], LINEAR(batch.t.double())
        labels = batch.labels

        def right(x: Tensor, t: Tensor, *text: Tensor) -> Tensor:
            flat = x.double().flatten(1)
            if by == "router":
                return oracle.velocity(flat, t.double()).reshape(x.shape)
            found = [oracle.estimate(flat, at, int(k)) for k in range(3)]
            return torch.stack([found[int(k)].eps[i] - found[int(k)].x0[i] for i, k in enumerate(labels)]).view(x.shape)

        assert float(task.loss(right, batch, batch).max()) < 1e-10
        assert float(task.loss(lambda x, t, *text: right(x, t) + 1e-2, batch, batch).min()) > 9e-5


ORACLES: dict[DistillTask, ClusteredGaussians] = {}


def task_of_oracle(data: Path, by: str) -> DistillTask:
    """Returns a task on prepared data whose teachers are perfect for Gaussian clusters of that shape."""
    dataset = Dataset.open(data)
    shape = tuple(dataset.card.latent_shape)
    oracle = ClusteredGaussians.random(3, 2, math.prod(shape))

    def flat(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, t, *_: function(x.double().flatten(1), t.double())

    experts = []
    for k, transfer in enumerate(transfers_of("exact")[:3]):
        perfect_one = flat(oracle.expert(k, transfer.prediction, transfer.schedule))
        experts.append(ClosedForm(lambda x, t, of=perfect_one: of(x, t).reshape(x.shape).to(x.dtype), transfer, shape))
    ensemble = Ensemble(experts, flat(lambda x, t: oracle.posterior(x, LINEAR(t)).log()))
    places = {k: k for k in range(3)} if by == "label" else None
    task = DistillTask(dataset, QUICK, CPU, Teacher(ensemble, ROUTINGS[by], places=places))
    ORACLES[task] = oracle
    return task


# --- real teachers ------------------------------------------------------------------------------------------------


class TestTarget:
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_by_label_it_is_that_of_the_expert_alone(self, data, model, scale):
        """Compared with guidance as a closure over each expert's own network, one sample at a time."""
        task = task_of(model, data, guidance=scale)
        batch = step_of(task, dropped=False)
        found = target_of(task, batch)
        x0, ids, t, eps, places = batch
        rows = rows_of(task, np.arange(12))
        assert torch.equal(places, torch.from_numpy(Dataset.open(data).clusters())[rows])
        experts = [VelocityExpert.of(Expert.load(model / f"expert_{k}")) for k in range(3)]
        text = load_text_encoder(data)
        for i in range(12):
            one = experts[int(places[i])]
            x = ((1 - t[i]) * x0[i].float() + t[i] * eps[i])[None]
            texts = [one.read_text(*text.encode(i_d)) for i_d in (ids[i : i + 1], text.null_ids())]
            with torch.no_grad():
                cond, uncond = (one.velocity(x, t[i : i + 1], own) for own in texts)
                wanted = uncond + scale * (cond - uncond)
            torch.testing.assert_close(found[i : i + 1], wanted, rtol=1e-4, atol=1e-4)

    def test_by_the_router_it_is_what_the_pipeline_samples_with(self, data, model):
        task = task_of(model, data, teacher="router", guidance=2.0)
        t = torch.full((12,), 0.6)
        batch = step_of(task, dropped=False)._replace(t=t)
        found = target_of(task, batch)
        seen = []
        pipe = AtollPipeline.from_pretrained(model)
        x, rows = 0.4 * batch.latents.float() + 0.6 * batch.eps, rows_of(task, np.arange(12))
        prompts = module.Prompts.encode(pipe.text_encoder, Dataset.open(data).strings("caption", rows.tolist()))
        u = Mixture(pipe.ensemble, prompts, routing=ROUTINGS["router"], guidance=2.0, trace=seen.append)(x, t[0])
        torch.testing.assert_close(found, u, rtol=1e-4, atol=1e-4)
        assert float(seen[0].weights.max()) < 0.99  # it is a mixture

    def test_teachers_differ(self, data, model):
        found = {}
        for by in ROUTINGS:
            task = task_of(model, data, teacher=by)
            found[by] = target_of(task, step_of(task, dropped=False))
            assert found[by].shape == (12, *task.view.shape)
        tasks = (task_of(model, data, teacher=by) for by in ("router", "top1"))
        assert torch.equal(*(step_of(task).latents for task in tasks))
        assert not torch.allclose(found["router"], found["top1"])
        assert not torch.allclose(found["router"], found["top2"])

    def test_a_dropped_text_is_not_guided(self, data, model):
        plain, strong = (task_of(model, data, guidance=scale) for scale in (1.0, 5.0))
        without_text, with_text = (
            [target_of(task, step_of(task, dropped=dropped)) for task in (plain, strong)] for dropped in (True, False)
        )
        torch.testing.assert_close(*without_text, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(*with_text, atol=1e-2)

    @pytest.mark.bits
    @pytest.mark.parametrize("by", ROUTINGS)
    def test_paging_changes_nothing(self, data, model, by):
        whole, paged = (task_of(model, data, teacher=by, guidance=2.0, max_resident=most) for most in (None, 1))
        for seed in range(3):
            assert torch.equal(*(target_of(task, step_of(task, seed)) for task in (whole, paged)))

    def test_a_student_in_bfloat16(self, data, model, tmp_path):
        """Its teacher computes in bfloat16 too, paged or not."""
        settings = replace(QUICK, precision="bf16", steps=2, save_every=2, eval_every=2)
        for name, most in (("a", None), ("b", 1)):
            distill(model, data, replace(settings, max_resident=most), tmp_path / name, progress=False)
        one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
        assert one == other

    def test_an_expert_comes_into_memory_once_a_step(self, data, model, monkeypatch):
        """This holds however small the micro-batches are, since a batch is processed teacher by teacher."""
        task = task_of(model, data, max_resident=1)
        unloaded = []
        unload = FolderExpert.unload
        monkeypatch.setattr(FolderExpert, "unload", lambda self: (unloaded.append(self), unload(self)))
        for seed in range(4):
            batch = step_of(task, seed)
            for first in range(0, 12, 2):
                some = batch.part(slice(first, first + 2))
                task.loss(task.network, some, some)
        assert len(unloaded) <= 4 * 3

    def test_the_order_within_a_batch_knows_nothing_of_the_noise(self, data, model):
        task = task_of(model, data)
        rows = np.random.default_rng(0).permutation(task.num_rows)[:12]
        t, eps, _ = task.draw(12, torch.Generator().manual_seed(0))
        batch, at = task.read(rows, (t, eps, torch.zeros(12, dtype=torch.bool))), rows_of(task, rows)
        assert torch.equal(batch.latents.float(), task.view.latents(at))
        assert torch.equal(batch.ids, task.view.tokens(at)[:, : batch.ids.shape[1]])
        assert batch.labels.tolist() == sorted(batch.labels.tolist())
        assert torch.equal(batch.t, t)
        assert torch.equal(batch.eps, eps)

    def test_a_teacher_that_breaks_is_not_learned_from(self, data, model, tmp_path):
        for name in ("expert_0", "expert_1", "expert_2", "router"):
            shutil.copytree(model / name, tmp_path / "run" / name)
        path = tmp_path / "run" / "expert_1" / "model.safetensors"
        weights = load_file(path)
        weights["out.bias"] = torch.full_like(weights["out.bias"], 3e38)
        replace_weights(path, weights)
        assemble([tmp_path / "run"], None, tmp_path / "m", data)
        told = "expert_1 of the teacher .* not finite"
        with pytest.warns(UserWarning, match="not finite"), pytest.raises(InputError, match=told):
            distill(tmp_path / "m", data, QUICK, tmp_path / "s", progress=False)


# --- the student --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def student(data, model, tmp_path_factory) -> Path:
    """Returns a student after a few steps, distilled with guidance 3."""
    folder = tmp_path_factory.mktemp("student") / "dense"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EVALUATED", "EVALUATED_AT_THE_END"):
            patch.setattr(module, name, 48)
            patch.setattr(f"atoll.training.expert.{name}", 48)
        settings = replace(QUICK, steps=45, guidance=3.0, sample_every=45, eval_every=15, save_every=45)
        distill(model, data, settings, folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def dense(data, student, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "model"
    main(["assemble", str(student), "--data", str(data), "--out", str(folder)])
    return folder


class TestStudent:
    def test_it_describes_itself(self, data, model, student):
        card = json.loads((student / "config.json").read_text())
        assert (card["objective"]["prediction"], card["objective"]["schedule"]) == ("velocity", "linear")
        assert card["data"]["cluster"] is None
        assert card["guidance"] == 3.0
        teacher = card["training"]["teacher"]
        assert teacher["hash"] == ModelIndex.read(model).hash
        assert teacher["experts"] == ["fm", "ddpm", "fm"]
        assert (teacher["by"], teacher["guidance"], teacher["missing"]) == ("label", 3.0, [])
        assert teacher["held_out_loss"] > 0
        assert card["training"]["held_out"]["loss"] > 0
        assert card["license"] == Dataset.open(data).card.license
        assert str(data) not in json.dumps(card)
        assert Expert.load(student).calibration is not None
        assert (student / "samples" / "000000045.png").exists()

    def test_it_comes_nearer_to_its_teacher(self, student):
        apart = [line["held_out_teacher"] for line in read_metrics(student) if "held_out_teacher" in line]
        assert len(apart) == 3
        assert apart[2] < apart[1] < apart[0]

    def test_it_samples_without_guidance_on_top(self, dense, tmp_path, capsys):
        pipe = AtollPipeline.from_pretrained(dense)
        options = {"seed": 0, "num_inference_steps": 3, "output_type": "latent", "progress": False}
        made = pipe("a robot", **options)
        assert made.settings["guidance"] == 1
        assert made.settings["learned_guidance"] == "3"
        assert torch.equal(made.images, pipe("a robot", guidance_scale=1, **options).images)
        assert not torch.equal(made.images, pipe("a robot", guidance_scale=2, **options).images)
        main(["sample", str(dense), "a robot", "--steps", "2", "--out", str(tmp_path / "s")])
        assert "the model has learned guidance of 3: none was added" in capsys.readouterr().out

    def test_others_are_guided_as_ever(self, model):
        made = AtollPipeline.from_pretrained(model)("a robot", seed=0, num_inference_steps=2, progress=False)
        assert made.settings["guidance"] == 2
        assert "learned_guidance" not in made.settings

    def test_experts_of_two_kinds_are_told(self, data, dense, model, tmp_path):
        index = ModelIndex.read(model)
        shutil.copytree(model, tmp_path / "m")
        path = tmp_path / "m" / "expert_0" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "guidance": 3.0}))
        files = {**index.files, "expert_0/config.json": digest(path)}
        index.model_copy(update={"files": files}).write(tmp_path / "m")
        with pytest.warns(UserWarning, match="have learned guidance of 3, 1, 1"):
            pipe = AtollPipeline.from_pretrained(tmp_path / "m")
        assert pipe.guidance == 1
        with pytest.warns(UserWarning, match="guidance"), pytest.raises(InputError, match="learned different guidance"):
            distill(tmp_path / "m", data, QUICK, tmp_path / "s", progress=False)

    def test_it_teaches_in_its_turn(self, data, dense, student, tmp_path):
        """One expert needs no labels and no router; guidance multiplies, and it may start from its own weights."""
        told = distill(dense, data, replace(QUICK, guidance=2.0), tmp_path / "s", init=student, progress=False)
        assert any("learned guidance of 6" in line for line in told)
        card = json.loads((tmp_path / "s" / "config.json").read_text())
        assert card["guidance"] == 6.0
        assert card["init"]["name"] == "dense"
        first = load_file(tmp_path / "s" / "state" / "000000004.safetensors")
        assert first["weights.out.weight"].shape == load_file(student / "model.safetensors")["out.weight"].shape

    def test_a_damaged_card_is_named(self, student, tmp_path):
        shutil.copytree(student, tmp_path / "s")
        path = tmp_path / "s" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "guidance": "much"}))
        with pytest.raises(InputError, match="its 'guidance.* but is 'much'"):
            Expert.load(tmp_path / "s")


def digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


class TestKilled:
    @pytest.mark.bits
    def test_it_ends_as_if_nothing_had_happened(self, data, model, tmp_path, capsys):
        """Killed with -9 and resumed with one expert in memory instead of three, it gives the same bits."""
        verb = ["distill", model, data, "--student", "xs/1", "--steps", 40, "--batch", 12, "--log-every", 2,
                "--save-every", 5, "--eval-every", 40, "--sample-every", 0, "--guidance", 2]  # fmt: skip
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        main([*map(str, verb), "--out", str(whole)])
        process = alone(*verb, "--out", cut)
        while len(read_metrics(cut)) < 4 and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert not (cut / "config.json").exists()
        main([*map(str, verb), "--out", str(cut), "--max-resident", "1"])
        told = capsys.readouterr().out
        assert "a student of model" in told
        one, other = (load_file(folder / "state" / "000000040.safetensors") for folder in (whole, cut))
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
        assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
        assert figures(whole) == figures(cut)

    def test_another_teacher_is_another_run(self, data, model, tmp_path):
        distill(model, data, QUICK, tmp_path / "s", progress=False)
        Part("student", tmp_path / "s", QUICK, data, teacher=model).job()  # on an engine this is the same run
        shutil.copytree(model, tmp_path / "moved")
        told = distill(tmp_path / "moved", data, QUICK, tmp_path / "s", progress=False)
        assert "is trained already" in told[0]
        with pytest.raises(InputError, match="begun with teacher 'label', not 'router'"):
            distill(model, data, replace(QUICK, teacher="router"), tmp_path / "s", progress=False)
        fewer = without(model, tmp_path / "m", 1)
        with pytest.raises(InputError, match="begun with another"):
            distill(fewer, data, QUICK, tmp_path / "s", allow_missing=True, progress=False)


class TestMissing:
    def test_it_is_refused(self, data, model, tmp_path):
        fewer = without(model, tmp_path / "m", 1)
        for by in ("label", "router"):
            with pytest.raises(InputError, match=r"lacks expert_1: .* --allow-missing"):
                distill(fewer, data, replace(QUICK, teacher=by), tmp_path / "s", progress=False)
        assert not (tmp_path / "s").exists()

    def test_by_label_its_images_are_left_out(self, data, model, tmp_path):
        fewer = without(model, tmp_path / "m", 1)
        clusters = Dataset.open(data).clusters()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            task = DistillTask(Dataset.open(data), QUICK, CPU, teacher_of(fewer), allow_missing=True)
        assert set(clusters[task.view.train]) == set(clusters[task.view.held_out]) == {0, 2}
        whole = task_of(model, data)
        assert task.num_rows == (clusters[whole.view.train] != 1).sum()
        distill(fewer, data, QUICK, tmp_path / "s", allow_missing=True, progress=False)
        card = json.loads((tmp_path / "s" / "config.json").read_text())
        assert card["training"]["teacher"]["missing"] == ["expert_1"]
        assert card["training"]["teacher"]["experts"] == ["fm", "missing", "fm"]
        assert card["data"]["pictures"] == task.num_rows

    def test_by_the_router_the_others_answer(self, data, model, tmp_path):
        fewer = without(model, tmp_path / "m", 1)
        with pytest.warns(UserWarning, match="goes to the others"):
            teacher = teacher_of(fewer, teacher="router")
        task = DistillTask(Dataset.open(data), replace(QUICK, teacher="router"), CPU, teacher)
        assert task.num_rows == task_of(model, data).num_rows
        assert torch.isfinite(target_of(task, step_of(task))).all()


class TestBadInput:
    def test_data_that_do_not_fit(self, data, model, tmp_path):
        """Other texts, another codec of the same shape, another shape: each is refused in one sentence."""
        for name, changes, sentence in (
            ("text", {"text": "words:16x12"}, "its text encoder"),
            ("codec", {"codec": "pca:8x12"}, "its codec"),
            ("shape", {"codec": "pca:8x10"}, "its codec"),
        ):
            other = tmp_path / name
            settings = PrepareSettings(**{"size": 32, "codec": "pca:8x12", "holdout": 0.2, **changes})
            source = Source("avatars", num=120 if name == "text" else 90, size=32)
            prepare(source, other, settings, 0, progress=False)
            with pytest.raises(InputError, match=sentence):
                distill(model, other, QUICK, tmp_path / "s", progress=False)

    @pytest.mark.slow
    def test_labels_of_another_partition_are_told(self, data, model, tmp_path):
        shutil.copytree(data, tmp_path / "d")
        partition(tmp_path / "d", 3, cap=1.3, seed=3, progress=False)
        with pytest.warns(UserWarning, match="was trained on other images than cluster"):
            distill(model, tmp_path / "d", QUICK, tmp_path / "s", dry_run=True)

    def test_more_clusters_than_experts(self, data, model, tmp_path):
        shutil.copytree(data, tmp_path / "d")
        partition(tmp_path / "d", 4, progress=False)
        told = r"no expert of cluster 3 of .* --teacher router"
        with pytest.warns(UserWarning, match="other images"), pytest.raises(InputError, match=told):
            distill(model, tmp_path / "d", QUICK, tmp_path / "s", progress=False)

    def test_data_without_clusters(self, data, model, tmp_path):
        other = tmp_path / "d"
        prepare(Source("avatars", num=120, size=32), other,
                PrepareSettings(size=32, codec="pca:8x12", holdout=0.2), 0, progress=False)  # fmt: skip
        with pytest.raises(InputError, match="has no clusters yet"):
            distill(model, other, QUICK, tmp_path / "s", progress=False)
        distill(model, other, replace(QUICK, teacher="top2"), tmp_path / "s", progress=False)

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--teacher", "routr"], "did you mean 'router'"),
            (["--guidance", "0"], "guidance must be from"),
            (["--guidance", "nan"], "guidance must be from"),
            (["--objective", "ddpm"], "unknown objective 'ddpm'"),
            (["--max-resident", "0"], "max_resident must be from 1 to"),
            (["--student", "huge"], "unknown model size"),
            (["--steps-out", "0"], "steps_out must be from 1 to 16"),
            (["--steps-out", "17"], "steps_out must be from 1 to 16"),
            (["--steps-out", "4", "--teacher-steps", "0"], "teacher_steps must be from 1 to 1000"),
            (["--cluster", "7"], "cluster 7"),
            (["--init", "nowhere"], "nowhere"),
        ],
    )
    def test_mistakes_get_one_sentence(self, data, model, tmp_path, capsys, arguments, sentence):
        with pytest.raises(SystemExit) as stop:
            main(["distill", str(model), str(data), *arguments, "--out", str(tmp_path / "a")])
        assert stop.value.code == 2
        told = capsys.readouterr().err
        assert sentence in told
        assert "Traceback" not in told

    def test_a_damaged_expert_is_found_before_the_work(self, model, tmp_path):
        mine = Path(shutil.copytree(model, tmp_path / "model"))
        path = mine / "expert_1" / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=r"expert_1/model.safetensors is not the file"):
            teacher_of(mine)

    def test_a_part_is_no_teacher(self, data, model, tmp_path):
        with pytest.raises(InputError, match="is a part, not a model"):
            distill(model / "expert_0", data, QUICK, tmp_path / "s", progress=False)

    def test_a_place_of_its_own(self, data, model):
        for place in (data / "s", model / "s"):
            with pytest.raises(InputError, match="choose an --out outside of the"):
                distill(model, data, QUICK, place, progress=False)

    def test_a_model_without_a_router(self, data, model, tmp_path):
        assemble([model / "expert_0", model / "expert_2"], None, tmp_path / "m", data, without_router=True)
        with pytest.raises(InputError, match="has no router: use --teacher label"):
            distill(tmp_path / "m", data, replace(QUICK, teacher="top1"), tmp_path / "s", progress=False)
        task = DistillTask(Dataset.open(data), QUICK, CPU, teacher_of(tmp_path / "m"), allow_missing=True)
        clusters = torch.from_numpy(Dataset.open(data).clusters())
        assert torch.equal(task.experts, torch.tensor([0, -1, 1])[clusters])  # by cluster, not by place


class TestCommand:
    def test_dry_run(self, data, model, tmp_path, capsys):
        main(["distill", str(model), str(data), "--student", "xs/1", "--batch", "8", "--sample-every", "0", "--dry-run",
              "--out", str(tmp_path / "a")])  # fmt: skip
        told = capsys.readouterr().out
        assert "teacher        label" in told
        assert "a step" in told
        assert not (tmp_path / "a").exists()

    def test_recipes(self, tmp_path):
        (tmp_path / "r.toml").write_text('steps = 7\n[expert]\nobjective = "ddpm"\n[student]\nguidance = 4\n')
        found = read_recipe(tmp_path / "r.toml", DistillSettings)
        assert (found.steps, found.guidance, found.objective) == (7, 4, "fm")
        (tmp_path / "r.toml").write_text("[student]\nschedule = 'cosine'\n")
        with pytest.raises(InputError, match=r"unknown key of \[student\]"):
            read_recipe(tmp_path / "r.toml", DistillSettings)


# --- students of few steps ----------------------------------------------------------------------------------------


class TestTrajectories:
    @pytest.mark.parametrize("num", [1, 2, 4])
    def test_they_end_where_the_pipeline_does(self, data, model, num):
        task = few_steps(model, data, num, teacher="top1", guidance=2.0, teacher_steps=8, text_dropout=0.0)
        states, pipe = task.trajectories(task.view.train, range(6)), AtollPipeline(model)
        drawn = [task.prompt_of(task.view.train, number) for number in range(6)]
        captions = task.view.data.strings("caption", [row for row, _, _ in drawn])
        made = pipe(captions, seed=[seed for *_, seed in drawn], num_inference_steps=8, output_type="latent",
                    guidance_scale=2.0, routing="top1", progress=False)  # fmt: skip
        assert states.shape == (6, num + 1, *task.view.shape)
        torch.testing.assert_close(states[:, -1], made.images, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("num", [1, 2, 4])
    def test_a_student_that_has_learned_them_ends_there(self, data, model, num):
        """Euler's method ends there in as many steps from the same noise; the loss is zero there and nowhere else."""
        task = few_steps(model, data, num, teacher_steps=4)
        task.states = states = task.trajectories(task.view.train, range(6))
        x = states[:, 0]
        for i in range(num):
            batch = task.read(np.arange(6), (torch.full((6,), i),))
            torch.testing.assert_close(batch.eps, x, rtol=1e-4, atol=1e-4)
            target = (batch.eps - batch.latents) * num
            assert float(task.loss(lambda *_, u=target: u, batch, batch).max()) < 1e-9
            assert float(task.loss(lambda *_, u=target: 2 * u, batch, batch).min()) > 1e-3
            x = x - target / num
        torch.testing.assert_close(x, states[:, -1], rtol=1e-4, atol=1e-4)

    def test_some_are_of_no_text(self, data, model):
        """Otherwise a student could not handle an empty prompt."""
        task = few_steps(model, data, 2, text_dropout=0.5)
        ids = torch.cat([task.prompt_of(task.view.train, number)[1] for number in range(64)])
        assert 16 < int((ids == task.null_ids).all(1).sum()) < 48

    @pytest.mark.slow
    def test_a_student_of_fewer_steps_learns_from_the_same(self, data, model, quick, tmp_path):
        settings = replace(QUICK, steps_out=1, teacher_steps=4, trajectories=96)
        student = quick.parent / "student"
        distill(model, data, settings, tmp_path / "one", reuse=student, progress=False)
        assert not (tmp_path / "one" / "trajectories").exists()
        assert json.loads((tmp_path / "one" / "config.json").read_text())["steps"] == 1
        for changes, message in (
            ({"steps_out": 4}, "made for 2 steps, in which 4 do not end"),
            ({"guidance": 3.0}, "have guidance 2.0, not 3.0"),
            ({"trajectories": 64}, "have num 96, not 64"),
            ({"steps_out": None}, "add --steps-out"),
        ):
            with pytest.raises(InputError, match=message):
                distill(model, data, replace(settings, **changes), tmp_path / "two", reuse=student, progress=False)
        index = student / "trajectories" / "trajectories.json"
        known = json.loads(index.read_text())
        for changes, message in (
            ({"steps": 10**12}, "says that the teacher took 1000000000000 steps"),
            ({"ends": 10**9}, "made for 1000000000 steps"),
            ({"seed": "x"}, "has the seed 'x'"),
        ):
            index.write_text(json.dumps(known | changes))
            with pytest.raises(InputError, match=message):
                distill(model, data, settings, tmp_path / "two", reuse=student, progress=False)
        index.write_text(json.dumps(known))
        with pytest.raises(InputError, match="has no trajectories"):
            distill(model, data, settings, tmp_path / "two", reuse=tmp_path / "one", progress=False)

    def test_a_damaged_file_is_named(self, data, model, tmp_path):
        settings = replace(QUICK, steps_out=1, teacher_steps=2, steps=1, trajectories=32)
        folder = tmp_path / "s" / "trajectories"
        distill(model, data, settings, tmp_path / "s", progress=False)
        for content in (b"x", (folder / "00000.safetensors").read_bytes()[:-10]):
            (folder / "00000.safetensors").write_bytes(content)
            with pytest.raises(InputError, match=r"00000\.safetensors.*remove it"):
                distill(model, data, replace(settings, steps=2), tmp_path / "s", progress=False)

    def test_a_dry_run_says_how_long_they_take(self, data, model, tmp_path):
        settings = replace(QUICK, steps_out=2, teacher_steps=4)
        told = distill(model, data, settings, tmp_path / "s", dry_run=True)
        assert any("4096 of the teacher in" in line for line in told)
        assert not (tmp_path / "s").exists()


def few_steps(model: Path, data: Path, num: int, **changes: object) -> FewStepTask:
    settings = replace(QUICK, steps_out=num, **changes)
    return FewStepTask(Dataset.open(data), settings, CPU, teacher_of(model, steps_out=num, **changes))


@pytest.fixture(scope="module")
def quick(data, model, tmp_path_factory) -> Path:
    """Returns a model of a two-step student."""
    folder = tmp_path_factory.mktemp("quick")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.training.few_steps.EVALUATED", 48)
        settings = replace(QUICK, steps=30, steps_out=2, teacher_steps=4, trajectories=96, eval_every=15,
                           save_every=30, sample_every=30)  # fmt: skip
        told = distill(model, data, settings, folder / "student", progress=False)
    assert "makes an image in 2 steps" in told[1]
    main(["assemble", str(folder / "student"), "--data", str(data), "--out", str(folder / "model")])
    return folder / "model"


class TestFewSteps:
    def test_it_describes_itself(self, quick):
        student = quick.parent / "student"
        card = json.loads((student / "config.json").read_text())
        assert (card["steps"], card["guidance"], card["calibration"]) == (2, 2.0, None)
        assert len(card["training"]["held_out"]["by_log_snr"]) == 2  # one for each of its steps
        apart = [line["held_out_teacher"] for line in read_metrics(student) if "held_out_teacher" in line]
        assert apart[1] < apart[0]
        assert (student / "samples" / "000000030.png").exists()

    def test_it_samples_in_its_steps(self, quick, tmp_path, capsys):
        pipe = AtollPipeline.from_pretrained(quick)
        made = pipe("a robot", seed=0, output_type="latent", progress=False)
        assert (made.settings["steps"], made.settings["solver"], made.settings["guidance"]) == (2, "euler", 1)
        assert len(made.trace[0].times) == 2
        same = pipe("a robot", seed=0, num_inference_steps=2, solver="euler", output_type="latent", progress=False)
        assert torch.equal(made.images, same.images)
        main(["sample", str(quick), "a robot", "--out", str(tmp_path / "s")])
        assert "1 image" in capsys.readouterr().out

    @pytest.mark.parametrize("flags", [["--steps", "20"], ["--solver", "multistep"], ["--steps", "1"]])
    def test_other_steps_get_one_sentence(self, quick, tmp_path, capsys, flags):
        with pytest.raises(SystemExit):
            main(["sample", str(quick), "a robot", *flags, "--out", str(tmp_path / "s")])
        assert "was distilled to make an image in 2 steps of euler, not in" in capsys.readouterr().err

    def test_it_is_evaluated_in_its_steps(self, quick, data, tmp_path):
        main(["evaluate", str(quick), str(data), "--num", "6", "--features", "simple", "--metrics", "frechet",
              "--out", str(tmp_path / "e")])  # fmt: skip
        assert "steps 2, guidance 1.0, solver euler" in (tmp_path / "e" / "results.md").read_text()

    def test_it_is_no_teacher(self, quick, data, tmp_path):
        with pytest.raises(InputError, match="was itself distilled to 2 steps"):
            distill(quick, data, replace(QUICK, teacher="top1"), tmp_path / "s", progress=False)

    def test_mixed_with_others_it_is_refused(self, model, tmp_path):
        index = ModelIndex.read(model)
        shutil.copytree(model, tmp_path / "m")
        path = tmp_path / "m" / "expert_0" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "steps": 4}))
        files = {**index.files, "expert_0/config.json": digest(path)}
        index.model_copy(update={"files": files}).write(tmp_path / "m")
        with pytest.raises(InputError, match="were made for different numbers of steps"):
            AtollPipeline.from_pretrained(tmp_path / "m")

    @pytest.mark.bits
    def test_killed_it_ends_as_if_nothing_had_happened(self, data, model, tmp_path):
        settings = replace(QUICK, steps_out=2, teacher_steps=4, trajectories=300, steps=8, save_every=2, eval_every=8)
        distill(model, data, settings, tmp_path / "whole", progress=False)
        distill(model, data, replace(settings, steps=5, save_every=5), tmp_path / "cut", progress=False)
        (tmp_path / "cut/trajectories/00001.safetensors").unlink()  # as if killed while generating them
        (tmp_path / "cut/trajectories/trajectories.json").unlink()
        distill(model, data, settings, tmp_path / "cut", progress=False)
        one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
        assert one == other

    @pytest.mark.slow
    def test_students_of_experts_are_mixed_by_the_router(self, data, model, tmp_path):
        """Each cluster's expert is distilled separately; the ensemble's router also routes to the students."""
        settings = replace(QUICK, steps_out=2, teacher_steps=4, trajectories=64)
        for k in range(3):
            distill(model, data, settings, tmp_path / f"run/expert_{k}", cluster=k, progress=False)
            assert json.loads((tmp_path / f"run/expert_{k}/config.json").read_text())["data"]["cluster"] == k
        assemble([tmp_path / "run"], model / "router", tmp_path / "m", data)
        made = AtollPipeline(tmp_path / "m")(["a robot", "a ghost"], seed=0, output_type="latent", progress=False)
        assert made.settings["steps"] == 2
        assert bool(torch.isfinite(made.images).all())
