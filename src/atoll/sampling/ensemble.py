"""Experts and a router as one velocity function (Eq. 1), which runs only what it needs.

Each sample of a batch has its own weights over the experts. An expert sees only the samples that give it weight, both
halves of guidance in one batch, and reads only their texts. Whether all experts are in memory or one at a time, every
sum is taken in the same order: the images are the same to the bit.

A text's keys and values leave memory with their expert. At the paper's size they are 20 MB a text and expert, so those
of 16 prompts and 8 experts would be as large as an expert; reading them anew is a fortieth of a step's work.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.diffusion.guidance import Guidance, guided
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.schedules import broadcast
from atoll.diffusion.solvers import OnStep, get_solver, uniform_times
from atoll.diffusion.transfer import Conversion
from atoll.errors import InputError, NotFiniteError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import TextContext
from atoll.networks.router import Router
from atoll.sampling.expert import FolderExpert, Prompts, Shape, TextCache, VelocityField
from atoll.sampling.routing import NEED_NO_ROUTER, Routing, mask_missing, probabilities

Logits = Callable[[Tensor, Tensor, Any], Tensor]
"""A router as a function: the whole batch's (x, t, None) -> logits[B, K]."""


class Routed(NamedTuple):
    """What an ensemble shows to whoever watches it, at each evaluation."""

    t: Tensor
    weights: Tensor  # [B, K]
    evaluated: tuple[int, ...]  # the experts that were run, in the order in which they were


Trace = Callable[[Routed], None]


class ExpertCache:
    """Experts by number, at most `max_resident` of those in folders in memory; the least recently used goes first."""

    def __init__(self, experts: Sequence[VelocityField | None], max_resident: int | None = None) -> None:
        if max_resident is not None and (type(max_resident) is not int or max_resident < 1):
            raise InputError(f"max_resident must be a whole number of at least 1, or None, but is {max_resident!r}")
        self.experts = tuple(experts)
        self.max_resident = max_resident
        self._recent: list[FolderExpert] = []  # the least recently used first

    def is_resident(self, number: int) -> bool:
        expert = self.experts[number]
        return expert.resident if isinstance(expert, FolderExpert) else expert is not None

    def take(self, number: int) -> VelocityField:
        """The expert, in memory."""
        expert = self.experts[number]
        assert expert is not None
        if isinstance(expert, FolderExpert):
            self._recent = [*(other for other in self._recent if other is not expert), expert]
            while self.max_resident is not None and len(self._recent) > self.max_resident:
                self._recent.pop(0).unload()
            expert.load()
        return expert


