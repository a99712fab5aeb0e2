"""The ensemble: exact with perfect experts, equal to the naive loop, and independent of batch and memory."""

import itertools
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.diffusion.objective import get_objective
from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.schedules import LINEAR, SCHEDULES
from atoll.diffusion.solvers import SOLVERS, Step, uniform_times
from atoll.diffusion.transfer import Calibration, Conversion, Predict, Transfer
from atoll.encoders.text import make_text_encoder
from atoll.errors import InputError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.expert import Expert
from atoll.networks.presets import preset
from atoll.networks.router import Router, RouterConfig
from atoll.sampling.ensemble import Ensemble, Mixture, Routed, draw_noise, generate, image_generators
from atoll.sampling.expert import FolderExpert, Prompts, VelocityExpert
from atoll.sampling.routing import POLICIES, Routing, get_routing

WORDS = make_text_encoder("words:16x12")
CAPTIONS = ["a red cat", "a blue dog with a very tall hat and shoes", "", "fish", "a red cat", "two green birds"]
SIZES = {"input_size": 8, "in_channels": 2, "text_dim": 16}
K = 4
KINDS = ("fm", "ddpm", "x0", "v")
TIMES = torch.tensor([0.001, 0.05, 0.3, 0.5, 0.7, 0.95, 0.999], dtype=torch.float64)


# --- perfect experts ----------------------------------------------------------------------------------------------


def transfers_of(conversion: Conversion, shift: int = 0) -> list[Transfer]:
    """Returns four predictions on four schedules; a closed-form expert knows every noise level."""
    names = itertools.islice(itertools.cycle(SCHEDULES), shift, None)
    everywhere = (-math.inf, math.inf)
    still = (
        Calibration(torch.tensor([-8.0, 8.0]), torch.ones(2), torch.zeros(6)) if conversion == "calibrated" else None
    )
    return [
        Transfer(prediction, SCHEDULES[name], conversion, still, log_snr_range=everywhere)
        for prediction, name in zip(Prediction, names, strict=False)
    ]


class ClosedForm(VelocityExpert):
    """A function of its own (x, t) as an expert that reads no text."""

    text_dim, device = None, torch.device("cpu")

    def __init__(self, predict: Predict, transfer: Transfer, shape: tuple[int, ...]) -> None:
        self.predict, self.transfer, self.shape = predict, transfer, shape
        self.is_flow = transfer.prediction is Prediction.VELOCITY

    def velocity(self, x, t, text=None):
        return self.transfer.velocity(self.predict, x, t)


def perfect(data: ClusteredGaussians, transfers: Sequence[Transfer]) -> Ensemble:
    experts = [ClosedForm(data.expert(k, t.prediction, t.schedule), t, (6,)) for k, t in enumerate(transfers)]
    return Ensemble(experts, lambda x, t, text: data.posterior(x, LINEAR(t)).log())


def initial_noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    return draw_noise(image_generators(seeds), shape)


