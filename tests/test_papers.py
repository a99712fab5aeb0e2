"""What the papers' experiments need: architectures, native DDPM, damping, original images, LPIPS, checkpoints."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atoll.cli.main import VERBS, main
from atoll.convert import Options, convert
from atoll.convert.dit import dit_weights
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset
from atoll.data.sources import Source, readers
from atoll.data.view import DatasetView
from atoll.diffusion.prediction import Estimate, Prediction
from atoll.diffusion.schedules import get_schedule
from atoll.diffusion.solvers import bounded_x0, ddim, table_times
from atoll.diffusion.transfer import Transfer
from atoll.errors import InputError
from atoll.experiments import reproduce
from atoll.experiments.dry_run import commands_of
from atoll.experiments.originals import Originals
from atoll.experiments.studies import Lab, Recipe, get_studies
from atoll.metrics.diversity import make_distance
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset, size_of
from atoll.networks.router import Router, RouterConfig
from atoll.sampling.routing import get_routing
from atoll.training.snapshot import take_snapshots
from test_reproduce import _listen


class TestArchitectures:
    @pytest.mark.parametrize(
        ("name", "millions"),
        [
            ("xl/2", 605.97),  # HDDM: 605M
            ("xl/2:zero", 823.6),  # HDDM (second-hand) has 891M and DDM 895M; neither says what the rest is
            ("b/2:zero:blind", 129.7),  # HDDM, Table 1: 129M
            ("b/2", 118.6),
        ],
    )
    def test_experts(self, name, millions):
        with torch.device("meta"):
            network = DiT(DiTConfig(**preset(name, input_size=32, in_channels=4, text_dim=768)))
        assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
        assert size_of(network.config).endswith(name.partition("/2")[2])

    @pytest.mark.parametrize(
        ("name", "text", "millions"),
        [("b/2:zero", 768, 158), ("b/2:zero:mlp", None, 129)],  # DDM's router reads the text, HDDM's does not
    )
    def test_routers(self, name, text, millions):
        with torch.device("meta"):
            router = Router(RouterConfig(**preset(name, input_size=32, in_channels=4, text_dim=text, num_experts=8)))
        assert sum(p.numel() for p in router.parameters()) / 1e6 == pytest.approx(millions, rel=1e-2)

    def test_the_saving(self):
        """HDDM says that AdaLN-Single reduces parameters by about 30%; it is 26% with all else equal."""
        with torch.device("meta"):
            single, zero = (DiT(DiTConfig(**preset(name, text_dim=768))) for name in ("xl/2", "xl/2:zero"))
        fewer, more = (sum(p.numel() for p in network.parameters()) for network in (single, zero))
        assert 1 - fewer / more == pytest.approx(0.264, abs=1e-3)

    def test_unknown_options(self):
        for name in ("xs:loud", "xs:mlp"):  # the latter is a router's
            with pytest.raises(InputError, match="option of a model"):
                preset(name)


class TestNative:
    """Against diffusers' own schedulers, with a network that is far off at high noise."""

    bound = 1.5

    def network(self, x):
        return 0.9 * x + 0.3 * torch.sin(3 * x)

    def ours(self, x, num, eta, generator=None, dynamic=False, bound=None):
        table = get_schedule("ddpm-cosine")

        def denoise(x, t):
            alpha, sigma, _, _ = table(t).broadcast(x)
            x0 = bounded_x0((x - sigma * self.network(x)) / alpha, torch.tensor(bound or self.bound), dynamic)
            return Estimate(x0, (x - alpha * x0) / sigma)

        return ddim(denoise, table, x, table_times(num), eta, generator)

    def options(self, **more):
        return {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "trailing", **more}

    def test_the_table(self):
        diffusers = pytest.importorskip("diffusers")
        table, theirs = get_schedule("ddpm-cosine"), diffusers.DDPMScheduler(**self.options())
        torch.testing.assert_close(table.betas.float(), theirs.betas, rtol=1e-4, atol=1e-7)
        t = torch.arange(1000, dtype=torch.float64) / 999
        torch.testing.assert_close(table(t).alpha ** 2, theirs.alphas_cumprod.double(), rtol=2e-3, atol=1e-7)
        assert table(torch.ones(())).alpha > 0
        torch.testing.assert_close(table.time_of(table.log_snr(t)), t, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("num", [1000, 75, 20])
    def test_ancestral(self, num):
        diffusers = pytest.importorskip("diffusers")
        scheduler = diffusers.DDPMScheduler(**self.options(clip_sample=True, clip_sample_range=self.bound))
        scheduler.set_timesteps(num)
        start = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
        assert [round(999 * t) for t in table_times(num)[:-1].tolist()] == scheduler.timesteps.tolist()
        x, generator = start, torch.Generator().manual_seed(1)
        for t in scheduler.timesteps:
            x = scheduler.step(self.network(x), t, x, generator=generator).prev_sample
        ours = self.ours(start, num, 1.0, torch.Generator().manual_seed(1))
        torch.testing.assert_close(ours, x, rtol=0, atol=5e-3)
        assert float(ours.std()) > 0.05

    @pytest.mark.parametrize("num", [50, 20])  # theirs strides by whole steps, so the number must divide 1000
    def test_ddim(self, num):
        diffusers = pytest.importorskip("diffusers")
        scheduler = diffusers.DDIMScheduler(**self.options(clip_sample=True, clip_sample_range=self.bound))
        scheduler.set_timesteps(num)
        start = x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
        for t in scheduler.timesteps:
            x = scheduler.step(self.network(x), t, x, use_clipped_model_output=True).prev_sample
        torch.testing.assert_close(self.ours(start, num, 0.0), x, rtol=0, atol=5e-3)

    def test_dynamic_thresholding(self):
        diffusers = pytest.importorskip("diffusers")
        scheduler = diffusers.DDPMScheduler(thresholding=True, sample_max_value=1e9, dynamic_thresholding_ratio=0.9)
        x0 = torch.randn(5, 3, 8, 8) * torch.tensor([0.1, 0.5, 1, 3, 50])[:, None, None, None]
        theirs = scheduler._threshold_sample(x0)
        torch.testing.assert_close(bounded_x0(x0, torch.ones(()), dynamic=True, ratio=0.9), theirs)
        torch.testing.assert_close(bounded_x0(7 * x0, torch.tensor(7.0), dynamic=True, ratio=0.9), 7 * theirs)


def test_damping_acts_at_high_noise_alone():
    """Interpreted this way, the velocity is divided by pi/2, the steepest slope of the cosine schedule."""
    x = torch.randn(4, 3)

    def velocity(name, t):
        transfer = Transfer(Prediction.EPS, get_schedule("cosine"), name)
        return transfer.velocity(lambda x, t: 0.3 * x, x, torch.tensor(t))

    torch.testing.assert_close(velocity("paper-damped", 0.8), velocity("paper", 0.8))
    steepest = np.pi / 2 * np.sin(np.pi / 2 * 0.9)
    torch.testing.assert_close(velocity("paper-damped", 0.9), velocity("paper", 0.9) / steepest)


def test_sampling_two_experts():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0]]).repeat_interleave(2000, 0)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(p))]
    weights = get_routing("sample:2").weights(p, torch.tensor(0.5), generators=generators)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(p)))
    chosen = weights > 1e-6
    assert not bool(chosen[:, 3].any())
    assert chosen[:2000].sum(1).unique().tolist() == [2]
    assert chosen[2000:].sum(1).unique().tolist() == [1]  # a single expert has all weight
    both = weights[:2000][chosen[:2000, 0] & chosen[:2000, 1]]
    torch.testing.assert_close(both[0, :2], torch.tensor([0.625, 0.375]))
    # Without the first: p_1 p_2 (1 / (1 - p_1) + 1 / (1 - p_2)).
    missing = 0.3 * 0.2 * (1 / 0.7 + 1 / 0.8)
    assert 1 - float(chosen[:2000, 0].float().mean()) == pytest.approx(missing, abs=0.03)
    with pytest.raises(InputError, match="more than the 4 experts"):
        get_routing("sample:5").weights(p, torch.tensor(0.5), generators=generators)
    assert str(get_routing("sample")) == "sample"


