"""Sampling waits for the (simulated) GPU only for one copy per evaluation, which says which experts run."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.diffusion import schedules
from atoll.diffusion.guidance import guided
from atoll.diffusion.objective import get_objective
from atoll.diffusion.prediction import Estimate, Prediction
from atoll.diffusion.schedules import SCHEDULES
from atoll.diffusion.solvers import SOLVERS, ddim, uniform_times
from atoll.diffusion.transfer import Calibration, Conversion, Transfer
from atoll.encoders.text import TextEncoder, make_text_encoder
from atoll.errors import InputError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.expert import Expert
from atoll.networks.router import Router, RouterConfig
from atoll.networks.text_prior import TextPrior
from atoll.sampling.ensemble import (
    Ensemble,
    Mixture,
    Routed,
    draw_noise,
    generate,
    generate_native,
    image_generators,
)
from atoll.sampling.expert import EncodedTexts, Prompts, VelocityExpert
from atoll.sampling.routing import Routing, get_routing
from atoll.tensors import send
from atoll.training.distill import ROUTINGS, Teacher
from simulated_gpu import CUDA, Gpu, simulated_gpu

CPU = torch.device("cpu")
KINDS = ("fm", "ddpm", "x0", "v")
SHAPE = (4, 8, 8)
SIZES: dict[str, Any] = {"input_size": 8, "in_channels": 4, "patch_size": 4, "hidden_size": 32, "num_heads": 2}
CAPTIONS = ("a red cat", "a blue dog with a tall hat", "", "fish", "a red cat")
LABELS = torch.tensor([0, 1, 2, 3, 1])
GRID = uniform_times(4)
EVERYTHING = ("top1", "topk:2", "threshold:0.2", "sample", "by_time:0.7", "full", "oracle")
USUAL = [name if name in ("top1", "full") else pytest.param(name, marks=pytest.mark.slow) for name in EVERYTHING]


def shaken(network: Any) -> Any:
    """Perturbs a network, so that its output is not zero and depends on the text."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return network.eval()


def make_prior() -> TextPrior:
    return TextPrior(torch.randn(SHAPE), torch.randn(16, *SHAPE) / 8, torch.randn(16), torch.zeros(16), limit=2.0)


def make_calibration() -> Calibration:
    return Calibration(torch.tensor([-4.0, 0.0, 4.0]), torch.tensor([0.2, 0.8, 1.0]), torch.randn(SHAPE))


def make_expert(kind: str) -> Expert:
    network = shaken(DiT(DiTConfig(**SIZES, depth=1, text_dim=16)))
    measured = (make_calibration(), make_prior()) if kind == "ddpm" else (None, None)
    return Expert(network, get_objective(kind), *measured)


def make_router(text_dim: int | None) -> Router:
    """Returns a router that sends samples to different experts."""
    router: Router = shaken(Router(RouterConfig(**SIZES, depth=1, text_dim=text_dim, num_experts=len(KINDS))))
    with torch.no_grad():
        router.head.weight.normal_()
    router.card = {"temperature": 3.0}
    return router


def make_centroids() -> CentroidRouter:
    num = len(KINDS)
    texts = (torch.randn(num, 16), torch.eye(16))
    return CentroidRouter.fit(torch.randn(num, *SHAPE) / 4, torch.ones(num), torch.ones(num), *texts)


torch.manual_seed(0)
EXPERTS = [make_expert(kind) for kind in KINDS]
ROUTERS = {"text": make_router(16), "blind": make_router(None), "centroids": make_centroids()}
WORDS = make_text_encoder("words:16x12")


def moved(network: Any, device: torch.device) -> Any:
    return copy.deepcopy(network).to(device)


def experts_on(
    device: torch.device, conversion: str | None = None, cls: type[VelocityExpert] = VelocityExpert
) -> list[VelocityExpert]:
    experts = [Expert(moved(e.network, device), e.objective, e.calibration, e.prior) for e in EXPERTS]
    return [cls.of(e, conversion if e.calibration or conversion != "calibrated" else None) for e in experts]


def ensemble_on(device: torch.device, router: str = "text", conversion: str | None = None, num: int = 4) -> Ensemble:
    return Ensemble(experts_on(device, conversion)[:num], moved(ROUTERS[router], device) if num == 4 else None)


def sample(ensemble: Ensemble, routing: Routing | str = "top1", num_steps: int = 4, **options: Any) -> Tensor:
    """The first of four steps."""
    words = moved(WORDS, ensemble.device)
    chosen = get_routing(routing) if isinstance(routing, str) else routing
    options = {"guidance": 2.0, "labels": LABELS, **options}
    prompts, seeds = Prompts.encode(words, CAPTIONS), range(len(CAPTIONS))
    return generate(ensemble, prompts, seeds, times=GRID[: num_steps + 1], routing=chosen, **options).cpu()


