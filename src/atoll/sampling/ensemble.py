"""Experts and a router as one velocity function (Eq. 1), which runs only what it needs.

Each sample of a batch has its own weights over the experts. An expert sees only the samples that give it weight, both
halves of guidance in one batch, and reads only their texts. Whether all experts are in memory or one at a time, every
sum is taken in the same order: the images are the same to the bit.

On a device one copy to the host per evaluation says which samples each expert is run on, and `full` needs none. A look
for values that are not finite would stall it more often: there they are looked for once, at the end (`generate`).

A text's keys and values leave memory with their expert. At the paper's size they are 20 MB per text and expert, so
those of 16 prompts and 8 experts would be as large as an expert; reading them anew is a fortieth of a step's work.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.diffusion.guidance import guided
from atoll.diffusion.prediction import Estimate, estimate
from atoll.diffusion.schedules import broadcast, get_schedule
from atoll.diffusion.solvers import OnStep, bounded_x0, ddim, get_solver, table_times, uniform_times
from atoll.diffusion.transfer import Conversion
from atoll.errors import InputError, NotFiniteError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import TextContext
from atoll.networks.expert import Expert
from atoll.networks.router import Router
from atoll.sampling.expert import FolderExpert, Prompts, Shape, TextCache, VelocityExpert
from atoll.sampling.routing import NEED_NO_ROUTER, Routing, mask_missing, probabilities
from atoll.tensors import send

Logits = Callable[[Tensor, Tensor, Any], Tensor]
"""A router as a function: (x, t, None) -> logits[B, K]."""


class Routed(NamedTuple):
    """What an ensemble shows to whoever watches it, at each evaluation."""

    number: int  # from 0
    t: Tensor
    weights: Tensor  # [B, K]
    evaluated: tuple[int, ...]  # the experts that were run, in the order in which they were


Trace = Callable[[Routed], None]


class Ensemble:
    """K experts, some of which may be missing (None), and a router between them; one expert needs none."""

    def __init__(
        self,
        experts: Sequence[VelocityExpert | None],
        router: Router | CentroidRouter | Logits | None = None,
        max_resident: int | None = None,
    ) -> None:
        if max_resident is not None and max_resident < 1:
            raise InputError(f"max_resident must be a whole number of at least 1, or None, but is {max_resident}")
        self.experts, self.router, self.max_resident = tuple(experts), router, max_resident
        self._recent: list[VelocityExpert] = []  # those in memory, the least recently used first
        self.temperature = 1.0
        if isinstance(router, Router | CentroidRouter):
            self.temperature = router.card.get("temperature", 1.0)
            if router.config.num_experts != len(experts):
                raise InputError(
                    f"the router knows {router.config.num_experts} experts, but there are {len(experts)}: "
                    "give None in the place of one that is missing"
                )
        first = next((expert for expert in experts if expert is not None), None)
        if first is None:
            raise InputError("none of the experts is there: give at least one")
        self.shape, self.device = first.shape, first.device
        self.present = torch.tensor([expert is not None for expert in experts])
        self.is_flow = torch.tensor([expert is not None and expert.is_flow for expert in experts])
        if missing := [f"expert_{k}" for k, expert in enumerate(experts) if expert is None]:
            warnings.warn(
                f"{', '.join(missing)} of {len(experts)} experts {'is' if len(missing) == 1 else 'are'} missing: "
                "what the router gives to them goes to the others",
                stacklevel=2,
            )

    @classmethod
    def open(
        cls,
        folders: Sequence[str | Path | None],
        router: Router | CentroidRouter | Logits | None = None,
        max_resident: int | None = None,
        **options: Any,
    ) -> "Ensemble":
        """Returns experts from their folders, loaded when first needed; a folder that is not there is a missing one.

        `options` are those of `FolderExpert`.
        """
        experts = [
            None if folder is None or not Path(folder).exists() else FolderExpert(folder, **options)
            for folder in folders
        ]
        return cls(experts, router, max_resident)

    def is_resident(self, number: int) -> bool:
        expert = self.experts[number]
        return expert is not None and expert.resident

    def take(self, number: int) -> VelocityExpert:
        """Returns an expert, in memory; at most `max_resident` of them are."""
        expert = self.experts[number]
        assert expert is not None
        self._recent = [*(other for other in self._recent if other is not expert), expert]
        while self.max_resident is not None and len(self._recent) > self.max_resident:
            self._recent.pop(0).unload()
        expert.load()
        return expert


@dataclass(eq=False)
class Mixture:
    """(x, t) -> velocity for one batch on its way from noise to data: texts read, and routes taken, are kept.

    `oracle` routing needs labels[B], `sample` a generator per image. An expert whose velocity of a sample is not finite
    is left out of its run if that is `checked`, by default on the CPU, where a look is free. Else what is not finite
    stays so: it is left to the caller.
    """

    ensemble: Ensemble
    prompts: Prompts | None = None
    routing: Routing = Routing()  # noqa: RUF009
    guidance: float = 1.0
    labels: Tensor | None = None
    generators: Sequence[torch.Generator] | None = None
    trace: Trace | None = None
    checked: bool | None = None

    def __post_init__(self) -> None:
        ensemble = self.ensemble
        if self.checked is None:
            self.checked = ensemble.device.type == "cpu"
        # What labels decide is known on the host.
        place = torch.device("cpu") if self.routing.name == "oracle" else ensemble.device
        # [1 or B, K]: what fails on a sample is taken out of its run
        self.present = send(ensemble.present[None].clone(), place)
        self._is_flow = send(ensemble.is_flow, place)
        self._alone = int(ensemble.present.sum()) == 1
        if ensemble.router is None and not self._alone and self.routing.name not in NEED_NO_ROUTER:
            raise InputError(f"the experts need a router for routing {self.routing.name!r}: give one")
        self._texts_of: dict[int, TextCache] = {}
        self._router_text = _router_text(ensemble.router, self.prompts, ensemble.device)
        self._logits: Tensor | None = None  # [B, K], the router's last answer on each sample
        self._open: list[int] = []  # the samples it is still asked about
        self._evaluations = 0

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Returns dx/dt at canonical (x, t), t 0-d or one per sample."""
        assert self.prompts is None or len(self.prompts.positive) == len(x)
        if self.checked and not bool(torch.isfinite(x).all()):
            raise InputError("x holds values that are not finite: use smaller guidance or more steps")
        if len(self.present) != len(x):
            self.present = self.present[:1].repeat(len(x), 1)
        was_asked = self._ask_router(x, t)
        p = self._probabilities(x)
        weights = self._weights(p, x, t, None)
        rows_of = self._rows_of(weights, p.amax(1, keepdim=True) if was_asked else None)
        while True:
            velocity, failed = self._mixed(x, t, weights, rows_of)
            if not failed:
                self._evaluations += 1
                return velocity
            # The others keep their weights: no image depends on what happened to another of its batch.
            places = torch.tensor(failed, device=weights.device)
            weights = weights.index_copy(0, places, self._weights(self._probabilities(x), x, t, failed))
            rows_of = self._rows_of(weights)

    def failed(self) -> list[int]:
        """Returns the experts that were left out of some sample's run; none, if that was not checked."""
        if not self.checked:
            return []
        failed: list[int] = (self.ensemble.present & ~self.present.cpu()).any(0).nonzero().flatten().tolist()
        return failed

    def _ask_router(self, x: Tensor, t: Tensor) -> bool:
        """Brings the router's answers up to date, where they are needed; returns whether it was asked."""
        router, routing = self.ensemble.router, self.routing
        if router is None or self._alone or routing.name == "oracle":
            return False
        if self._logits is not None and (self._evaluations % routing.every or self._open == []):
            return False
        self._open = list(range(len(x))) if self._logits is None else self._open
        places = _places(self._open, x)
        logits = send(router(*_part(x, t, places), self._router_text(self._open)), x.device)
        if self.checked and bool(torch.isnan(logits).any()):
            raise InputError("the router's logits are not finite: use smaller guidance, or another router")
        self._logits = logits if places is None or self._logits is None else self._logits.index_copy(0, places, logits)
        return True

    def _probabilities(self, x: Tensor) -> Tensor:
        """Returns p[B, K] by the router's last answers; equal shares if it was asked for none."""
        if self._logits is None:
            return mask_missing(torch.ones_like(self.present, dtype=x.dtype), self.present)
        return probabilities(self._logits, self.ensemble.temperature, self.present)

    def _weights(self, p: Tensor, x: Tensor, t: Tensor, rows: list[int] | None) -> Tensor:
        """Returns w[B, K], or w[rows, K]."""
        present, labels, generators = self.present, self.labels, self.generators
        if rows is not None:
            p, present, t = p[rows], present[rows], t if t.dim() == 0 else t[rows]
            labels = None if labels is None else labels[rows]
            generators = None if generators is None else [generators[row] for row in rows]
        if self._alone:
            return present.to(x.dtype)
        weights = self.routing.weights(p, t, labels=labels, generators=generators, is_flow=self._is_flow)
        weights = mask_missing(weights, present).to(x.dtype)
        # What rounding would swallow is not run: also `full` costs little where the router is sure.
        weights = torch.where(weights > torch.finfo(x.dtype).eps, weights, 0)
        if self._logits is not None and not self.checked:  # a policy would hide it: any expert can be the first of NaNs
            weights = weights.masked_fill(torch.isnan(self._logits).any(1, keepdim=True), torch.nan)
        return weights

    def _rows_of(self, weights: Tensor, top: Tensor | None = None) -> dict[int, list[int]]:
        """Returns the samples that each expert is run on: those that give it weight, by one copy to the host.

        No copy is needed for one expert, nor for `full` on a device, where all are run on all. `top`[B, 1] is how sure
        the router is if it was asked; the same copy then says which samples it will be asked about again.
        """
        confident = None if top is None else self.routing.confident
        if confident is None and (self._alone or (self.routing.name == "full" and not self.checked)):
            rows = list(range(len(weights)))
            return {k: rows for k, expert in enumerate(self.ensemble.experts) if expert is not None}
        copied = (weights if top is None else torch.cat([weights, top], 1)).cpu()
        if confident is not None:
            self._open = [row for row in self._open if float(copied[row, -1]) < confident]
        chosen = copied[:, : weights.shape[1]] != 0
        return {k: rows for k, own in enumerate(chosen.T) if (rows := own.nonzero().flatten().tolist())}

    def _mixed(self, x: Tensor, t: Tensor, weights: Tensor, rows_of: dict[int, list[int]]) -> tuple[Tensor, list[int]]:
        """Returns the sum of the experts' velocities, each of those samples that give it weight.

        If an expert fails on some samples, it is left out of their run, and it is these that are returned.
        """
        weights = send(weights, x.device)
        order = sorted(rows_of, key=lambda number: not self.ensemble.is_resident(number))
        parts: dict[int, tuple[Tensor | None, Tensor]] = {}
        for number in order:
            rows = rows_of[number]
            places = _places(rows, x)
            part, times = _part(x, t, places)
            try:
                u = self._velocity_of(number, part, times, rows)
            except NotFiniteError:  # its weights themselves
                u = torch.full_like(part, torch.nan)
            if self.checked:
                bad = ~torch.isfinite(u).flatten(1).all(1).cpu()
                if bool(bad.any()):
                    self._leave_out(number, failed := torch.tensor(rows)[bad].tolist())
                    return x, failed
            parts[number] = places, u
        if self.trace is not None:
            self.trace(Routed(self._evaluations, t, weights, tuple(order)))
        total = torch.zeros_like(x)
        for number in rows_of:  # in this order also when `order` is another, for the same rounding
            places, u = parts[number]
            if places is not None:
                total.index_add_(0, places, broadcast(weights[places, number], u) * u)
                continue
            weight = broadcast(weights[:, number], u)
            total += weight * u if self.checked else torch.where(weight == 0, 0, weight * u)  # not 0 * inf
        return total, []

    def _velocity_of(self, number: int, x: Tensor, t: Tensor, rows: list[int]) -> Tensor:
        expert = self.ensemble.take(number)
        self._texts_of = {k: texts for k, texts in self._texts_of.items() if self.ensemble.is_resident(k)}
        if expert.text_dim is None:
            return expert.velocity(x, t)
        if number not in self._texts_of:
            assert self.prompts is not None, "the experts read a text: give prompts, and for none the empty one"
            self._texts_of[number] = TextCache(expert.read_text, self.prompts)
        texts = self._texts_of[number]
        return guided(expert.velocity, self.guidance, lambda both: texts.context(rows, both))(x, t)

    def _leave_out(self, number: int, rows: list[int]) -> None:
        fault = f"the velocity of expert_{number} is not finite"
        self.present[rows, number] = False
        if not bool(self.present.any(1).all()):
            raise InputError(f"{fault} and no other expert is left: use smaller guidance, or load other weights")
        warnings.warn(f"{fault}: it is left out, and its weight goes to the others", stacklevel=4)


