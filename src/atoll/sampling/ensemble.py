"""Experts and a router as one velocity function (Eq. 1), which runs only the experts it needs.

Each sample of a batch has its own weights over the experts. An expert is run only on samples that give it weight, with
both halves of guidance in one batch, and reads only their texts. Sums are always taken in the same order, so images
are bit-identical whether all experts are in memory or one at a time.

On a GPU, one copy to the host per evaluation says which samples each expert is run on; `full` needs none. Checking
every velocity for non-finite values would synchronise more often, so there only the result is checked (`generate`).

A text's keys and values are unloaded with their expert. At the paper's size they take 20 MB per text and expert, so
those of 16 prompts and 8 experts would be as large as an expert; recomputing them is a fortieth of a step's work.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from atoll.diffusion.guidance import guided
from atoll.diffusion.prediction import Estimate, estimate
from atoll.diffusion.schedules import broadcast, get_schedule
from atoll.diffusion.solvers import OnStep, bounded_x0, ddim, get_solver, table_times, uniform_times
from atoll.diffusion.transfer import Conversion
from atoll.errors import AwayError, InputError, NotFiniteError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.combined_router import CombinedRouter, CombinedText
from atoll.networks.dit import TextContext
from atoll.networks.expert import Expert
from atoll.networks.router import Router
from atoll.sampling.expert import FolderExpert, Guidance, Prompts, Shape, TextCache, VelocityExpert
from atoll.sampling.routing import NEED_NO_ROUTER, Routing, mask_missing, probabilities
from atoll.tensors import send

Logits = Callable[[Tensor, Tensor, Any], Tensor]
"""A router as a function: (x, t, None) -> logits[B, K]."""
AnyRouter = Router | CentroidRouter | CombinedRouter | Logits


class Routed(NamedTuple):
    """One evaluation of an ensemble, as passed to a trace callback."""

    number: int  # from 0
    t: Tensor
    weights: Tensor  # [B, K]
    evaluated: tuple[int, ...]  # the experts that were run, in order


Trace = Callable[[Routed], None]


@dataclass(eq=False)
class Sample:
    """One image being sampled: its settings, and the state that the mixture keeps for it."""

    present: Tensor  # [K], the experts that may answer; one that fails on this sample is removed
    text: Tensor | None = None  # [1, L, text_dim]
    negative: Tensor | None = None  # None: there is no null text, hence no guidance
    routing: Routing = Routing()  # noqa: RUF009
    guidance: float = 1.0
    label: Tensor | None = None  # [], for `oracle`
    generator: torch.Generator | None = None  # for `sample`
    alone: bool = False  # whether only one expert may answer
    logits: Tensor | None = None  # [K], the router's last answer
    is_open: bool = True  # False once the router is `confident`, and no longer run
    evaluations: int = 0
    without: set[int] = field(default_factory=set)  # experts that should have answered, but were unavailable

    @property
    def route(self) -> tuple[Routing, bool, bool]:
        """Returns the key by which samples are grouped for routing."""
        return self.routing, self.alone, self.logits is None


class Ensemble:
    """K experts, some of which may be missing (None), and a router; a single expert needs no router."""

    def __init__(
        self,
        experts: Sequence[VelocityExpert | None],
        router: AnyRouter | None = None,
        max_resident: int | None = None,
    ) -> None:
        if max_resident is not None and max_resident < 1:
            raise InputError(f"max_resident must be a whole number of at least 1, or None, but is {max_resident}")
        self.experts, self.router, self.max_resident = tuple(experts), router, max_resident
        self._recent: list[VelocityExpert] = []  # experts in memory, the least recently used first
        self.temperature = 1.0
        if isinstance(router, Router | CentroidRouter | CombinedRouter):
            self.temperature = router.card.get("temperature", 1.0)
            num = router.num_experts if isinstance(router, CombinedRouter) else router.config.num_experts
            if num != len(experts):
                raise InputError(
                    f"the router knows {num} experts, but there are {len(experts)}: "
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
        router: AnyRouter | None = None,
        max_resident: int | None = None,
        elsewhere: Mapping[int, VelocityExpert] | None = None,
        **options: Any,
    ) -> "Ensemble":
        """Returns an ensemble of experts that are loaded from their folders when first needed.

        An expert whose folder does not exist is missing. Experts in `elsewhere`, by number, replace those in folders.
        `options` are those of `FolderExpert`.
        """
        other = elsewhere or {}
        if outside := [number for number in other if number not in range(len(folders))]:
            raise InputError(
                f"there is no place for expert {outside[0]}: the model has experts 0 to {len(folders) - 1}"
            )
        experts = [
            other.get(k) or (None if folder is None or not Path(folder).exists() else FolderExpert(folder, **options))
            for k, folder in enumerate(folders)
        ]
        return cls(experts, router, max_resident)

    def is_resident(self, number: int) -> bool:
        expert = self.experts[number]
        return expert is not None and expert.resident

    @property
    def is_alone(self) -> bool:
        """Returns whether there is only one expert."""
        return int(self.present.sum()) == 1

    def is_elsewhere(self, number: int) -> bool:
        expert = self.experts[number]
        return expert is not None and expert.elsewhere

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Returns the thread pool that waits for remote experts."""
        return ThreadPoolExecutor(sum(map(self.is_elsewhere, range(len(self.experts)))), "atoll-remote")

    def may_answer(self, experts: Collection[int] | None) -> Tensor:
        """Returns present[K], restricted to these experts; None: all of them."""
        if experts is None:
            return self.present.clone()
        known = range(len(self.experts))
        if outside := [number for number in experts if number not in known]:
            raise InputError(f"there is no expert {outside[0]}: the model has the experts 0 to {known[-1]}")
        present = self.present & torch.tensor([number in experts for number in known])
        if not bool(present.any()):
            raise InputError("none of the experts that may answer is there: allow others too")
        return present

    def require_route(self, routing: Routing, experts: Collection[int] | None = None) -> None:
        """Raises an InputError if the routing needs a router and there is none."""
        alone = int(self.may_answer(experts).sum()) == 1
        if self.router is None and not alone and routing.name not in NEED_NO_ROUTER:
            raise InputError(f"the experts need a router for routing {routing.name!r}: give one")

    def make_sample(self, routing: Routing, guidance: float, experts: Collection[int] | None = None) -> Sample:
        """Returns a sample that these experts may answer, by default all."""
        present = self.may_answer(experts)
        # With oracle routing, labels on the host decide, so nothing has to be copied from the device.
        place = torch.device("cpu") if routing.name == "oracle" else self.device
        return Sample(send(present, place), routing=routing, guidance=guidance, alone=int(present.sum()) == 1)

    def take(self, number: int) -> VelocityExpert:
        """Returns an expert, loaded; unloads the least recently used ones beyond `max_resident`."""
        expert = self.experts[number]
        assert expert is not None
        if expert.elsewhere:
            return expert
        self._recent = [*(other for other in self._recent if other is not expert), expert]
        while self.max_resident is not None and len(self._recent) > self.max_resident:
            self._recent.pop(0).unload()
        expert.load()
        return expert