def points(data: ClusteredGaussians, t: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x0, labels = data.sample(64, g)
    return (1 - t) * x0 + t * torch.randn(x0.shape, generator=g, dtype=x0.dtype), labels


@pytest.mark.parametrize("policy", ["full", "topk:4", "threshold:0"])
@pytest.mark.parametrize("shift", range(4))
def test_perfect_experts_make_the_true_velocity(shift, policy, report):
    data = ClusteredGaussians.random(4, 3, 6)
    ensemble = perfect(data, transfers_of(Conversion.EXACT, shift))
    worst = 0.0
    for t in TIMES:
        x, _ = points(data, t)
        true = data.velocity(x, t)
        error = (Mixture(ensemble, routing=get_routing(policy))(x, t) - true).norm(dim=1) / true.norm(dim=1)
        worst = max(worst, float(error.max()))
    report(f"worst relative velocity error through the ensemble, {policy:12} rotation {shift}: {worst:7.1e}")
    assert worst < 1e-9


@pytest.mark.parametrize("conversion", ["exact", "paper", "calibrated"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_eq_1_with_its_weights(policy, conversion):
    data = ClusteredGaussians.random(4, 3, 6)
    transfers = transfers_of(Conversion(conversion))
    ensemble = perfect(data, transfers)
    routing = Routing(policy, 0.05 if policy == "threshold" else None)
    for t in TIMES:
        x, labels = points(data, t)
        options = {"labels": labels, "generators": image_generators(range(64))}
        u = Mixture(ensemble, routing=routing, **options)(x, t)
        options["generators"] = image_generators(range(64))
        weights = routing.weights(data.posterior(x, LINEAR(t)), t, is_flow=ensemble.is_flow, **options)
        expected = sum(
            weights[:, k : k + 1] * transfer.velocity(data.expert(k, transfer.prediction, transfer.schedule), x, t)
            for k, transfer in enumerate(transfers)
        )
        torch.testing.assert_close(u, expected, rtol=1e-9, atol=1e-9)
        if policy == "full":
            torch.testing.assert_close(u, data.ensemble_velocity(transfers, x, t), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_perfect_samples(solver):
    """From noise to data, the mixed ensemble follows the true velocity."""
    data = ClusteredGaussians.random(4, 3, 6)
    single = ClusteredGaussians(data.means.float(), data.variances.float(), data.weights.float())
    ensemble = perfect(single, transfers_of(Conversion.EXACT))
    path: list[Step] = []
    options = {"solver": solver, "times": uniform_times(20)}
    x = generate(ensemble, None, range(50), routing=Routing("full"), on_step=path.append, **options)
    noise = initial_noise(range(50), (6,))
    expected = SOLVERS[solver](data.velocity, noise.double(), uniform_times(20), None)
    assert len(path) == 20
    torch.testing.assert_close(x.double(), expected, atol=2e-3, rtol=1e-3)  # single precision


# --- real networks ------------------------------------------------------------------------------------------------


def shaken(network: torch.nn.Module) -> torch.nn.Module:
    """Perturbs a network, so that its output is not zero and depends on the text."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.08)
    return network.eval()


def make_expert(seed: int, kind: str = "fm", size: str = "xs/2", sizes: dict = SIZES) -> Expert:
    torch.manual_seed(seed)
    network = shaken(DiT(DiTConfig(**preset(size, **sizes))))
    shape = [sizes["in_channels"], sizes["input_size"], sizes["input_size"]]
    level = torch.tensor([-4.0, 0.0, 4.0])
    calibration = Calibration(level, torch.tensor([0.2, 0.8, 1.0]), torch.randn(shape)) if kind == "ddpm" else None
    frozen = {"spec": "none", "dtype": "float32", "fingerprint": "0"}
    space = {"shape": shape, "codec": {**frozen, "channels": shape[0], "factor": 1}}
    text = {**frozen, "dim": sizes["text_dim"], "max_length": 8}
    objective = get_objective(kind)
    network.card = {"objective": asdict(objective), "latent_space": space, "text_encoder": text}
    return Expert(network, objective, calibration)


def make_router(text_dim: int | None = 16) -> Router:
    """Returns a router that sends samples to different experts."""
    torch.manual_seed(2)
    router = shaken(Router(RouterConfig(**preset("xs/2", **{**SIZES, "text_dim": text_dim}), num_experts=K)))
    with torch.no_grad():
        router.head.weight.normal_()
    router.card = {"temperature": 3.0}
    return router


@pytest.fixture(scope="module")
def experts() -> list[VelocityExpert]:
    return [VelocityExpert.of(make_expert(k, kind)) for k, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    places = [tmp_path_factory.mktemp("ensemble") / f"expert_{k}" for k in range(K)]
    for k, (place, kind) in enumerate(zip(places, KINDS, strict=True)):
        make_expert(k, kind).save(place)
    return places


def prompts_of(captions: Sequence[str], negative: str | Sequence[str] = "") -> Prompts:
    return Prompts.encode(WORDS, captions, negative)


def make(ensemble: Ensemble, rows: Sequence[int], **options) -> Tensor:
    options = {"times": uniform_times(6), "guidance": 3.0, "solver": "heun", **options}
    if "labels" in options:
        options["labels"] = options["labels"][list(rows)]
    return generate(ensemble, prompts_of([CAPTIONS[row] for row in rows]), [100 + row for row in rows], **options)


@pytest.mark.parametrize("spec", ["top1", "topk:2", "full", "threshold:0.1", "sample", "by_time", "oracle"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_image_does_not_depend_on_its_batch(experts, guidance, spec):
    ensemble = Ensemble(experts, make_router())
    options = {"routing": get_routing(spec), "guidance": guidance, "labels": torch.tensor([0, 1, 2, 3, 0, 1])}
    together = make(ensemble, range(6), **options)
    for rows in ([0], [1], [2], [3, 5], [5, 4, 1]):
        torch.testing.assert_close(make(ensemble, rows, **options), together[rows], atol=1e-4, rtol=0)
    assert float((together[0] - together[4]).abs().max()) > 0.01  # the same prompt, another seed


@pytest.mark.parametrize("spec", ["top1", "topk:2", "topk:4", "full", "threshold:0.15"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_sparse_is_naive(experts, scale, spec):
    """Compared with a loop that runs every expert on every sample, in two passes, and multiplies by the weights."""
    router, routing = make_router(), get_routing(spec)
    (tokens, mask), (null, null_mask) = (WORDS.encode(WORDS.tokenize(texts)) for texts in (CAPTIONS, [""]))
    x, seen = initial_noise(range(6), (2, 8, 8)), []
    for value in (1.0, 0.6, 0.2):
        t = torch.tensor(value)
        p = torch.softmax(router(x, t, tokens, mask) / 3, 1)
        weights, naive = routing.weights(p, t), torch.zeros_like(x)
        for k, expert in enumerate(experts):
            texts = expert.read_text(tokens, mask), expert.read_text(null, null_mask)
            cond, uncond = (expert.velocity(x, t, text) for text in texts)
            u = uncond + scale * (cond - uncond)
            naive = naive + weights[:, k, None, None, None] * u
        mixture = Mixture(
            Ensemble(experts, router),
            prompts_of(CAPTIONS),
            routing=routing,
            guidance=scale,
            trace=seen.append,
        )
        torch.testing.assert_close(mixture(x, t), naive, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(seen[-1].weights, weights, atol=1e-5, rtol=0)
    if spec == "top1":
        assert all(len(routed.evaluated) > 1 for routed in seen)


def test_equal_experts_are_one(experts):
    one = make(Ensemble(experts[:1]), range(6))
    for spec in ("top1", "topk:3", "full", "sample"):
        many = make(Ensemble([experts[0]] * K, make_router()), range(6), routing=get_routing(spec))
        torch.testing.assert_close(many, one, atol=1e-4, rtol=0)


def test_only_what_is_needed_is_run(experts):
    seen: list[Routed] = []
    asked: list[int] = []

    class Watched(VelocityExpert):
        def velocity(self, x, t, text=None):
            asked.append(len(x))
            return super().velocity(x, t, text)

    watched = [Watched(expert.network, expert.transfer) for expert in experts]
    make(Ensemble(watched, make_router()), range(6), trace=seen.append, solver="euler")
    assert len(seen) == 6
    assert sum(asked) == 6 * 6 * 2  # each sample once a step, twice for guidance
    for routed in seen:
        assert set(routed.evaluated) == set(routed.weights.sum(0).nonzero().flatten().tolist())
        assert routed.t.dim() == 0


def test_texts_are_read_once(experts):
    read: list[Tensor] = []

    class Watched(VelocityExpert):
        def read_text(self, tokens, mask=None):
            read.append(tokens)
            return super().read_text(tokens, mask)

    ensemble = Ensemble([Watched(experts[0].network, experts[0].transfer)])
    make(ensemble, range(6))
    assert len(read) == 5  # "" is a prompt and the null text, "a red cat" is there twice
    assert all(tokens.shape[0] == 1 for tokens in read)


def test_negative_prompts(experts):
    ensemble = Ensemble(experts[:1])
    x, t = initial_noise(range(2), (2, 8, 8)), torch.tensor(0.5)
    prompts = ["a red cat", "fish"]
    texts = [WORDS.encode(WORDS.tokenize(captions)) for captions in (prompts, ["a blue dog", "two green birds"])]
    cond, away = (experts[0].velocity(x, t, experts[0].read_text(*text)) for text in texts)
    u = Mixture(ensemble, prompts_of(prompts, ["a blue dog", "two green birds"]), guidance=5.0)(x, t)
    torch.testing.assert_close(u, away + 5 * (cond - away), atol=1e-4, rtol=1e-4)
    u = Mixture(ensemble, prompts_of(prompts, "a blue dog"), guidance=5.0)(x, t)
    torch.testing.assert_close(u[0], (away + 5 * (cond - away))[0], atol=1e-4, rtol=1e-4)


def test_a_time_for_each_sample(experts):
    """As in distillation, where each sample is at its own time."""
    ensemble = Ensemble(experts, make_router())
    x, times = initial_noise(range(6), (2, 8, 8)), torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7, 0.2])
    for spec in ("top1", "full", "by_time"):
        options = {"routing": get_routing(spec), "guidance": 2.0}
        together = Mixture(ensemble, prompts_of(CAPTIONS), **options)(x, times)
        for i in range(6):
            alone = Mixture(ensemble, prompts_of(CAPTIONS[i : i + 1]), **options)(x[i : i + 1], times[i])
            torch.testing.assert_close(together[i : i + 1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_less_precision(folders, dtype):
    """Latents stay float32; on a CPU only their size is expected to agree."""
    exact, less = (make(Ensemble.open(folders[:1], dtype=d), range(2), guidance=2.0) for d in (torch.float32, dtype))
    assert less.dtype == torch.float32
    assert float((exact - less).norm() / exact.norm()) < 0.1


# --- routers ------------------------------------------------------------------------------------------------------


def test_a_router_without_text_and_one_from_centroids(experts):
    blind = make(Ensemble(experts, make_router(text_dim=None)), range(6))
    assert bool(torch.isfinite(blind).all())
    g = torch.Generator().manual_seed(0)
    statistics = (torch.randn(K, 2, 8, 8, generator=g), torch.ones(K), torch.ones(K))
    texts = (torch.randn(K, 16, generator=g), torch.eye(16))
    x, t = initial_noise(range(6), (2, 8, 8)), torch.tensor(0.5)
    tokens, mask = WORDS.encode(WORDS.tokenize(CAPTIONS))
    for router, text in (
        (CentroidRouter.fit(*statistics), ()),
        (CentroidRouter.fit(*statistics, *texts), (tokens, mask)),
    ):
        seen: list[Routed] = []
        router.card = {"temperature": 7.0}
        Mixture(Ensemble(experts, router), prompts_of(CAPTIONS), routing=Routing("full"), trace=seen.append)(x, t)
        expected = torch.softmax(router(x, t, *text) / 7, 1)
        torch.testing.assert_close(seen[0].weights, expected, atol=1e-5, rtol=1e-4)
        seen.clear()
        router.card = {"temperature": 1e6}
        Mixture(Ensemble(experts, router), prompts_of(CAPTIONS), routing=Routing("full"), trace=seen.append)(x, t)
        torch.testing.assert_close(seen[0].weights, torch.full((6, K), 1 / K), atol=1e-3, rtol=0)


class Counted(CentroidRouter):
    """A router that records how many samples it gets."""

    def forward(self, x, t, text=None, mask=None):
        self.__dict__.setdefault("asked", []).append(len(x))
        return super().forward(x, t, text, mask)


def counted(scale: float = 1.0) -> Counted:
    g = torch.Generator().manual_seed(0)
    return Counted.fit(scale * torch.randn(K, 2, 8, 8, generator=g), torch.ones(K), torch.ones(K))


def test_the_router_can_be_asked_less_often(experts):
    router, seen = counted(), []
    make(Ensemble(experts, router), range(6), routing=Routing(every=3), trace=seen.append, times=uniform_times(7))
    assert len(seen) == 13  # Heun's last step has one evaluation
    assert router.asked == [6] * 5
    for i, routed in enumerate(seen):
        assert torch.equal(routed.weights, seen[i - i % 3].weights)


def test_a_sample_that_is_sure_stays(experts):
    router, seen = counted(), []
    options = {"routing": Routing(confident=0.9), "times": uniform_times(12), "solver": "euler"}
    together = make(Ensemble(experts, router), range(6), trace=seen.append, **options)
    assert router.asked[0] == 6
    assert all(later <= earlier for earlier, later in itertools.pairwise(router.asked))
    assert len(router.asked) < 12 or router.asked[-1] < 6
    for rows in ([2], [4, 1]):
        torch.testing.assert_close(
            make(Ensemble(experts, counted()), rows, **options), together[rows], atol=1e-4, rtol=0
        )


# --- experts that are missing or broken ---------------------------------------------------------------------------


def test_a_missing_expert_is_named(experts):
    with pytest.warns(UserWarning, match="expert_1, expert_3 of 4 experts are missing") as caught:
        ensemble = Ensemble([experts[0], None, experts[2], None], make_router())
    assert len(caught) == 1
    seen: list[Routed] = []
    make(ensemble, range(6), routing=Routing("full"), trace=seen.append)
    whole: list[Routed] = []
    make(Ensemble(experts, make_router()), range(6), routing=Routing("full"), trace=whole.append)
    for routed in seen:
        assert routed.weights[:, [1, 3]].abs().sum() == 0
    kept = whole[0].weights[:, [0, 2]]
    torch.testing.assert_close(seen[0].weights[:, [0, 2]], kept / kept.sum(1, keepdim=True))
    with pytest.warns(UserWarning, match="expert_0 of 2 experts is missing"):
        alone = Ensemble([None, experts[0]])  # the only one left needs no router
    torch.testing.assert_close(make(alone, range(2)), make(Ensemble(experts[:1]), range(2)))


def test_a_missing_folder(folders, tmp_path):
    with pytest.warns(UserWarning, match="expert_1 of 2 experts is missing"):
        Ensemble.open([folders[0], tmp_path / "nowhere"])
    with pytest.raises(InputError, match="none of the experts is there"):
        Ensemble.open([tmp_path / "nowhere"])


def broken(kind: str = "fm", after: float = 2.0) -> VelocityExpert:
    """Makes an expert return NaN at times below `after`."""
    good = VelocityExpert.of(make_expert(9, kind))

    class Broken(VelocityExpert):
        def velocity(self, x, t, text=None):
            return super().velocity(x, t, text) * (torch.nan if t < after else 1)

    return Broken(good.network, good.transfer)


@pytest.mark.bits
def test_an_expert_that_fails_is_left_out(experts):
    seen: list[Routed] = []
    ensemble = Ensemble([experts[0], broken(), *experts[2:]], make_router())
    with pytest.warns(UserWarning, match="the velocity of expert_1 is not finite") as caught:
        images = make(ensemble, range(6), routing=Routing("full"), trace=seen.append)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="missing"):
        without = Ensemble([experts[0], None, *experts[2:]], make_router())
    assert torch.equal(images, make(without, range(6), routing=Routing("full")))
    assert len(seen) == 11
    with pytest.warns(UserWarning, match="the velocity of expert_1"):  # a new run gives it a new chance
        make(ensemble, range(6), routing=Routing("full"))


def test_an_expert_that_fails_half_way(experts):
    seen: list[Routed] = []
    with pytest.warns(UserWarning, match="expert_0"):
        images = make(
            Ensemble([broken(after=0.5), *experts[1:]], make_router()),
            range(6),
            routing=Routing("full"),
            trace=seen.append,
        )
    assert bool(torch.isfinite(images).all())
    for routed in seen:
        assert (0 in routed.evaluated) == bool(routed.t >= 0.5)


class SometimesBroken(VelocityExpert):
    """An expert that fails on samples that begin with a large number."""

    def velocity(self, x, t, text=None):
        u = super().velocity(x, t, text)
        return torch.where((x.flatten(1)[:, 0] > 0).view(-1, 1, 1, 1), torch.nan, u)


@pytest.mark.parametrize("spec", ["top1", "topk:2", "full", "sample", "threshold:0.1"])
def test_a_failure_on_one_sample_is_no_other_s(experts, spec):
    """An image is the same alone and in a batch where an expert fails on other samples."""
    some = SometimesBroken(experts[1].network, experts[1].transfer)
    router = make_router()
    router.card = {"temperature": 5.0}
    ensemble = Ensemble([experts[0], some, *experts[2:]], router)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = make(ensemble, range(4), routing=get_routing(spec), guidance=2.0)
        for row in range(4):
            alone = make(ensemble, [row], routing=get_routing(spec), guidance=2.0)
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-4)


def test_weights_that_are_not_finite_are_left_out(folders, tmp_path):
    for k, folder in enumerate(folders):
        shutil.copytree(folder, tmp_path / f"expert_{k}")
    path = tmp_path / "expert_1" / "model.safetensors"
    weights = load_file(path)
    weights["out.bias"] = weights["out.bias"] * torch.nan
    save_file(weights, path)
    ensemble = Ensemble.open([tmp_path / f"expert_{k}" for k in range(len(folders))], make_router())
    with pytest.warns(UserWarning, match="expert_1 is not finite: it is left out"):
        found = make(ensemble, range(2), routing=get_routing("full"))
    assert torch.isfinite(found).all()


def test_no_expert_is_left(experts):
    with pytest.raises(InputError, match="the velocity of expert_0 is not finite and no other expert is left"):
        make(Ensemble([broken()]), range(2))
    with (
        pytest.warns(UserWarning, match="expert_0"),
        pytest.raises(InputError, match="the velocity of expert_1 is not finite and no other"),
    ):
        make(
            Ensemble([broken(), broken()], lambda x, t, text: torch.zeros(len(x), 2)), range(2), routing=Routing("full")
        )
    x = torch.full((1, 2, 8, 8), torch.nan)
    with pytest.raises(InputError, match="x holds values"):
        Mixture(Ensemble(experts[:1]), prompts_of(["fish"]))(x, torch.tensor(0.5))


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.bits
@pytest.mark.parametrize("max_resident", [1, 2, 3])
@pytest.mark.parametrize("spec", ["top1", "topk:2", "full"])
def test_paging_changes_nothing(folders, experts, spec, max_resident, monkeypatch):
    routing = get_routing(spec)
    expected = make(Ensemble(experts, make_router()), range(6), routing=routing)
    loads: list[FolderExpert] = []
    original = FolderExpert.load
    ensemble = Ensemble.open(folders, make_router(), max_resident=max_resident)

    def load(self: FolderExpert) -> None:
        loads.extend([] if self.resident else [self])
        original(self)
        assert sum(expert.resident for expert in ensemble.experts) <= max_resident

    monkeypatch.setattr(FolderExpert, "load", load)
    assert torch.equal(make(ensemble, range(6), routing=routing), expected)
    assert torch.equal(make(Ensemble.open(folders, make_router()), range(6), routing=routing), expected)
    if spec == "full":  # those in memory go first: a step loads only the others
        assert len(loads) == K + 10 * (K - max_resident) + K


def test_a_file_that_changes_under_us(folders, tmp_path):
    make_expert(0).save(tmp_path)
    expert = FolderExpert(tmp_path)
    expert.load()
    expert.unload()
    make_expert(1).save(tmp_path)
    with pytest.raises(InputError, match="was changed while it was in use"):
        expert.load()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot read .*model.safetensors"):
        expert.load()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="config.json is damaged, it lacks 'latent_space'"):
        FolderExpert(tmp_path)


MEMORY = """
import sys
from pathlib import Path
import torch
from atoll.encoders.text import make_text_encoder
from atoll.diffusion.solvers import uniform_times
from atoll.sampling.ensemble import Ensemble, generate
from atoll.sampling.expert import Prompts
from atoll.sampling.routing import Routing

def megabytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

def run(folders, max_resident=None):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    router = lambda x, t, text: torch.zeros(len(x), len(folders))
    ensemble = Ensemble.open(folders, router, max_resident=max_resident)
    prompts = Prompts.encode(make_text_encoder("words:16x12"), ["a red cat", "a blue dog with a hat"])
    generate(ensemble, prompts, [0, 1], times=uniform_times(2), guidance=3.0, routing=Routing("full"))
    return megabytes("VmHWM")

torch.set_num_threads(1)
tiny, *folders = sys.argv[1:]
run([tiny])
base = megabytes("VmRSS")
print(*(peak - base for peak in (run(folders[:1]), run(folders, 1), run(folders))))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_in_memory_costs_as_much_as_one(folders, tmp_path, report):
    """Compares peak memory above the interpreter's: one expert, 8 with one in memory, 8 in memory."""
    expert, places = make_expert(0, size="384x6/2"), [str(tmp_path / f"expert_{k}") for k in range(8)]
    for place in places:
        expert.save(place)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, folders[0], *places],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    one, paged, everything = map(float, run.stdout.split())
    size = (tmp_path / "expert_0" / "model.safetensors").stat().st_size / 2**20
    report(
        f"peak memory, experts of {size:.0f} MB: one {one:.0f} MB, one of 8 at a time {paged:.0f}, 8 {everything:.0f}"
    )
    assert paged <= 1.5 * one
    assert everything > 4 * one


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_noise_is_the_seeds(rng):
    noise = initial_noise([5, 2**63 - 1, 0], (2, 3))
    assert noise.shape == (3, 2, 3)
    assert torch.equal(noise[:1], initial_noise([5], (2, 3)))
    for seeds in ([-1], [2**63]):
        with pytest.raises(InputError, match="seed"):
            initial_noise(seeds, (2,))


def test_mistakes(experts):
    router, prompts = make_router(), prompts_of(CAPTIONS)
    x, t = initial_noise(range(6), (2, 8, 8)), torch.tensor(0.5)
    with pytest.raises(InputError, match="the router knows 4 experts, but there are 3"):
        Ensemble(experts[:3], router)
    with pytest.raises(InputError, match="need a router"):
        Mixture(Ensemble(experts), prompts)
    with pytest.raises(InputError, match="logits are not finite"):
        Mixture(Ensemble(experts, lambda x, t, text: torch.full((len(x), 4), torch.nan)), prompts)(x, t)
    with pytest.raises(InputError, match="max_resident"):
        Ensemble(experts, router, max_resident=0)
    with pytest.raises(InputError, match="topk:5 asks for more than the 4 experts"):
        Mixture(Ensemble(experts, router), prompts, routing=get_routing("topk:5"))(x, t)
    with pytest.raises(InputError, match="unknown solver"):
        generate(Ensemble(experts, router), prompts, range(6), solver="rk9")
    with pytest.raises(InputError, match="unknown conversion"):
        VelocityExpert.of(make_expert(0), "magic")


def test_two_kinds_on_one_cluster_need_no_router(experts):
    """The paper's section 4.3."""
    seen: list[Routed] = []
    with warnings.catch_warnings(action="error"):
        make(Ensemble(experts[:2]), range(2), routing=Routing("by_time"), trace=seen.append)
    for routed in seen:
        assert routed.evaluated == ((0,) if routed.t > 0.5 else (1,))