class Ensemble:
    """K experts, some of which may be missing (None), and a router between them; one expert needs none."""

    def __init__(
        self,
        experts: Sequence[VelocityField | None],
        router: Router | CentroidRouter | Logits | None = None,
        *,
        max_resident: int | None = None,
        temperature: float | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """`temperature` takes the place of the one on the router's card; `names` are for warnings."""
        self.cache = ExpertCache(experts, max_resident)
        self.router = router
        self.names = tuple(f"expert_{k}" for k in range(len(experts))) if names is None else tuple(names)
        card = router.card if isinstance(router, Router | CentroidRouter) else {}
        self.temperature: float = card.get("temperature", 1.0) if temperature is None else temperature
        if type(self.temperature) not in (int, float) or not 0 < self.temperature < math.inf:
            raise InputError(f"the router's temperature must be above 0 and finite, but is {self.temperature!r}")
        assert len(self.names) == len(experts)
        found = [expert for expert in experts if expert is not None]
        if not found:
            raise InputError("none of the experts is there: give at least one")
        if isinstance(router, Router | CentroidRouter) and router.config.num_experts != len(experts):
            raise InputError(
                f"the router knows {router.config.num_experts} experts, but there are {len(experts)}: "
                "give None in the place of one that is missing"
            )
        shapes = {expert.shape for expert in found if expert.shape is not None}
        if isinstance(router, Router | CentroidRouter):
            shapes |= {(router.config.in_channels, router.config.input_size, router.config.input_size)}
        if len(shapes) > 1:
            raise InputError(f"the experts and the router take latents of shapes {sorted(shapes)}: they must agree")
        self.shape: Shape | None = next(iter(shapes), None)
        self.device = found[0].device
        self.present = torch.tensor([expert is not None for expert in experts])
        self.is_flow = torch.tensor([e is not None and e.prediction is Prediction.VELOCITY for e in experts])
        missing = [name for name, expert in zip(self.names, experts, strict=True) if expert is None]
        if missing:
            warnings.warn(
                f"{', '.join(missing)} of {len(experts)} experts {'is' if len(missing) == 1 else 'are'} missing: "
                "what the router gives to them goes to the others",
                stacklevel=2,
            )

    @classmethod
    def open(
        cls,
        folders: Sequence[str | Path],
        router: Router | CentroidRouter | Logits | None = None,
        *,
        conversion: Conversion | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_resident: int | None = None,
        temperature: float | None = None,
    ) -> "Ensemble":
        """Experts from their folders, loaded when first needed; a folder that is not there is a missing expert."""
        experts = [
            FolderExpert(folder, conversion=conversion, dtype=dtype, device=device) if Path(folder).exists() else None
            for folder in folders
        ]
        names = [str(folder) for folder in folders]
        return cls(experts, router, max_resident=max_resident, temperature=temperature, names=names)

    @property
    def num_experts(self) -> int:
        return len(self.cache.experts)

    def mix(
        self,
        prompts: Prompts | None = None,
        *,
        routing: Routing = Routing(),  # noqa: B008
        guidance: Guidance = Guidance(),  # noqa: B008
        labels: Tensor | None = None,
        generators: Sequence[torch.Generator] | None = None,
        trace: Trace | None = None,
    ) -> "Mixture":
        """The velocity function of one run. `oracle` routing needs labels[B], `sample` a generator an image."""
        return Mixture(self, prompts, routing, guidance, labels, generators, trace)


class Mixture:
    """(x, t) -> velocity for one batch on its way from noise to data: texts read, and routes taken, are kept."""

    def __init__(
        self,
        ensemble: Ensemble,
        prompts: Prompts | None,
        routing: Routing,
        guidance: Guidance,
        labels: Tensor | None,
        generators: Sequence[torch.Generator] | None,
        trace: Trace | None,
    ) -> None:
        self.ensemble = ensemble
        self.prompts = prompts
        self.routing = routing
        self.guidance = guidance
        self.labels = labels
        self.generators = generators
        self.trace = trace
        self.present = ensemble.present[None].clone()  # [1 or B, K]: what fails on a sample is taken out of its run
        self._told: set[int] = set()
        readers = [expert for expert in ensemble.cache.experts if expert is not None and expert.text_dim is not None]
        router = ensemble.router
        router_reads = isinstance(router, Router) and router.config.text_dim is not None
        if prompts is None and (readers or router_reads):
            raise InputError("the experts or their router read a text: give prompts, and for none the empty string")
        if guidance.scale != 1 and readers and prompts is not None and prompts.negative is None:
            raise InputError("guidance needs a null text: encode the empty string, or a negative prompt")
        self._alone = int(ensemble.present.sum()) == 1
        if router is None and not self._alone and routing.name not in NEED_NO_ROUTER:
            raise InputError(f"{ensemble.num_experts} experts need a router for routing {routing.name!r}: give one")
        self._texts_of: dict[int, TextCache] = {}
        self._router_text = _router_text(router, prompts)
        self._logits: Tensor | None = None  # [B, K], the router's last answer on each sample
        self._open: list[int] = []  # the samples it is still asked about
        self._evaluations = 0

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """dx/dt at canonical (x, t), t 0-d or one a sample."""
        if self.prompts is not None and len(self.prompts) != len(x):
            raise InputError(f"there are {len(self.prompts)} prompts for {len(x)} samples: give one for each")
        if not bool(torch.isfinite(x).all()):
            raise InputError("x holds values that are not finite: use smaller guidance or more steps")
        if len(self.present) != len(x):
            self.present = self.ensemble.present.expand(len(x), -1).clone()
        self._ask_router(x, t)
        self._evaluations += 1
        weights = self._weights(x, t, list(range(len(x))))
        while True:
            try:
                return self._mixed(x, t, weights)
            except _NotFiniteError as failure:
                self._take_out(failure)
                # The others keep their weights: no image depends on what happened to another of its batch.
                weights = weights.index_copy(
                    0, torch.tensor(failure.rows, device=x.device), self._weights(x, t, failure.rows)
                )

    def _ask_router(self, x: Tensor, t: Tensor) -> None:
        """Bring the router's answers up to date, where they are needed."""
        router, routing = self.ensemble.router, self.routing
        if router is None or self._alone or routing.name == "oracle":
            return
        if self._logits is not None and (self._evaluations % routing.every or self._open == []):
            return
        rows = list(range(len(x))) if self._logits is None else self._open
        if isinstance(router, Router | CentroidRouter):
            where = torch.tensor(rows, device=x.device)
            here, now = (x, t) if len(rows) == len(x) else (x[where], t if t.dim() == 0 else t[where])
            fresh = self._checked(router(here.to(_dtype_of(router)), now, self._router_text(rows)), len(rows))
        else:
            fresh = self._checked(router(x, t, None), len(x))[rows]
        if len(rows) == len(x):
            self._logits = fresh
        else:
            assert self._logits is not None
            self._logits = self._logits.index_copy(0, torch.tensor(rows, device=fresh.device), fresh)
        self._open = rows
        if routing.confident is not None:
            top = probabilities(self._logits, self.ensemble.temperature, self.present).amax(1).tolist()
            self._open = [row for row in rows if top[row] < routing.confident]

    def _checked(self, logits: Tensor, num: int) -> Tensor:
        if logits.shape != (num, self.ensemble.num_experts):
            wanted = [num, self.ensemble.num_experts]
            raise InputError(f"the router's logits have shape {list(logits.shape)}, but must have {wanted}")
        return logits

    def _weights(self, x: Tensor, t: Tensor, rows: list[int]) -> Tensor:
        """w[rows, K]."""
        present = self.present[rows]
        if self._alone:
            return present.to(x)
        if self._logits is None:
            p = mask_missing(x.new_ones(len(rows), present.shape[1]), present)
        else:
            p = probabilities(self._logits[rows], self.ensemble.temperature, present).to(x.device)
        weights = self.routing.weights(
            p,
            t if t.dim() == 0 else t[rows],
            labels=None if self.labels is None else self.labels[rows],
            generators=None if self.generators is None else [self.generators[row] for row in rows],
            is_flow=self.ensemble.is_flow,
        )
        weights = mask_missing(weights, present).to(x.dtype)
        # What rounding would swallow is not run: also `full` costs little where the router is sure.
        return torch.where(weights > torch.finfo(x.dtype).eps, weights, 0)

    def _mixed(self, x: Tensor, t: Tensor, weights: Tensor) -> Tensor:
        """The experts' velocities of those samples that give them weight, added up."""
        cache = self.ensemble.cache
        chosen = weights.cpu() > 0
        needed = chosen.any(0).nonzero().flatten().tolist()
        order = sorted(needed, key=lambda number: not cache.is_resident(number))
        parts: dict[int, tuple[Tensor | None, Tensor]] = {}
        for number in order:
            rows = chosen[:, number].nonzero().flatten()
            every = len(rows) == len(x)
            where = rows.to(x.device)
            here, now = (x, t) if every else (x[where], t if t.dim() == 0 else t[where])
            try:
                u = self._velocity_of(number, here, now, rows.tolist())
            except NotFiniteError as error:  # its weights themselves
                raise _NotFiniteError(number, rows.tolist()) from error
            bad = ~torch.isfinite(u).flatten(1).all(1).cpu()
            if bool(bad.any()):
                raise _NotFiniteError(number, rows[bad].tolist())
            parts[number] = None if every else where, u
        if self.trace is not None:
            self.trace(Routed(t, weights, tuple(order)))
        total = torch.zeros_like(x)
        for number in needed:  # in this order also when `order` is another, for the same rounding
            where_, u = parts[number]
            if where_ is None:
                total += broadcast(weights[:, number], u) * u
            else:
                total.index_add_(0, where_, broadcast(weights[where_, number], u) * u)
        return total

    def _velocity_of(self, number: int, x: Tensor, t: Tensor, rows: list[int]) -> Tensor:
        cache = self.ensemble.cache
        expert = cache.take(number)
        self._texts_of = {k: texts for k, texts in self._texts_of.items() if cache.is_resident(k)}
        if expert.text_dim is None:
            return expert.velocity(x, t)
        if number not in self._texts_of:
            assert self.prompts is not None
            self._texts_of[number] = TextCache(expert.read_text, self.prompts)
        texts = self._texts_of[number]
        return guided(expert.velocity, self.guidance, lambda both: texts.context(rows, both))(x, t)

    def _take_out(self, failure: "_NotFiniteError") -> None:
        number, name = failure.number, self.ensemble.names[failure.number]
        self.present[failure.rows, number] = False
        if not bool(self.present.any(1).all()):
            raise InputError(
                f"the velocity of {name} is not finite and no other expert is left: "
                "use smaller guidance, or load other weights"
            )
        if number not in self._told:
            self._told.add(number)
            warnings.warn(
                f"the velocity of {name} is not finite: it is left out, and its weight goes to the others",
                stacklevel=3,
            )


def _router_text(
    router: Router | CentroidRouter | Logits | None, prompts: Prompts | None
) -> Callable[[list[int]], TextContext | Tensor | None]:
    """What a router is given as the text of some samples. It sees what they follow, not what they are guided from."""
    if prompts is None or not isinstance(router, Router | CentroidRouter) or router.config.text_dim is None:
        return lambda rows: None
    dtype = _dtype_of(router)
    if isinstance(router, Router):
        return TextCache(lambda text: router.read_text(text.to(router.positions.device, dtype)), prompts).context
    logits = torch.cat([router.read_text(prompts.texts[number]) for number in prompts.positive])  # [B, K]
    return lambda rows: logits[rows]


def _dtype_of(router: Router | CentroidRouter) -> torch.dtype:
    return router.positions.dtype if isinstance(router, Router) else router.means.dtype


class _NotFiniteError(Exception):
    """An expert failed on some samples; it never leaves this module."""

    def __init__(self, number: int, rows: list[int]) -> None:
        super().__init__(number)
        self.number, self.rows = number, rows


# ------------------------------------------------------------------------------------------------------------------


def image_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One an image, on the CPU: an image depends on its seed, not on its batch or the device."""
    for seed in seeds:
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise InputError(f"a seed must be a whole number from 0 to 2**63 - 1, but one is {seed!r}")
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def initial_noise(seeds: Sequence[int], shape: Shape) -> Tensor:
    """[B, *shape], each image from its own seed."""
    return noise(image_generators(seeds), shape)


def noise(generators: Sequence[torch.Generator], shape: Shape) -> Tensor:
    if not generators:
        raise InputError("there are no seeds: give one for each image")
    return torch.stack([torch.randn(shape, generator=g) for g in generators])


def generate(
    ensemble: Ensemble,
    prompts: Prompts | None,
    seeds: Sequence[int],
    *,
    solver: str = "euler",
    times: Tensor | None = None,
    routing: Routing = Routing(),  # noqa: B008
    guidance: Guidance = Guidance(),  # noqa: B008
    labels: Tensor | None = None,
    on_step: OnStep | None = None,
    trace: Trace | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """Latents [B, C, S, S], one a seed, from noise at times[0] to times[-1]; by default 50 even steps.

    `shape` is that of one sample, for experts that do not say theirs.
    """
    chosen = shape or ensemble.shape
    if chosen is None:
        raise InputError("these experts do not say what latents they take: give the shape of one")
    generators = image_generators(seeds)
    x = noise(generators, chosen).to(ensemble.device)
    velocity = ensemble.mix(
        prompts, routing=routing, guidance=guidance, labels=labels, generators=generators, trace=trace
    )
    with torch.no_grad():
        return get_solver(solver)(velocity, x, uniform_times(50) if times is None else times, on_step)