def stalls_of(gpu: Gpu, run: Callable[[], object]) -> Counter[str]:
    gpu.stalls.clear()
    run()
    return Counter(gpu.stalls)


def stalls_per_step(gpu: Gpu, ensemble: Ensemble, routing: Routing | str, **options: Any) -> Counter[str]:
    """Returns the stalls of the third step; the first two are the same in both runs."""
    two, three = (stalls_of(gpu, lambda n=n: sample(ensemble, routing, n, **options)) for n in (2, 3))  # type: ignore[misc]
    return three - two


# --- parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("conversion", Conversion)
@pytest.mark.parametrize("prediction", Prediction)
def test_transfer(prediction, conversion, schedule, rng):
    schedules._table.cache_clear()
    x, times = torch.randn(3, *SHAPE, generator=rng), torch.tensor([0.0, 0.4, 1.0])
    transfer = Transfer(prediction, SCHEDULES[schedule], conversion, make_calibration())
    prior = torch.randn(3, *SHAPE, generator=rng)

    def velocities(device: torch.device) -> list[Tensor]:
        there = transfer.to(device)
        here, t, mean = (send(values, device) for values in (x, times, prior))
        return [there.velocity(lambda x, t: x / 2, here, one, towards) for one in (t, t[1]) for towards in (mean, None)]

    expected = velocities(CPU)
    with simulated_gpu() as gpu:
        found = velocities(CUDA)
        assert not gpu.stalls
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers(solver, rng):
    x, steps = torch.randn(3, *SHAPE, generator=rng), []
    expected = SOLVERS[solver](lambda x, t: x * t, x, uniform_times(5), None)
    with simulated_gpu() as gpu:
        found = SOLVERS[solver](
            lambda x, t: x * t[None], send(x, CUDA), uniform_times(5), lambda step: steps.append(float(step.t))
        )
        assert not gpu.stalls
        torch.testing.assert_close(found.cpu(), expected)
    assert steps == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_native_samplers(schedule, eta, rng):
    schedules._table.cache_clear()
    x, path = torch.randn(3, *SHAPE, generator=rng), SCHEDULES[schedule]

    def run(device: torch.device) -> Tensor:
        generators = image_generators(range(3))
        return ddim(lambda x, t: Estimate(x * t[None], x), path, send(x, device), uniform_times(5), eta, generators)

    expected = run(CPU)
    with simulated_gpu() as gpu:
        found = run(CUDA)
        assert not gpu.stalls
        torch.testing.assert_close(found.cpu(), expected)


def test_a_native_expert():
    def run(device: torch.device) -> Tensor:
        expert = Expert(moved(EXPERTS[1].network, device), EXPERTS[1].objective)
        prompts = Prompts.encode(moved(WORDS, device), CAPTIONS)
        if device == CUDA:
            gpu.stalls.clear()
        return generate_native(expert, prompts, range(5), "ancestral", uniform_times(3), 2.0)

    expected = run(CPU)
    with simulated_gpu() as gpu:
        found = run(CUDA)
        assert not gpu.stalls
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_guidance(rng):
    x = torch.randn(3, *SHAPE, generator=rng)
    with simulated_gpu() as gpu:
        velocity = guided(lambda x, t, text: x * t * text, 3.0, lambda both: 2.0)
        velocity(send(x, CUDA), torch.ones((), device=CUDA))
        assert not gpu.stalls


def test_texts(rng):
    """From ids on the host to the outputs of experts, prior and routers."""
    ids = WORDS.tokenize(CAPTIONS)
    tokens, mask = WORDS.encode(ids)
    prior = make_prior()
    with simulated_gpu() as gpu:
        words, there, experts = moved(WORDS, CUDA), prior.to(CUDA), experts_on(CUDA)
        routers = [moved(router, CUDA) for router in ROUTERS.values() if router.config.text_dim]
        gpu.stalls.clear()
        encoded = EncodedTexts.of(words, ids)
        prompts = Prompts.of(encoded, EncodedTexts.of(words, WORDS.null_ids()))
        means = [there.of(prompts.texts[number]) for number in prompts.positive]
        for reader in (*experts, *routers):
            for text in prompts.texts:
                reader.read_text(text)
        assert not gpu.stalls
        torch.testing.assert_close(torch.cat(means).cpu(), prior.of(tokens, mask))
        assert prompts.positive == (0, 1, 2, 3, 0)
        assert prompts.negative == (2,) * 5


# --- steps --------------------------------------------------------------------------------------------------------