def test_a_pretrained_network_takes_the_way_of_a_published_one(tmp_path):
    torch.manual_seed(0)
    network = DiT(DiTConfig(**preset("32x3/2:zero:blind", input_size=8, in_channels=4)))
    for p in network.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    weights = dit_weights(network)
    assert weights["x_embedder.proj.weight"].shape == (32, 4, 2, 2)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "dit.safetensors")
    options = Options(label=0, kind="dit", num_heads=network.config.num_heads, input_size=8)
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([0.2, 0.7])
    converted = convert(tmp_path / "dit.safetensors", replace(options, as_is=True))
    with torch.no_grad():
        torch.testing.assert_close(converted.network(x, t), network.eval()(x, t), rtol=0, atol=1e-5)
    expert = convert(tmp_path / "dit.safetensors", replace(options, text_dim=12)).network
    assert (expert.config.adaln, expert.config.text_dim) == ("single", 12)
    assert expert.state_dict()["blocks.1.cross.out.weight"].abs().max() == 0  # no effect at first


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("papers") / "data"
    prepare(
        Source("shapes", num=60, size=16), folder, PrepareSettings(16, "pca:8x12:plain", holdout=0.3), 0, progress=False
    )
    return folder


def test_originals_are_the_images_themselves(digits, tmp_path):
    view = DatasetView(Dataset.open(digits))
    rows = view.held_out[[3, 0, 2]]
    originals = Originals("shapes", view, view.held_out, tmp_path, False)
    seen = originals.read(rows)
    from atoll.data.prepare import transform_of

    with readers(0, transform_of(PrepareSettings(16), 0), 0) as read:
        images = {item.key: image.pixels for item, image in read(Source("shapes", num=60, size=16).items()) if image}
    for row, image in zip(rows, seen, strict=True):
        assert np.array_equal(image, images[view.data.strings("key", [row])[0]])
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="lacks .* images of"):
        Originals("digits", view, rows, tmp_path / "other", False).read(rows)