class Answer(NamedTuple):
    velocity: Tensor
    weights: Tensor  # [B, K]
    evaluated: tuple[int, ...]
    errors: dict[int, InputError]  # of samples that have no velocity


@dataclass(eq=False)
class Mixture:
    """(x, t) -> velocity for one batch from noise to data; keeps the texts it has read and the routers' answers.

    `oracle` routing needs labels[B], `sample` a generator per image. If `checked` (by default on the CPU, where that
    costs nothing), an expert whose velocity of a sample is not finite is left out for this sample from then on. If not
    `checked`, non-finite values are passed on to the caller. `answer` does the same for batches whose samples change,
    each with its own routing and guidance.
    """

    ensemble: Ensemble
    prompts: Prompts | None = None
    routing: Routing = Routing()  # noqa: RUF009
    guidance: float = 1.0
    labels: Tensor | None = None
    generators: Sequence[torch.Generator] | None = None
    trace: Trace | None = None
    checked: bool | None = None
    experts: Collection[int] | None = None  # those that may answer; None: all

    def __post_init__(self) -> None:
        ensemble = self.ensemble
        if self.checked is None:
            self.checked = ensemble.device.type == "cpu"
        ensemble.require_route(self.routing, self.experts)
        self.samples: list[Sample] = []  # of the batch, from the first evaluation on
        self._texts_of: dict[int, TextCache] = {}
        self._is_flow = {"cpu": ensemble.is_flow, ensemble.device.type: send(ensemble.is_flow, ensemble.device)}
        self._router_text = _router_text(ensemble.router, ensemble.device)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Returns dx/dt at canonical (x, t), t 0-d or one per sample."""
        if not self.samples:
            self.samples = self._make_samples(len(x))
        assert len(self.samples) == len(x)
        number, answer = self.samples[0].evaluations, self.answer(self.samples, x, t)
        for error in answer.errors.values():
            raise error
        if self.trace is not None:
            self.trace(Routed(number, t, answer.weights, answer.evaluated))
        return answer.velocity

    def failed(self) -> list[int]:
        """Returns the experts that were left out for some sample; none if not `checked`."""
        if not self.checked or not self.samples:
            return []
        present = torch.stack([sample.present for sample in self.samples]).cpu()
        return _rows_that((self.ensemble.may_answer(self.experts) & ~present).any(0))

    def _make_samples(self, num: int) -> list[Sample]:
        texts = None if self.prompts is None else self.prompts.guidance(self.guidance)
        first = self.ensemble.make_sample(self.routing, self.guidance, self.experts)
        return [
            replace(
                first,
                text=texts and texts.positive[row],
                negative=texts and texts.negative[row],
                label=None if self.labels is None else self.labels[row],
                generator=None if self.generators is None else self.generators[row],
                without=set(),
            )
            for row in range(num)
        ]

    @torch.no_grad()
    def answer(self, samples: Sequence[Sample], x: Tensor, t: Tensor) -> Answer:
        """Returns dx/dt of samples at canonical (x, t), with weights and errors; updates the samples' state."""
        errors: dict[int, InputError] = {}
        if self.checked:
            for row in _rows_that(~torch.isfinite(x).flatten(1).all(1)):
                errors[row] = InputError("x holds values that are not finite: use smaller guidance or more steps")
        asked = self._ask_router(samples, x, t, errors)
        p, weights = self._route(samples, x, t)
        rows_of = self._rows_of(samples, weights, errors, p if asked else None)
        away: list[tuple[int, int]] = []  # samples and unavailable experts, to be tried again at the next evaluation
        parts: dict[int, tuple[list[int], Tensor]] = {}
        while True:
            parts = {k: part for k, part in parts.items() if rows_of.get(k) == part[0]}
            order = sorted(rows_of, key=lambda number: not self.ensemble.is_resident(number))
            failed = self._run([k for k in order if k not in parts], rows_of, samples, x, t, parts)
            if not failed:
                break
            again = self._leave_out(failed, samples, away, errors)
            # Other samples keep their weights, so that no image depends on failures in others of its batch.
            left = sorted(again - errors.keys())
            if left:
                chosen = [samples[row] for row in left]
                _, new = self._route(chosen, *_part(x, t, _places(left, x)))
                weights = weights.index_copy(0, send(torch.tensor(left), weights.device), new)
            rows_of = self._rows_of(samples, weights, errors)
        for row, number in away:
            samples[row].present = _switched(samples[row].present, number, True)
        for sample in samples:
            sample.evaluations += 1
        weights, total = send(weights, x.device), torch.zeros_like(x)
        for number, rows in rows_of.items():  # always in this order, whatever `order` is, for identical rounding
            u, places = parts[number][1], _places(rows, x)
            if places is not None:
                total.index_add_(0, places, broadcast(weights[places, number], u) * u)
                continue
            weight = broadcast(weights[:, number], u)
            total += weight * u if self.checked else torch.where(weight == 0, 0, weight * u)  # not 0 * inf
        return Answer(total, weights, tuple(order), errors)

    def _leave_out(
        self, failed: dict[int, tuple[list[int], InputError]], samples: Sequence[Sample], away: list[tuple[int, int]],
        errors: dict[int, InputError],
    ) -> set[int]:  # fmt: skip
        """Removes experts from the samples that they failed on, and returns these samples.

        Unavailable experts are added to `away`, to be restored; a sample that has no expert left gets an error.
        """
        for number, (rows, fault) in failed.items():
            is_away = isinstance(fault, AwayError)
            for row in rows:
                samples[row].present = _switched(samples[row].present, number, False)
                if is_away:
                    away.append((row, number))
                    samples[row].without.add(number)
                if not bool(samples[row].present.any()):
                    advice = "ask again later" if is_away else "use smaller guidance, or load other weights"
                    errors.setdefault(row, InputError(f"{fault} and no other expert is left: {advice}"))
            if not is_away and not errors.keys() >= set(rows):
                warnings.warn(f"{fault}: it is left out, and its weight goes to the others", stacklevel=5)
        return {row for rows, _ in failed.values() for row in rows}

    def _ask_router(self, samples: Sequence[Sample], x: Tensor, t: Tensor, errors: dict[int, InputError]) -> bool:
        """Updates the router's answers for the samples that need it; returns whether the router was run."""
        router = self.ensemble.router
        rows = [
            row
            for row, sample in enumerate(samples)
            if not sample.alone
            and sample.routing.name != "oracle"
            and (sample.logits is None or (sample.is_open and sample.evaluations % sample.routing.every == 0))
        ]
        if router is None or not rows:
            return False
        texts = self._router_text([samples[row].text for row in rows])
        logits = send(router(*_part(x, t, _places(rows, x)), texts), x.device)
        if self.checked:
            for place in _rows_that(torch.isnan(logits).any(1)):
                fault = "the router's logits are not finite: use smaller guidance, or another router"
                errors.setdefault(rows[place], InputError(fault))
        for row, own in zip(rows, logits.unbind(), strict=True):
            samples[row].logits = own
        return True

    def _route(self, samples: Sequence[Sample], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns p[B, K] by the router's last answers, and w[B, K]."""
        groups: dict[object, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.route, []).append(row)
        if len(groups) == 1:
            return self._route_alike(samples, x, t)
        p, weights = torch.empty(2, len(x), len(self.ensemble.experts), dtype=x.dtype, device=x.device)
        for rows in groups.values():
            places = send(torch.tensor(rows), x.device)
            part = self._route_alike([samples[row] for row in rows], *_part(x, t, places))
            for whole, own in zip((p, weights), part, strict=True):
                whole.index_copy_(0, places, send(own, x.device).to(x.dtype))
        return p, weights

    def _route_alike(self, samples: Sequence[Sample], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        first, present = samples[0], torch.stack([sample.present for sample in samples])
        if first.logits is None:  # equal shares
            p = mask_missing(torch.ones_like(present, dtype=x.dtype), present)
        else:
            logits = torch.stack([sample.logits for sample in samples if sample.logits is not None])
            p = probabilities(logits, self.ensemble.temperature, present)
        if first.alone:
            return p, present.to(x.dtype)
        labels = [sample.label for sample in samples if sample.label is not None]
        generators = [sample.generator for sample in samples if sample.generator is not None]
        weights = first.routing.weights(
            p, t, labels=torch.stack(labels) if labels else None, generators=generators or None,
            is_flow=self._is_flow[present.device.type],
        )  # fmt: skip
        weights = mask_missing(weights, present).to(x.dtype)
        # Experts whose weight rounding would swallow are not run: so even `full` costs little where the router is sure.
        weights = torch.where(weights > torch.finfo(x.dtype).eps, weights, 0)
        if first.logits is not None and not self.checked:  # a policy would hide NaNs: argmax still picks an expert
            weights = weights.masked_fill(torch.isnan(logits).any(1, keepdim=True), torch.nan)
        return p, weights

    def _rows_of(
        self, samples: Sequence[Sample], weights: Tensor, errors: Collection[int], p: Tensor | None = None
    ) -> dict[int, list[int]]:
        """Returns the samples that each expert is run on, those that give it weight, with one copy to the host.

        No copy is needed for a single expert, nor for `full` on a GPU, where all experts are run on all samples. `p`
        are the router's probabilities if it was run; the same copy then says which samples it will be run on again.
        """
        num = weights.shape[1]
        sure = p is not None and any(sample.routing.confident is not None for sample in samples)
        all_are_full = all(sample.routing.name == "full" for sample in samples)
        if not sure and not errors and (self.ensemble.is_alone or (all_are_full and not self.checked)):
            rows = list(range(len(weights)))
            return {k: rows for k, expert in enumerate(self.ensemble.experts) if expert is not None}
        copied = (torch.cat([weights, p.amax(1, keepdim=True)], 1) if sure and p is not None else weights).cpu()
        if sure:
            for sample, top in zip(samples, copied[:, num].tolist(), strict=True):
                sample.is_open &= sample.routing.confident is None or top < sample.routing.confident
        chosen = copied[:, :num] != 0
        chosen[list(errors)] = False
        return {k: rows for k, own in enumerate(chosen.T) if (rows := _rows_that(own))}

    def _run(
        self, numbers: Sequence[int], rows_of: dict[int, list[int]], samples: Sequence[Sample], x: Tensor, t: Tensor,
        parts: dict[int, tuple[list[int], Tensor]],
    ) -> dict[int, tuple[list[int], InputError]]:  # fmt: skip
        """Adds the velocities of these experts to `parts`; returns the samples that each failed on, and the error.

        Remote experts are asked first, and answer while the local ones compute.
        """

        def ask(number: int) -> Tensor:
            rows = rows_of[number]
            return self._velocity_of(number, *_part(x, t, _places(rows, x)), [samples[row] for row in rows])

        asked = {k: self.ensemble.pool.submit(ask, k) for k in numbers if self.ensemble.is_elsewhere(k)}
        failed: dict[int, tuple[list[int], InputError]] = {}
        for number in sorted(numbers, key=lambda number: number in asked):
            rows, fault = rows_of[number], InputError(f"the velocity of expert_{number} is not finite")
            try:
                u = asked[number].result() if number in asked else ask(number)
            except AwayError as error:
                failed[number] = rows, error
                continue
            except NotFiniteError:  # of its weights
                u = torch.full_like(x if len(rows) == len(x) else x[: len(rows)], torch.nan)
            bad = _rows_that(~torch.isfinite(u).flatten(1).all(1)) if self.checked else []
            if bad:
                failed[number] = [rows[place] for place in bad], fault
            parts[number] = rows, u
        return failed

    def _velocity_of(self, number: int, x: Tensor, t: Tensor, samples: Sequence[Sample]) -> Tensor:
        expert = self.ensemble.take(number)
        for other in [k for k in self._texts_of if not self.ensemble.is_resident(k)]:
            self._texts_of.pop(other, None)
        if expert.text_dim is None:
            return expert.velocity(x, t)
        texts = [sample.text for sample in samples if sample.text is not None]
        assert len(texts) == len(samples), "the experts read a text: give prompts, and for none the empty one"
        guidance = Guidance(texts, [sample.negative for sample in samples], [sample.guidance for sample in samples])
        cache = self._texts_of.setdefault(number, TextCache(expert.read_text))
        return expert.guided_velocity(x, t, guidance, cache)


def _rows_that(are: Tensor) -> list[int]:
    rows: list[int] = are.cpu().nonzero().flatten().tolist()
    return rows


def _switched(present: Tensor, number: int, value: bool) -> Tensor:
    return present.index_fill(0, send(torch.tensor([number]), present.device), value)


def _places(rows: list[int], x: Tensor) -> Tensor | None:
    """Returns the numbers of some samples on the device of x; None: all samples."""
    return None if len(rows) == len(x) else send(torch.tensor(rows), x.device)


def _part(x: Tensor, t: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns x and t of some samples."""
    return (x, t) if places is None else (x[places], t if t.dim() == 0 else t[places])


def _router_text(
    router: AnyRouter | None, device: torch.device
) -> Callable[[Sequence[Tensor | None]], TextContext | Tensor | CombinedText | None]:
    """Returns a function from the texts that samples follow (not those they are guided from) to the router's input."""
    if isinstance(router, CombinedRouter):
        trained, centroids = (_router_text(part, device) for part in (router.trained, router.centroids))
        return lambda texts: CombinedText(trained(texts), centroids(texts))  # type: ignore[arg-type]
    if not isinstance(router, Router | CentroidRouter) or router.config.text_dim is None:
        return lambda texts: None
    if isinstance(router, Router):
        cache = TextCache(lambda tokens: router.read_text(tokens.to(device)))
        return lambda texts: None if texts[0] is None else cache.context([text for text in texts if text is not None])
    read = WeakTensorKeyDictionary()

    def logits_of(text: Tensor) -> Tensor:
        logits: Tensor = read.setdefault(text, router.read_text(text)) if text not in read else read[text]
        return logits  # [1, K]

    return lambda texts: (
        None if texts[0] is None else torch.cat([logits_of(text) for text in texts if text is not None])
    )


# --- from noise to latents ----------------------------------------------------------------------------------------


def image_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """Returns a generator per image, on the CPU: an image depends on its seed, not on its batch or the device."""
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise InputError(f"a seed must be a whole number from 0 to 2**63 - 1, but one is {seed}")
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def draw_noise(generators: Sequence[torch.Generator], shape: Shape) -> Tensor:
    """Returns noise [B, *shape], each image's from its own generator."""
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
    experts: Collection[int] | None = None,
) -> Tensor:
    """Returns latents [B, C, S, S], one per seed, solved from times[0] (noise) to times[-1]; by default 50 even steps.

    On a GPU only the result is checked. If it is not finite, all latents are sampled again with every velocity checked,
    as on the CPU; `on_step` and `trace` are then called again from number 0.
    """
    on_cpu = ensemble.device.type == "cpu"

    @torch.no_grad()
    def solve(checked: bool) -> Tensor:
        generators = image_generators(seeds)
        x = send(draw_noise(generators, ensemble.shape), ensemble.device)
        velocity = Mixture(ensemble, prompts, routing, guidance, labels, generators, trace, checked, experts)
        return get_solver(solver)(velocity, x, uniform_times(50) if times is None else times, on_step)

    latents = solve(checked=on_cpu)
    return latents if on_cpu or bool(torch.isfinite(latents).all()) else solve(checked=True)


SAMPLERS = {"ancestral": 1.0, "ddim": 0.0}
"""The share of the posterior's noise that each step of a native sampler adds; 1 is DDPM's ancestral sampling."""


@torch.no_grad()
def generate_native(
    expert: Expert, prompts: Prompts, seeds: Sequence[int], sampler: str, times: Tensor, guidance: float,
    bound: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns latents [B, C, S, S], one per seed, sampled by one expert on its own schedule, its predictions guided.

    `sampler` is ancestral or ddim. With :table it takes the 1000 cosine steps of DDPM samplers, and runs the expert at
    equal SNR; with :clip, x0 is clipped to `bound`[C, 1, 1] (DDPM); with :dynamic, it is scaled to it by its quantile
    (Imagen's dynamic thresholding).
    """
    name, *options = sampler.split(":")
    network, own = VelocityExpert.of(expert, Conversion.EXACT), expert.objective.path
    schedule = get_schedule("ddpm-cosine") if "table" in options else own
    if "table" in options:
        times = table_times(len(times) - 1)
    generators = image_generators(seeds)
    x = send(draw_noise(generators, network.shape), network.device)
    texts, cache, rows = prompts.guidance(guidance), TextCache(network.read_text), range(len(seeds))
    predict = guided(network.predict, guidance, lambda both: cache.context(texts.with_null(rows if both else ())))

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
