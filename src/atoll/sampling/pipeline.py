"""A pipeline that samples images from a model folder, with the interface of diffusers' pipelines.

It is not built on diffusers, whose pipeline class would be a dependency of the core and loads all parts at once; here
experts are loaded when first needed, and may be unloaded again.
"""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from atoll.cards import INDEX, ExpertCard, ModelIndex, RouterCard, require_fit, require_same
from atoll.diffusion.solvers import Step, get_solver, uniform_times
from atoll.diffusion.transfer import Conversion
from atoll.encoders.codec import FOLDER as CODEC
from atoll.encoders.codec import to_uint8
from atoll.encoders.codecs import load_codec
from atoll.encoders.pretrained import dtype_name
from atoll.encoders.text import FOLDER as TEXT
from atoll.encoders.text import TextEncoder, load_text_encoder
from atoll.errors import InputError, plural, unknown
from atoll.networks.stored import DTYPES
from atoll.plots.contact_sheet import draw_grid
from atoll.sampling.assemble import copy_model, find_model, open_router, push_model
from atoll.sampling.ensemble import Ensemble, Routed, generate
from atoll.sampling.expert import Prompts, VelocityExpert
from atoll.sampling.routing import POLICIES, Routing, get_routing, topk
from atoll.sampling.settings import GUIDANCE, SOLVER, STEPS, Sampling
from atoll.tensors import get_device

OUTPUTS = ("pil", "np", "pt", "latent")

OnStepEnd = Callable[["AtollPipeline", int, Tensor, dict[str, Tensor]], Mapping[str, Tensor] | None]
"""callback(pipe, step, t, {"latents": ..., "x0": ...}); if it returns "latents", they replace the current ones."""

_Request = tuple[str, str, int]  # the prompt, the negative prompt and the seed of an image


@dataclass(frozen=True)
class Plan:
    """Validated sampling settings, as `AtollPipeline.plan` returns them."""

    steps: int
    guidance: float
    solver: str
    routing: Routing
    experts: tuple[int, ...] | None = None  # those that may answer; None: all

    @property
    def times(self) -> Tensor:
        return uniform_times(self.steps)


class Settled(NamedTuple):
    """The sampling settings whose defaults depend on the model."""

    steps: int
    guidance: float
    solver: str


class Preview(NamedTuple):
    """The estimate of an image's final latents at t."""

    t: float
    x0: Tensor  # latents [C, S, S]


@dataclass(frozen=True, eq=False)
class ImageTrace:
    """The evaluations of the velocity of one image."""

    times: tuple[float, ...]  # from 1 down
    weights: Tensor  # [evaluations, K]; rows sum to 1
    previews: tuple[Preview, ...] = ()

    @property
    def shares(self) -> list[float]:
        """Returns each expert's share of the image: its weight, averaged over the evaluations."""
        return list(self.weights.mean(0).tolist())

    def describe(self) -> dict[str, Any]:
        """Returns the trace in the form of trace.json."""
        evaluations = [
            {"t": round(t, 6), "weights": [round(w, 6) for w in row]}
            for t, row in zip(self.times, self.weights.tolist(), strict=True)
        ]
        return {"shares": [round(share, 6) for share in self.shares], "evaluations": evaluations}


@dataclass(frozen=True, eq=False)
class Samples:
    """The result of a call: images with their seeds, prompts and traces, in the same order."""

    images: list[Image.Image] | NDArray[np.float32] | Tensor
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    trace: tuple[ImageTrace, ...]
    settings: Mapping[str, Any]  # all else that the images depend on, besides the model