def test_lpips_is_that_of_torchmetrics(tmp_path, monkeypatch):
    """Its channel weights come with torchmetrics; AlexNet's own are not available here, so those are random."""
    theirs = pytest.importorskip("torchmetrics.functional.image.lpips")
    torch.manual_seed(0)
    relu, pool = nn.ReLU(), nn.MaxPool2d(3, 2)
    features = nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), relu, pool, nn.Conv2d(64, 192, 5, padding=2), relu, pool,
        nn.Conv2d(192, 384, 3, padding=1), relu, nn.Conv2d(384, 256, 3, padding=1), relu,
        nn.Conv2d(256, 256, 3, padding=1), relu, pool,
    )  # fmt: skip
    torch.save({f"features.{name}": p for name, p in features.state_dict().items()}, tmp_path / "alexnet.pth")
    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda *_: features)
    lpips, ours = theirs._LPIPS(net="alex", pnet_rand=True), make_distance(f"lpips:{tmp_path / 'alexnet.pth'}")
    images = torch.rand(3, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        pairs = [float(lpips(images[i : i + 1], images[j : j + 1])) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert ours.mean_over_pairs([images]) == pytest.approx(np.mean(pairs), rel=1e-4)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(InputError, match="are not torchvision's"):
        make_distance(f"lpips:{tmp_path / 'other.pth'}")
    with pytest.raises(InputError, match="unknown distance"):
        make_distance("lpips")


@pytest.mark.bits
@pytest.mark.slow
def test_a_checkpoint_on_the_way_is_what_training_would_have_ended_with(digits, tmp_path):
    flags = ["--cluster", "all", "--model", "xs", "--batch", "4", "--keep-every", "2", "--save-every", "1",
             "--eval-every", "4", "--sample-every", "0", "--warmup", "1"]  # fmt: skip
    for steps in (2, 4):
        main(["train", str(digits), *flags, "--steps", str(steps), "--out", str(tmp_path / f"run_{steps}")])
    main(["assemble", str(tmp_path / "run_4"), "--data", str(digits), "--step", "2", "--out", str(tmp_path / "model")])
    early, short = (load_file(tmp_path / name / "model.safetensors") for name in ("model/expert_0", "run_2"))
    assert all(torch.equal(early[name], short[name]) for name in short)
    with pytest.raises(InputError, match="there is no checkpoint"):
        take_snapshots([tmp_path / "run_4"], 1, digits, tmp_path / "none")


class TestProtocols:
    """The settings of the papers, table by table."""

    def rows(self, name, recipe="reproduce_paper"):
        return get_studies([name], Lab(Path("OUT"), Recipe.read(recipe)))[name]

    def test_table3(self):
        study = self.rows("table3")
        assert (study.num, study.cluster) == (5000, 0)
        assert {(row.sampling.guidance, row.sampling.steps) for row in study.rows} == {(6.0, 75)}
        figures = {row.hddm: row for row in study.rows if row.hddm}
        assert figures["25.61"].sampling.conversion == "paper"
        assert figures["27.04"].sampling.solver == "ancestral:table:clip"
        assert figures["33.29"].sampling.routing == "by_time:0.5"

    def test_table4(self):
        study = self.rows("table4")
        how = {row.hddm: (row.sampling.guidance, row.sampling.steps, row.sampling.conversion) for row in study.rows}
        assert how["12.45"] == (7.5, 50, None)
        assert how["19.75"] == how["15.09"] == (6.0, 75, "paper")
        assert how["11.88"] == (7.5, 50, "paper")
        # Ours is compared with the paper's: the default calibrates DDPM experts and leaves FM ones unchanged.
        assert [row.sampling.conversion for row in study.rows[1:]] == ["paper", None] * 3
        mixed = next(row for row in study.rows if row.hddm == "11.88").model
        kinds = [part.settings.objective for part in mixed.parts[:-1]]
        assert [k for k, kind in enumerate(kinds) if kind == "ddpm"] == [0, 3]
        assert all(part.settings.resolved_objective.weighting == "plain" for part in mixed.parts[:-1])
        assert all(part.verb[-2:] == ["--init", "OUT/pretrained/converted"] for part in mixed.parts[:-1])
        assert {row.sampling.routing for row in study.rows} == {"topk:2"}
        scratch = self.rows("table4-scratch").rows[0].model
        assert all(part.init is None for part in scratch.parts)

    def test_table1(self):
        study = self.rows("table1", "reproduce_paper_table1")
        monolith, top1, *_ = (row.model for row in study.rows)
        assert (monolith.parts[0].settings.batch, top1.parts[0].settings.batch) == (256, 32)
        assert {part.settings.model for part in (*monolith.parts, *top1.parts[:-1])} == {"b/2:zero"}
        assert {part.init for part in (*monolith.parts, *top1.parts)} == {None}
        assert Recipe.read("reproduce_paper_table1").data.num == 3_900_000

    def test_a_student_and_its_rivals(self):
        """DDM trains them for 400,000 steps, half as many as its experts, and gives the rival four times the batch."""
        _, student, rival, equal = (row.model.parts[0].settings for row in self.rows("student", "reproduce_ddm").rows)
        assert (student.steps, rival.steps, equal.steps) == (400_000,) * 3
        assert (student.batch, rival.batch, equal.batch) == (32, 128, 32)

    def test_one_network_needs_no_policy(self):
        for name in ("clusters", "experts", "flops", "correlation", "student", "table2"):
            for row in self.rows(name).rows:
                assert row.sampling.routing == "top1" or len(row.model.parts) > 1

    def test_same_noise_is_compared_within_a_seed(self, monkeypatch):
        monkeypatch.setattr(reproduce, "training_figures", lambda model: {})
        seeds = [get_studies(["correlation"], Lab(Path("OUT"), Recipe.read("reproduce"), seed)) for seed in range(2)]
        studies = [study["correlation"] for study in seeds]
        measured = {reproduce._node(studies[0]): ({"figures": {}}, None)}
        for number, study in enumerate(studies):
            for row in study.rows:
                node = reproduce._node(study, row)
                assert f"seed_{number}" in str(node[3].model)
                assert f"seed_{number}" in str(node[4].model)  # its own monolith
                measured[node] = ({"figures": {}, "hash": str(number)}, None)
        rows = reproduce._describe(studies, measured)["rows"]
        assert [row["hash"] for row in rows[1:]] == [["0", "1"]] * len(studies[0].rows)

    def test_threshold_is_one_in_time(self):
        study = self.rows("threshold", "reproduce")
        assert {row.sampling.routing for row in study.rows[1:]} >= {"by_time:0.2", "by_time:0.5"}

    def test_every_command_of_the_plan_is_one(self, monkeypatch):
        """Each is parsed by the command line itself, up to the point where work would begin."""
        found = []
        for verb, command in list(VERBS.items()):
            monkeypatch.setitem(VERBS, verb, _listen(command, verb, found))
        for recipe, names in (
            ("reproduce_paper", ["table4"]),
            ("reproduce", ["adaln", "init"]),
            ("reproduce_ddm", ["student"]),
        ):
            content = Recipe.read(recipe)
            commands = list(commands_of(get_studies(names, Lab(Path("OUT"), content)), content))
            some = [*{words[1]: words for words in commands if words[0] == "atoll"}.values()]  # the last of each verb
            for words in some:
                main(shlex.split(shlex.join(words))[1:])
        trained = [kept for verb, kept in found if verb == "train"]
        assert {kept["settings"].model for kept in trained} >= {"xl/2", "64x4"}
        evaluated = [kept for verb, kept in found if verb == "evaluate"]
        assert evaluated[0]["settings"].reference_split == "held_out"
        assert evaluated[0]["sampling"].solver == "euler"