def _places(rows: list[int], x: Tensor) -> Tensor | None:
    """Returns the numbers of some samples where x is; None: these are all."""
    return None if len(rows) == len(x) else send(torch.tensor(rows), x.device)


def _part(x: Tensor, t: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns x and t of some samples."""
    return (x, t) if places is None else (x[places], t if t.dim() == 0 else t[places])


def _router_text(
    router: Router | CentroidRouter | Logits | None, prompts: Prompts | None, device: torch.device
) -> Callable[[list[int]], TextContext | Tensor | None]:
    """Returns what a router is given as the text of some samples: what they follow, not what they are guided from."""
    if prompts is None or not isinstance(router, Router | CentroidRouter) or router.config.text_dim is None:
        return lambda rows: None
    if isinstance(router, Router):
        return TextCache(lambda tokens: router.read_text(tokens.to(device)), prompts).context
    logits = torch.cat([router.read_text(prompts.texts[number]) for number in prompts.positive])  # [B, K]
    return lambda rows: _part(logits, logits, _places(rows, logits))[0]


# --- from noise to latents ----------------------------------------------------------------------------------------


def image_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """Returns one per image, on the CPU: an image depends on its seed, not on its batch or the device."""
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise InputError(f"a seed must be a whole number from 0 to 2**63 - 1, but one is {seed}")
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def draw_noise(generators: Sequence[torch.Generator], shape: Shape) -> Tensor:
    """Returns [B, *shape], each image from its own generator."""
    return torch.stack([torch.randn(shape, generator=g) for g in generators])


def generate(
    ensemble: Ensemble,
    prompts: Prompts | None,
    seeds: Sequence[int],
    *,
    times: Tensor | None = None,
    solver: str = "euler",
    routing: Routing = Routing(),  # noqa: B008
    guidance: float = 1.0,
    labels: Tensor | None = None,
    on_step: OnStep | None = None,
    trace: Trace | None = None,
) -> Tensor:
    """Returns latents [B, C, S, S], one per seed, from noise at times[0] to times[-1]; by default 50 even steps.

    On a device no value is looked at on the way. If the latents are not finite, they are all made again with every
    value checked, as on the CPU; `on_step` and `trace` then see that from number 0 on.
    """
    on_cpu = ensemble.device.type == "cpu"

    @torch.no_grad()
    def solve(checked: bool) -> Tensor:
        generators = image_generators(seeds)
        x = send(draw_noise(generators, ensemble.shape), ensemble.device)
        velocity = Mixture(ensemble, prompts, routing, guidance, labels, generators, trace, checked)
        return get_solver(solver)(velocity, x, uniform_times(50) if times is None else times, on_step)

    latents = solve(checked=on_cpu)
    return latents if on_cpu or bool(torch.isfinite(latents).all()) else solve(checked=True)


SAMPLERS = {"ancestral": 1.0, "ddim": 0.0}
"""How much of the posterior's noise each step of a native sampler adds: all of it is DDPM's own sampling."""


@torch.no_grad()
def generate_native(
    expert: Expert, prompts: Prompts, seeds: Sequence[int], sampler: str, times: Tensor, guidance: float,
    bound: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns latents [B, C, S, S], one per seed, by one expert on its own schedule, guided in what it predicts.

    `sampler` is ancestral or ddim. With :table it walks the 1000 cosine steps of DDPM samplers, asking the expert at
    equal SNR; with :clip or :dynamic, x0 stays within `bound`[C, 1, 1] (DDPM), or is shrunk to it by its own quantile
    (Imagen's dynamic thresholding).
    """
    name, *options = sampler.split(":")
    field, own = VelocityExpert.of(expert, Conversion.EXACT), expert.objective.path
    schedule = get_schedule("ddpm-cosine") if "table" in options else own
    if "table" in options:
        times = table_times(len(times) - 1)
    generators = image_generators(seeds)
    x = send(draw_noise(generators, field.shape), field.device)
    texts = TextCache(field.read_text, prompts)
    predict = guided(field.predict, guidance, lambda both: texts.context(range(len(seeds)), both))

    def denoise(x: Tensor, t: Tensor) -> Estimate:
        at = t if schedule is own else own.time_of(schedule.log_snr(t)).clamp(0, 1)
        found = estimate(expert.objective.prediction, predict(x, at), x, schedule(t))
        if "clip" not in options and "dynamic" not in options:
            return found
        assert bound is not None
        x0 = bounded_x0(found.x0, bound.to(x), dynamic="dynamic" in options)
        alpha, sigma, _, _ = schedule(t).broadcast(x)
        return Estimate(x0, (x - alpha * x0) / sigma)

    return ddim(denoise, schedule, x, times, SAMPLERS[name], generators)