class TestSteps:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("routing", "guidance"), [*((routing, 2.0) for routing in EVERYTHING), ("top1", 1.0), ("full", 1.0)]
    )
    def test_one_stall_to_route_and_none_where_that_is_known(self, routing, guidance):
        expected = sample(ensemble_on(CPU), routing, guidance=guidance)
        with simulated_gpu() as gpu:
            ensemble = ensemble_on(CUDA)
            found = stalls_per_step(gpu, ensemble, routing, guidance=guidance)
            assert sum(found.values()) <= (0 if routing in ("full", "oracle") else 1), found
            torch.testing.assert_close(sample(ensemble, routing, guidance=guidance), expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("number", range(4))
    def test_one_expert_never_stalls(self, number):
        with simulated_gpu() as gpu:
            ensemble = Ensemble(experts_on(CUDA)[number : number + 1])
            found = stalls_per_step(gpu, ensemble, "top1")
            assert not found, found

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("router", "routing"),
        [
            ("text", Routing(confident=0.6)), ("centroids", Routing("topk", 2, every=2)),
            ("blind", Routing("full", every=2, confident=0.6)), ("centroids", Routing("sample", confident=0.5)),
        ],
    )  # fmt: skip
    def test_a_router_that_is_asked_less(self, router, routing):
        expected = sample(ensemble_on(CPU, router), routing)
        with simulated_gpu() as gpu:
            ensemble = ensemble_on(CUDA, router)
            found = stalls_per_step(gpu, ensemble, routing)
            assert sum(found.values()) <= 1, found
            torch.testing.assert_close(sample(ensemble, routing), expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("solver", "conversion"), [*((solver, None) for solver in SOLVERS), *(("euler", name) for name in Conversion)]
    )
    def test_solvers_and_conversions(self, solver, conversion):
        """With all objectives mixed, none of them stalls; nor do watchers."""
        seen: list[object] = []
        watchers: dict[str, Any] = {"on_step": seen.append, "trace": seen.append}
        with simulated_gpu() as gpu:
            ensemble = ensemble_on(CUDA, conversion=conversion)
            found = stalls_per_step(gpu, ensemble, "full", solver=solver, **watchers)
            assert not found, found
        assert seen

    def test_two_experts_by_time_need_no_router(self):
        with simulated_gpu() as gpu:
            found = stalls_per_step(gpu, ensemble_on(CUDA, num=2), "by_time:0.7")
            assert sum(found.values()) <= 1, found

    def test_once_for_all_steps(self):
        """Texts are encoded and noise is drawn on the host; besides the steps, only the final check waits."""
        with simulated_gpu() as gpu:
            ensemble = ensemble_on(CUDA)
            prompts = Prompts.encode(moved(WORDS, CUDA), CAPTIONS)
            found = stalls_of(
                gpu, lambda: generate(ensemble, prompts, range(5), times=GRID, routing=Routing("full"), guidance=2.0)
            )
            assert sum(found.values()) == 1, found

    @pytest.mark.parametrize("look", [lambda u: u.sum().item(), Tensor.cpu, lambda u: u[u > 0], Tensor.nonzero])
    def test_a_look_is_found(self, look, monkeypatch):
        velocity = VelocityExpert.velocity

        def looking(self: VelocityExpert, x: Tensor, *args: Any) -> Tensor:
            u = velocity(self, x, *args)
            look(u)
            return u

        monkeypatch.setattr(VelocityExpert, "velocity", looking)
        with simulated_gpu() as gpu:
            assert sum(stalls_per_step(gpu, ensemble_on(CUDA), "full").values()) == len(KINDS)

    def test_a_tensor_on_the_host_is_found(self, monkeypatch):
        velocity = VelocityExpert.velocity
        monkeypatch.setattr(
            VelocityExpert, "velocity", lambda self, x, *args: velocity(self, x, *args) + torch.zeros(SHAPE)
        )
        with simulated_gpu(), pytest.raises(RuntimeError, match="same device"):
            sample(ensemble_on(CUDA))


# --- what is not finite -------------------------------------------------------------------------------------------


class Broken(VelocityExpert):
    """An expert that returns NaN below t = 0.8, and above it infinities for samples that begin with a large number."""

    def velocity(self, x: Tensor, t: Tensor, text: Any = None) -> Tensor:
        u = super().velocity(x, t, text)
        u = torch.where((x.flatten(1)[:, 0] > 1).view(-1, 1, 1, 1), torch.inf, u)
        return torch.where(t < 0.8, torch.nan, u)