class AtollPipeline:
    """Experts, router, codec and text encoder of one model folder."""

    ensemble: Ensemble
    learned_guidance: tuple[float, ...]  # of each expert that is present
    made_for: int | None  # the steps that the experts were made for; None: any number

    def __init__(
        self,
        folder: str | Path,
        *,
        max_resident: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        conversion: Conversion | str | None = None,
        revision: str | None = None,
        verify: bool = False,
        elsewhere: Mapping[int, VelocityExpert] | None = None,
    ) -> None:
        """Opens a folder that `assemble` wrote, a hub id or a federation.

        At most `max_resident` experts are in memory at once; `dtype` is that of the experts, by default as saved.
        Every file is verified against its hash in the index before first use, an expert's when its weights are first
        needed; the result is cached until the file changes. `verify` reads and checks all files now. Experts in
        `elsewhere` (`serving.remote`), by number, replace those in the folder or missing ones.
        """
        self._elsewhere = elsewhere or {}
        self.folder = folder = find_model(folder, revision)
        self.index = index = ModelIndex.read(folder)
        self.hash = index.hash
        index.verify(folder, again=verify, experts=verify)
        self.max_resident = max_resident
        self.conversion = None if conversion is None else Conversion(conversion)
        self.codec = load_codec(folder)
        self.text_encoder = load_text_encoder(folder)
        require_same(self.codec.describe(), index.latent_space.codec, "codec", folder / CODEC, INDEX)
        require_same(self.text_encoder.describe(), index.text_encoder, "text encoder", folder / TEXT, INDEX)
        self.router = None
        if index.router is not None:
            self.router = open_router(folder, index.router).float()
            for name in filter(None, (index.router.folder, index.router.centroids)):
                card = RouterCard.read(folder / name)
                require_fit(folder / name, card, index.latent_space, index.text_encoder, INDEX)
        self.device, self.dtype = get_device(device), None if dtype is None else get_dtype(dtype)
        self._open_ensemble()
        self._interrupt = False

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Self:
        """Opens a model, as the constructor does, under the name that diffusers uses."""
        return cls(folder, **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Copies the files that this was opened from to another folder; changes by `to` are not saved."""
        copy_model(self.folder, self.index, folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        prompts: Sequence[str] = ("",) * 8,
    ) -> str:
        """Uploads the model to the Hugging Face hub; returns its URL.

        The model's page shows an image of each of the `prompts`, by default unconditional ones. Without prompts there
        are no images.
        """
        grid = None
        if prompts:
            samples = self(prompts, seed=list(range(len(prompts))))
            assert isinstance(samples.images, list)
            grid = draw_grid(samples.images, prompts)
        return push_model(self.folder, repo_id, private, token, grid)

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | str | None = None
    ) -> Self:
        """Moves all parts to `device`; `dtype` is for the experts alone, and may come first, as in diffusers.

        Latents and the router stay in float32: the router is small, and its decisions should not depend on rounding.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        before = self.device, self.dtype
        self.device = self.device if device is None else get_device(device)
        self.dtype = self.dtype if dtype is None else get_dtype(dtype)
        if (self.device, self.dtype) != before:
            self._open_ensemble()
        return self

    @property
    def objectives(self) -> tuple[str, ...]:
        """Returns each expert's objective by name, "missing", or "elsewhere" if it is remote and not in the index."""
        names = zip(self.index.objectives, self.ensemble.experts, strict=True)
        return tuple("missing" if expert is None else name or "elsewhere" for name, expert in names)

    @property
    def guidance(self) -> float:
        """Returns the default guidance scale: 1 if the experts have learned guidance, since scales multiply."""
        return GUIDANCE if set(self.learned_guidance) == {1.0} else 1.0

    def settle(self, sampling: Sampling) -> "Settled":
        """Returns the settings with this model's defaults; raises an InputError for steps it was not distilled for."""
        steps, solver, made_for = sampling.steps, sampling.solver, self.made_for
        if made_for is not None and (steps not in (None, made_for) or solver not in (None, "euler")):
            raise InputError(
                f"{self.folder} was distilled to make an image in {plural(made_for, 'step')} of euler, not in "
                f"{steps or made_for} of {solver or 'euler'}: leave steps and solver out, or sample its teacher"
            )
        return Settled(
            steps or made_for or STEPS,
            self.guidance if sampling.guidance is None else float(sampling.guidance),
            solver or (SOLVER if made_for is None else "euler"),
        )

    def _open_ensemble(self) -> None:
        for network in (self.codec, self.text_encoder, self.router):
            if network is not None:
                network.to(self.device)
        index, parts = self.index, self.index.experts
        self.ensemble = Ensemble.open(
            [None if part is None else self.folder / part.folder for part in parts], self.router,
            conversion=self.conversion, dtype=self.dtype, device=self.device, max_resident=self.max_resident,
            index=index, elsewhere=self._elsewhere,
        )  # fmt: skip
        scales, few = [], set[int | None]()
        for k, (expert, part) in enumerate(zip(self.ensemble.experts, parts, strict=True)):
            card: ExpertCard | None = getattr(expert, "card", None)
            if expert is None or card is None:
                continue
            path = getattr(expert, "path", "")
            require_fit(path, card, index.latent_space, index.text_encoder, INDEX)
            if card.cluster != (expected := k if part is None else part.cluster):
                raise InputError(
                    f"{path} is the expert of cluster {card.cluster}, not of {expected}: assemble the model again"
                )
            scales.append(float(card.guidance))
            few.add(card.steps)
        self.learned_guidance = tuple(scales)
        if len(few) > 1:
            numbers = ", ".join("any number" if num is None else str(num) for num in few)
            raise InputError(
                f"the experts of {self.folder} were made for different numbers of steps ({numbers}): assemble those of "
                "one number"
            )
        self.made_for = few.pop() if few else None
        if len(set(scales)) > 1:
            warnings.warn(
                f"the experts of {self.folder} have learned guidance of {', '.join(f'{scale:g}' for scale in scales)}: "
                "whatever one asks for is on top of it, so distil them alike",
                stacklevel=3,
            )

    # --- sampling -------------------------------------------------------------------------------------------------

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        negative_prompt: str | Sequence[str] | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seed: int | Sequence[int] | None = None,
        output_type: str = "pil",
        callback_on_step_end: OnStepEnd | None = None,
        routing: str = Sampling.routing,
        route_every: int = 1,
        confident: float | None = None,
        solver: str | None = None,
        batch_size: int = Sampling.batch,
        previews: int = 0,
        experts: Sequence[int] | None = None,
        progress: bool = True,
    ) -> Samples:
        """Samples images of prompts. The same prompt and seed give the same image, whatever else is in the batch.

        `guidance_scale` defaults to 2, or to 1 for a model that has learned guidance (`atoll distill --guidance`);
        `num_inference_steps` to 20, or to those that the model was made for (`atoll distill --steps-out`). Image i of a
        prompt has the seed `seed` + i; a list holds a seed per prompt, or per image. Without `seed`, seeds are drawn
        from `generator`, by default torch's global one. `routing` is top1, topk:2, full, threshold:0.1, sample or
        by_time:0.5; the router is run at every `route_every`-th evaluation, and no longer for a sample once an expert's
        probability has reached `confident`. `previews` is the maximum number of estimates of the final latents per
        trace; `experts` are the numbers of the experts that may be used, by default all. The callback is called for one
        batch after another; on a GPU it starts again from step 0 if a batch has to be sampled again (`generate`).
        """
        if output_type not in OUTPUTS:
            raise unknown("output type", output_type, OUTPUTS)
        plan = self.plan(
            steps=num_inference_steps, guidance=guidance_scale, solver=solver, routing=routing, route_every=route_every,
            confident=confident, experts=experts,
        )  # fmt: skip
        Sampling(batch=batch_size)  # checks it
        requests = _requests(prompt, negative_prompt, seed, generator, num_images_per_prompt)
        warn_of_long_texts(self.text_encoder, {text for request in requests for text in request[:2]})

        self._interrupt = False
        images: list[Any] = []
        traces: list[ImageTrace] = []
        starts, num_steps = range(0, len(requests), batch_size), plan.steps
        shown = range(0, num_steps, -(-num_steps // previews)) if previews > 0 else range(0)
        with tqdm(total=len(starts) * num_steps, unit=" steps", disable=None if progress else True, leave=False) as bar:
            for start in starts:
                if self._interrupt:
                    break
                latents, batch_traces = self._make_batch(
                    requests[start : start + batch_size], callback_on_step_end, shown, bar,
                    solver=plan.solver, times=plan.times, routing=plan.routing, guidance=plan.guidance,
                    experts=plan.experts,
                )  # fmt: skip
                images.append(self.render(latents, output_type))
                traces += batch_traces
        prompts, negatives, seeds = zip(*requests[: len(traces)], strict=True)
        return Samples(_joined(images), seeds, prompts, negatives, tuple(traces), self.settings_of(plan))

    def plan(
        self,
        *,
        steps: int | None = None,
        guidance: float | None = None,
        solver: str | None = None,
        routing: str = Sampling.routing,
        route_every: int = 1,
        confident: float | None = None,
        experts: Sequence[int] | None = None,
    ) -> Plan:
        """Returns validated sampling settings, with defaults filled in."""
        own_steps = None if steps is None else operator.index(steps)
        settled = self.settle(Sampling(steps=own_steps, guidance=guidance, solver=solver))
        policy = get_routing(routing, operator.index(route_every), confident)
        if policy.name == "oracle":  # a prompt has no label
            raise unknown("routing", "oracle", [name for name in POLICIES if name != "oracle"])
        if policy.name == "topk" and not self.ensemble.is_alone:
            topk(torch.ones(1, self.index.num_experts), int(policy.number or 0))
        get_solver(settled.solver)
        own = None if experts is None else tuple(sorted(set(map(operator.index, experts))))
        self.ensemble.require_route(policy, own)
        return Plan(*settled, policy, own)

    def settings_of(self, plan: Plan) -> dict[str, Any]:
        """Returns all that an image depends on besides its prompts, its seed and the model."""
        settings: dict[str, Any] = {
            "steps": plan.steps,
            "guidance": plan.guidance,
            "solver": plan.solver,
            "routing": str(plan.routing),
            "route_every": plan.routing.every,
            "confident": plan.routing.confident,
            "conversion": None if self.conversion is None else self.conversion.value,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
        }
        if set(self.learned_guidance) != {1.0}:
            settings["learned_guidance"] = ", ".join(f"{scale:g}" for scale in sorted(set(self.learned_guidance)))
        if missing := [f"expert_{k}" for k, name in enumerate(self.objectives) if name == "missing"]:
            settings["missing"] = missing
        if plan.experts is not None:
            settings["experts"] = list(plan.experts)
        return settings

    def _make_batch(
        self, requests: Sequence[_Request], callback: OnStepEnd | None, shown: range, bar: Any, **options: Any
    ) -> tuple[Tensor, list[ImageTrace]]:
        """Returns the latents after the last step, and each image's trace with previews of the steps in `shown`."""
        prompts, negatives, seeds = zip(*requests, strict=True)
        evaluations: list[Routed] = []
        previews: list[Preview] = []
        latents = torch.empty(0)

        def on_step(step: Step) -> None:
            nonlocal latents
            if step.number == 0:  # `generate` may sample a batch twice
                previews.clear()
            if step.number in shown:
                previews.append(Preview(float(step.t), step.x0))
            if callback is not None:
                answer = callback(self, step.number, step.t, {"latents": step.x, "x0": step.x0})
                if answer is not None and "latents" in answer:
                    step.x.copy_(answer["latents"])  # the solver continues from this tensor
            bar.update()
            latents = step.x
            if self._interrupt:  # set by callbacks, as in diffusers
                raise _Interrupted

        def trace(routed: Routed) -> None:
            if routed.number == 0:
                evaluations.clear()
            evaluations.append(routed)

        texts = Prompts.encode(self.text_encoder, prompts, negatives)
        with suppress(_Interrupted):
            generate(self.ensemble, texts, seeds, on_step=on_step, trace=trace, **options)
        # Copied to the host only now, since each copy during sampling would synchronise the device.
        times = tuple(torch.stack([routed.t for routed in evaluations]).tolist())
        weights = torch.stack([routed.weights.float() for routed in evaluations], 1).cpu()  # [B, evaluations, K]
        previews = [Preview(t, x0.cpu()) for t, x0 in previews]
        return latents, [
            ImageTrace(times, own, tuple(Preview(t, x0[i]) for t, x0 in previews)) for i, own in enumerate(weights)
        ]

    def render(self, latents: Tensor, output_type: str = "pil") -> Any:
        """Returns latents as images: a list of PIL's, an array [B, S, S, 3] or a tensor [B, 3, S, S] in [0, 1]."""
        if not bool(torch.isfinite(latents).all()):
            raise InputError("the images are not finite: use smaller guidance or more steps")
        if output_type == "latent":
            return latents
        images = self.codec.decode(latents.to(self.device))
        if output_type == "pil":
            return [Image.fromarray(picture) for picture in to_uint8(images)]
        unit = (images.clamp(-1, 1) + 1) / 2
        return unit if output_type == "pt" else unit.permute(0, 2, 3, 1).cpu().numpy()


class _Interrupted(Exception):
    """Ends the solver early; it never leaves this module."""


# ------------------------------------------------------------------------------------------------------------------


def get_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns the dtype of that name, if experts can compute in it."""
    names = {str(known).removeprefix("torch."): known for known in DTYPES}
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise unknown("dtype", name, names)
    return names[name]


def warn_of_long_texts(encoder: TextEncoder, texts: set[str]) -> None:
    """Warns of texts that fill the encoder's tokens, since any text beyond these is cut off."""
    ordered = sorted(texts)
    ids, longer = encoder.tokenize(ordered), encoder.tokenize([f"{text} and" for text in ordered])
    for text, full in zip(ordered, (ids == longer).all(1).tolist(), strict=True):
        if full:
            warnings.warn(
                f"the prompt {text[:40]!r}... fills the {encoder.max_length} tokens that the text encoder reads: "
                "what comes after them does not count",
                stacklevel=3,
            )


def _requests(
    prompt: str | Sequence[str],
    negative: str | Sequence[str] | None,
    seed: int | Sequence[int] | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    num_each: int,
) -> list[_Request]:
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    negatives = [negative or ""] * len(prompts) if isinstance(negative, str | None) else list(negative)
    num = len(prompts) * num_each
    if num < 1:
        raise InputError("there is no prompt, or num_images_per_prompt is below 1: give at least one")
    if seed is not None and generator is not None:
        raise InputError("seeds are given or drawn from a generator, but not both: leave one of them out")
    if seed is None:
        generators = [generator] * num if isinstance(generator, torch.Generator | None) else generator
        draws = [torch.randint(2**63 - 1, (), generator=g, device=g.device if g else "cpu") for g in generators]
        seeds = [int(draw) for draw in draws]
    else:
        given: Any = seed if np.ndim(seed) else [seed] * len(prompts)
        seeds = [operator.index(one) for one in given]
        if len(seeds) == len(prompts):
            seeds = [first + i for first in seeds for i in range(num_each)]
    counts = ("negative prompt", len(negatives), "prompt", len(prompts)), ("seed", len(seeds), "image", num)
    for name, count, of, wanted in counts:
        if count != wanted:
            raise InputError(f"there are {plural(count, name)} for {plural(wanted, of)}: give one, or one for each")
    return [(prompts[i // num_each], negatives[i // num_each], seed) for i, seed in enumerate(seeds)]


def _joined(parts: list[Any]) -> Any:
    """Returns the images of all batches as one list, tensor or array."""
    if isinstance(parts[0], list):
        return [image for part in parts for image in part]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)