def broken_on(device: torch.device, numbers: Sequence[int] = (0, 3)) -> Ensemble:
    whole, broken = experts_on(device), experts_on(device, cls=Broken)
    experts = [broken[k] if k in numbers else expert for k, expert in enumerate(whole)]
    return Ensemble(experts, moved(ROUTERS["text"], device))


def outcome(run: Callable[[], Tensor]) -> tuple[Tensor | None, list[str]]:
    """Returns a run's results, warnings and error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made, error = run(), []
        except InputError as reason:
            made, error = None, [str(reason)]
    return made, [*(str(warning.message) for warning in caught), *error]


class TestNotFinite:
    @pytest.mark.slow
    @pytest.mark.parametrize("routing", USUAL)
    def test_an_expert_that_fails_is_left_out_as_on_the_cpu(self, routing):
        """Images, warnings, and the traces of the run that counts are the same."""
        seen: dict[str, list[Routed]] = {"cpu": [], "gpu": []}

        def run(name: str, device: torch.device) -> Tensor:
            def watch(routed: Routed) -> None:
                if routed.number == 0:
                    seen[name].clear()
                seen[name].append(routed)

            return sample(broken_on(device), routing, trace=watch)

        expected, said = outcome(lambda: run("cpu", CPU))
        assert any("is not finite: it is left out" in line for line in said)
        with simulated_gpu():
            found, also_said = outcome(lambda: run("gpu", CUDA))
            weights = [routed.weights.cpu() for routed in seen["gpu"]]
        assert also_said == said
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(weights, seen["cpu"], strict=True):
            torch.testing.assert_close(ours, theirs.weights, atol=1e-4, rtol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda device: broken_on(device, range(4)), "is not finite and no other expert is left"),
            (lambda device: Ensemble(experts_on(device, cls=Broken)[:1]), "of expert_0 is not finite and no other"),
            (
                lambda device: Ensemble(experts_on(device), lambda x, t, text: x.flatten(1)[:, :4] * torch.nan),
                "the router's logits are not finite",
            ),
        ],
    )
    def test_errors_are_those_of_the_cpu(self, make, message):
        _, said = outcome(lambda: sample(make(CPU)))
        with simulated_gpu():
            _, also_said = outcome(lambda: sample(make(CUDA)))
        assert said == also_said
        assert message in said[-1]

    def test_an_expert_without_weight_has_no_say(self):
        """On a GPU, `full` runs all experts on all samples: 0 * inf must not reach the sum."""

        class Infinite(VelocityExpert):
            def velocity(self, x: Tensor, t: Tensor, text: Any = None) -> Tensor:
                evaluated.append(len(x))
                return torch.full_like(x, torch.inf)

        evaluated: list[int] = []

        def run(device: torch.device) -> Tensor:
            experts = [*experts_on(device)[:3], experts_on(device, cls=Infinite)[3]]

            def router(x: Tensor, t: Tensor, text: Any) -> Tensor:
                logits = x.flatten(1)[:, :4].clone()
                logits[:, 3] = -torch.inf
                return logits

            return sample(Ensemble(experts, router), "full")

        expected = run(CPU)
        with simulated_gpu():
            found = run(CUDA)
        assert evaluated == [2 * len(CAPTIONS)] * 4  # on the device alone, and it was not made again
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# --- a student's teacher ------------------------------------------------------------------------------------------


def prompts_of(words: TextEncoder, captions: Sequence[str]) -> Prompts:
    texts = (EncodedTexts.of(words, ids) for ids in (words.tokenize(captions), words.null_ids()))
    return Prompts.of(*texts)


@pytest.mark.parametrize("by", ROUTINGS)
def test_a_teacher(by):
    """With one time per sample, and ids and labels on the host."""
    x, t = draw_noise(image_generators(range(5)), SHAPE), torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7])

    def run(device: torch.device) -> Tensor:
        teacher = Teacher(ensemble_on(device), ROUTINGS[by], guidance=2.0)
        words, there = moved(WORDS, device), (send(x, device), send(t, device))
        if device == CUDA:
            gpu.stalls.clear()
        return teacher.velocity(*there, prompts_of(words, CAPTIONS), experts=LABELS)

    expected = run(CPU)
    with simulated_gpu() as gpu:
        found = run(CUDA)
        assert sum(gpu.stalls.values()) <= (1 if by in ("top1", "top2") else 0), gpu.stalls
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_a_mixture_that_is_not_checked_keeps_what_is_not_finite():
    x, t = draw_noise(image_generators(range(5)), SHAPE), torch.tensor(0.5)
    mixture = Mixture(broken_on(CPU), prompts_of(WORDS, CAPTIONS), Routing("full"), checked=False)
    assert bool(mixture(x, t).isnan().any())
    assert mixture.failed() == []
