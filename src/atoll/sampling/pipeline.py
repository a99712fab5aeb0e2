"""A model folder as one thing that makes pictures of texts, called as diffusers' pipelines are.

diffusers itself is not needed: its pipeline class would add a dependency of the core for `from_pretrained`, and loads
every part at once, where here experts come into memory when they are first needed and may leave it again.
"""

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from atoll.cards import INDEX, CodecCard, ExpertCard, ModelIndex, RouterCard, TextEncoderCard, require_fit, require_same
from atoll.diffusion.guidance import Guidance
from atoll.diffusion.solvers import Step, get_solver, uniform_times
from atoll.diffusion.transfer import Conversion
from atoll.encoders.codecs import FOLDER as CODEC
from atoll.encoders.codecs import load_codec, pictures_of
from atoll.encoders.pretrained import dtype_name
from atoll.encoders.text import FOLDER as TEXT
from atoll.encoders.text import TOKENIZER, TextEncoder, load_text_encoder
from atoll.errors import InputError, plural, unknown
from atoll.networks.stored import DTYPES, WEIGHTS
from atoll.sampling import defaults
from atoll.sampling.assemble import copy_model, find_model, load_router, push_model
from atoll.sampling.ensemble import Ensemble, Routed, generate
from atoll.sampling.expert import FolderExpert, Prompts
from atoll.sampling.routing import POLICIES, Routing, get_routing
from atoll.sampling.trace import ImageTrace, Preview
from atoll.tensors import TensorFile

OUTPUTS = ("pil", "np", "pt", "latent")
ROUTINGS = tuple(name for name in POLICIES if name != "oracle")  # a prompt has no label
MOST_STEPS = 10_000

OnStepEnd = Callable[["AtollPipeline", int, Tensor, dict[str, Tensor]], Mapping[str, Tensor] | None]
"""callback(pipe, step, t, {"latents": ..., "x0": ...}); "latents" in what it returns take the place of these."""


@dataclass(frozen=True, eq=False)
class Samples:
    """What a run has made: an image, a seed, a prompt and a trace each, in the same order."""

    images: list[Image.Image] | NDArray[np.float32] | Tensor
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    trace: tuple[ImageTrace, ...]
    settings: Mapping[str, Any]  # what else the images depend on


class AtollPipeline:
    """Experts, router, codec and text encoder of one model folder."""

    device = torch.device("cpu")
    dtype: torch.dtype | None = None  # of the experts; None: as they were saved
    _opened: tuple[torch.device, torch.dtype | None] | None = None  # what the experts were opened with

    def __init__(
        self,
        folder: str | Path,
        *,
        max_resident: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        conversion: Conversion | str | None = None,
    ) -> None:
        self.folder = folder = Path(folder)
        self.index = ModelIndex.read(folder)
        self.max_resident = None if max_resident is None else _whole("max_resident", max_resident)
        self.conversion = None if conversion is None else Conversion(conversion)
        self.index.check_files(folder, CODEC, TEXT, TOKENIZER)
        self.codec = load_codec(folder)
        self.text_encoder = load_text_encoder(folder)
        codec = CodecCard.parse(self.codec.describe(), str(folder / CODEC))
        text = TextEncoderCard.parse(self.text_encoder.describe(), str(folder / TEXT))
        require_same(codec, self.index.latent_space.codec, "codec", folder / CODEC, INDEX)
        require_same(text, self.index.text_encoder, "text encoder", folder / TEXT, INDEX)
        self.router = None if self.index.router is None else self._open_router(self.index.router.folder)
        self.to(device, dtype)
        self._interrupt = False

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        max_resident: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        conversion: Conversion | str | None = None,
        revision: str | None = None,
        verify: bool = False,
    ) -> Self:
        """Open a folder that `assemble` has made, or a hub id.

        At most `max_resident` experts are in memory at a time; `dtype` is that of the experts, by default as they were
        saved. Every file is compared with its hash in the index before it is first used, which is remembered until the
        file changes; `verify` reads them all again.
        """
        path = find_model(folder, revision)
        if verify:
            ModelIndex.read(path).verify(path)
        return cls(path, max_resident=max_resident, dtype=dtype, device=device, conversion=conversion)

    def save_pretrained(self, folder: str | Path) -> None:
        """The files this was opened from, in another folder: what `to` has changed is not saved."""
        copy_model(self.folder, self.index, folder)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        return push_model(self.folder, repo_id, private, token)

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | str | None = None
    ) -> Self:
        """Move all of it; `dtype` is for the experts alone, and may come first, as diffusers has it.

        Latents stay in single precision, and so does the router: it is small beside them, and decides.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise InputError("there are two dtypes: give a device and a dtype, or one of them")
            device, dtype = None, device
        self.device = self.device if device is None else get_device(device)
        self.dtype = self.dtype if dtype is None else get_dtype(dtype)
        if self._opened != (self.device, self.dtype):
            for part in (self.codec, self.text_encoder, self.router):
                if isinstance(part, nn.Module):
                    part.to(self.device)
            self.ensemble = self._open_ensemble()
            self._opened = self.device, self.dtype
        return self

    @property
    def num_experts(self) -> int:
        return self.index.num_experts

    @property
    def objectives(self) -> tuple[str, ...]:
        """Each expert's by name, or "missing"."""
        found = zip(self.index.objectives, self.ensemble.present.tolist(), strict=True)
        return tuple(name if name and present else "missing" for name, present in found)

    @property
    def guidance(self) -> float:
        """With which pictures are made unless one asks for another: none on top of what the experts have learned."""
        return defaults.GUIDANCE if set(self.learned_guidance) == {1.0} else 1.0

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def _open_router(self, name: str) -> Any:
        path = self.folder / name
        self.index.check_files(self.folder, name)
        router = load_router(path)
        require_fit(path, RouterCard.read(path), self.index.latent_space, self.index.text_encoder, INDEX)
        return router.float()

    def _open_ensemble(self) -> Ensemble:
        experts = [
            None if part is None else self._open_expert(self.folder / part.folder, part.cluster)
            for part in self.index.experts
        ]
        ensemble = Ensemble(experts, self.router, max_resident=self.max_resident)
        self.learned_guidance = tuple(expert.guidance for expert in experts if expert is not None)
        if len(set(self.learned_guidance)) > 1:
            told = ", ".join(f"{scale:g}" for scale in self.learned_guidance)
            warnings.warn(
                f"the experts of {self.folder} have learned guidance of {told}: whatever one asks for is on top of it, "
                "so distil them alike",
                stacklevel=2,
            )
        return ensemble

    def _open_expert(self, path: Path, cluster: int | None) -> FolderExpert | None:
        """An expert, as far as can be told without reading its weights; None if its folder is not there."""
        if not path.exists():
            return None
        self.index.check_card(self.folder, path.name)
        check = partial(self.index.check_files, self.folder, path.name)
        expert = FolderExpert(path, conversion=self.conversion, dtype=self.dtype, device=self.device, check=check)
        card = ExpertCard.read(path)
        require_fit(path, card, self.index.latent_space, self.index.text_encoder, INDEX)
        if card.cluster != cluster:
            raise InputError(
                f"{path} is the expert of cluster {card.cluster}, not of {cluster}: assemble the model again"
            )
        with TensorFile(path / WEIGHTS, "copy the expert again from its source", self.folder):
            return expert

    # --- sampling -------------------------------------------------------------------------------------------------

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        negative_prompt: str | Sequence[str] | None = None,
        num_inference_steps: int = defaults.STEPS,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seed: int | Sequence[int] | None = None,
        output_type: str = "pil",
        callback_on_step_end: OnStepEnd | None = None,
        routing: str = defaults.ROUTING,
        route_every: int = 1,
        confident: float | None = None,
        solver: str = defaults.SOLVER,
        batch_size: int = defaults.BATCH,
        previews: int = 0,
        progress: bool = True,
    ) -> Samples:
        """Images of prompts. The same prompt and seed give the same image, whatever else is made with it.

        Without a `guidance_scale` it is 2, or 1 for a model that has learned its guidance (`atoll distill --guidance`).
        Image i of a prompt has the seed `seed` + i; a list has a seed for each prompt, or for each image. Without one,
        seeds are drawn from the generator, or from torch's own. `routing` is top1, topk:2, full, threshold:0.1,
        sample or by_time:0.5; the router is asked at every `route_every`-th evaluation, and no more about a sample once
        an expert's probability has reached `confident`. `previews` is how many estimates of the final latents each
        trace shall hold at most. Where images are split into batches, the callback sees one batch after another.
        """
        prompts, negatives = _texts_of(prompt, negative_prompt)
        if output_type not in OUTPUTS:
            raise unknown("output type", output_type, OUTPUTS)
        num_images_per_prompt = _whole("num_images_per_prompt", num_images_per_prompt)
        batch_size = _whole("batch_size", batch_size)
        steps = _whole("the number of steps", num_inference_steps, most=MOST_STEPS)
        seeds = _seeds_of(seed, generator, len(prompts), num_images_per_prompt)
        guidance = Guidance(self.guidance if guidance_scale is None else check_guidance(guidance_scale))
        chosen = self._routing(routing, route_every, confident)
        get_solver(solver)
        times = uniform_times(steps)
        warn_of_long_texts(self.text_encoder, {*prompts, *negatives})
        prompts, negatives = (
            [p for p in texts for _ in range(num_images_per_prompt)] for texts in (prompts, negatives)
        )

        self._interrupt = False
        images: list[Any] = []
        traces: list[ImageTrace] = []
        batches = range(0, len(prompts), batch_size)
        shown = _preview_steps(steps, _whole("previews", previews, least=0))
        with tqdm(total=len(batches) * steps, unit=" steps", disable=None if progress else True, leave=False) as bar:
            for first in batches:
                if self._interrupt:
                    break
                rows = slice(first, first + batch_size)
                watch = _Watch(self, callback_on_step_end, shown, bar.update)
                encoded = _encoded(self.text_encoder, prompts[rows], negatives[rows])
                try:
                    latents = generate(
                        self.ensemble, encoded, seeds[rows], solver=solver, times=times, routing=chosen,
                        guidance=guidance, on_step=watch.on_step, trace=watch.on_evaluation,
                    )  # fmt: skip
                except _Interrupted as stop:
                    latents = stop.latents
                images.append(self.render(latents, output_type))
                traces += watch.traces(len(latents))
        num = len(traces)
        settings: dict[str, Any] = {
            "steps": steps,
            "guidance": guidance.scale,
            "solver": solver,
            "routing": describe_routing(chosen),
            "route_every": chosen.every,
            "confident": chosen.confident,
            "conversion": None if self.conversion is None else self.conversion.value,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
        }
        if set(self.learned_guidance) != {1.0}:
            settings["learned_guidance"] = ", ".join(f"{scale:g}" for scale in sorted(set(self.learned_guidance)))
        present = zip(self.ensemble.names, self.ensemble.present.tolist(), strict=True)
        if missing := [name for name, here in present if not here]:
            settings["missing"] = missing
        return Samples(
            _joined(images), tuple(seeds[:num]), tuple(prompts[:num]), tuple(negatives[:num]), tuple(traces), settings
        )

    def render(self, latents: Tensor, output_type: str = "pil") -> Any:
        """Latents as pictures: a list of PIL's, an array [B, S, S, 3] or a tensor [B, 3, S, S] in [0, 1]."""
        if not bool(torch.isfinite(latents).all()):
            raise InputError("the images are not finite: use smaller guidance or more steps")
        if output_type == "latent":
            return latents
        images = self.codec.decode(latents.to(self.device))
        if output_type == "pil":
            return [Image.fromarray(picture) for picture in pictures_of(images)]
        unit = (images.clamp(-1, 1) + 1) / 2
        return unit if output_type == "pt" else unit.permute(0, 2, 3, 1).cpu().numpy()

    def _routing(self, spec: str, every: int, confident: float | None) -> Routing:
        name = str(spec).partition(":")[0]
        if name not in ROUTINGS:
            raise unknown("routing", name, ROUTINGS)
        if spec == "topk":
            spec = f"topk:{min(defaults.TOP_K, self.num_experts)}"
        confident = None if confident is None else _number("confident", confident)
        routing = get_routing(str(spec), every=_whole("route_every", every), confident=confident)
        if routing.name == "topk" and routing.k > self.num_experts:
            raise InputError(f"routing {spec} asks for more than the {self.num_experts} experts of the model")
        return routing


class _Watch:
    """What one batch shows on its way: to the callback, to the progress bar, and to its traces."""

    def __init__(
        self, pipe: AtollPipeline, callback: OnStepEnd | None, shown: frozenset[int], tick: Callable[[], object]
    ) -> None:
        self.pipe, self.callback, self.shown, self.tick = pipe, callback, shown, tick
        self.times: list[float] = []
        self.weights: list[Tensor] = []
        self.previews: list[tuple[float, Tensor]] = []

    def on_evaluation(self, routed: Routed) -> None:
        self.times.append(float(routed.t))
        self.weights.append(routed.weights.float().cpu())

    def on_step(self, step: Step) -> None:
        if step.number in self.shown:
            self.previews.append((float(step.t), step.x0.cpu()))
        if self.callback is not None:
            answer = self.callback(self.pipe, step.number, step.t, {"latents": step.x, "x0": step.x0})
            if not isinstance(answer, Mapping | None):
                raise InputError(f"the callback must give a table with 'latents', or None, but gave {answer!r:.80}")
            replaced = (answer or {}).get("latents")
            if replaced is not None and replaced is not step.x:
                if not isinstance(replaced, Tensor):
                    raise InputError(f"the callback must give latents as a tensor, but gave {replaced!r:.80}")
                if replaced.shape != step.x.shape:
                    raise InputError(
                        f"the callback gave latents {list(replaced.shape)} in place of {list(step.x.shape)}: "
                        "keep their shape"
                    )
                step.x.copy_(replaced)  # the solver goes on from this very tensor
        self.tick()
        if self.pipe.interrupt:
            raise _Interrupted(step.x)

    def traces(self, num: int) -> list[ImageTrace]:
        weights = torch.stack(self.weights, 1)  # [B, evaluations, K]
        return [
            ImageTrace(tuple(self.times), weights[i], tuple(Preview(t, x0[i]) for t, x0 in self.previews))
            for i in range(num)
        ]


class _Interrupted(Exception):
    """The caller has set `_interrupt`, as one does with diffusers; it never leaves this module."""

    def __init__(self, latents: Tensor) -> None:
        super().__init__()
        self.latents = latents


# ------------------------------------------------------------------------------------------------------------------


def check_guidance(scale: Any) -> float:
    """Returns the scale as a number; one below 0 would lead away from what is asked for."""
    value = _number("the guidance scale", scale)
    if not 0 <= value < math.inf:
        raise InputError(
            f"the guidance scale must be a finite number of at least 0, but is {value:g}: 1 is no guidance"
        )
    return value


def get_device(name: torch.device | str) -> torch.device:
    """auto, cpu, cuda or cuda:N, if it is here."""
    if isinstance(name, str) and name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"unknown device {str(name)!r}: give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(name)!r} is not supported: give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no {name} here: use cpu, or auto")
    return device


def get_dtype(given: torch.dtype | str) -> torch.dtype:
    """One that experts can compute in, also by its name."""
    names = {dtype_name(dtype): dtype for dtype in DTYPES}
    if isinstance(given, str):
        if given not in names:
            raise unknown("dtype", given, names)
        return names[given]
    if given not in DTYPES:
        name = dtype_name(given) if isinstance(given, torch.dtype) else repr(given)
        raise InputError(f"experts run in {', '.join(names)}, not in {name}: give one of these")
    return given


def describe_routing(routing: Routing) -> str:
    """As `get_routing` reads it."""
    values = {"topk": routing.k, "threshold": routing.tau, "by_time": routing.switch}
    return f"{routing.name}:{values[routing.name]}" if routing.name in values else routing.name


def warn_of_long_texts(encoder: TextEncoder, texts: set[str]) -> None:
    """Name the texts that leave no room for another word: what they have beyond it was cut off."""
    ordered = sorted(texts)
    ids, longer = encoder.tokenize(ordered), encoder.tokenize([f"{text} and" for text in ordered])
    for text, full in zip(ordered, (ids == longer).all(1).tolist(), strict=True):
        if full:
            warnings.warn(
                f"the prompt {text[:40]!r}... fills the {encoder.max_length} tokens that the text encoder reads: "
                "what comes after them does not count",
                stacklevel=3,
            )


def _encoded(encoder: TextEncoder, prompts: Sequence[str], negatives: Sequence[str]) -> Prompts:
    """Each text is encoded once, however many images are made of it."""
    distinct = list(dict.fromkeys((*prompts, *negatives)))
    found = Prompts.of(*encoder.encode(encoder.tokenize(distinct)))
    number = dict(zip(distinct, found.positive, strict=True))
    return Prompts(found.texts, tuple(number[text] for text in prompts), tuple(number[text] for text in negatives))


def _texts_of(prompt: str | Sequence[str], negative: str | Sequence[str] | None) -> tuple[Sequence[str], Sequence[str]]:
    """The prompts, and as many negative ones."""
    prompts = [prompt] if isinstance(prompt, str) else _listed("prompt", "a text", prompt)
    if negative is None or isinstance(negative, str):
        negatives = [negative or ""] * len(prompts)
    else:
        negatives = _listed("negative_prompt", "a text", negative)
    if not prompts:
        raise InputError("there is no prompt: give at least one")
    for text in (*prompts, *negatives):
        if not isinstance(text, str):
            raise InputError(f"a prompt must be a text, but one is {text!r:.80}")
    if len(negatives) != len(prompts):
        raise InputError(
            f"there are {plural(len(negatives), 'negative prompt')} for {plural(len(prompts), 'prompt')}: give one, or "
            "one for each"
        )
    return prompts, negatives


def _seeds_of(
    seed: int | Sequence[int] | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    num_prompts: int,
    num_each: int,
) -> list[int]:
    """Returns one seed per image."""
    num = num_prompts * num_each
    if seed is not None:
        if generator is not None:
            raise InputError("seeds are given or drawn from a generator, but not both: leave one of them out")
        each = [seed] * num_prompts if _is_whole(seed) else _listed("seed", "a whole number", seed)
        seeds = [_whole("a seed", one, least=0, most=2**63 - 1) for one in each]
        if len(seeds) == num_prompts:
            seeds = [first + i for first in seeds for i in range(num_each)]
        if len(seeds) != num:
            raise InputError(
                f"there are {plural(len(seeds), 'seed')} for {plural(num, 'image')}: give one, one per prompt or one "
                "per image"
            )
        return seeds
    if generator is None or isinstance(generator, torch.Generator):
        generators: list[Any] = [generator] * num
    else:
        generators = _listed("generator", "a torch.Generator", generator)
    for one in generators:
        if not isinstance(one, torch.Generator | None):
            raise InputError(f"a generator must be a torch.Generator, but one is {one!r:.80}")
    if len(generators) != num:
        raise InputError(
            f"there are {plural(len(generators), 'generator')} for {plural(num, 'image')}: give one, or one for each"
        )
    return [int(torch.randint(2**63 - 1, (), generator=g, device="cpu" if g is None else g.device)) for g in generators]


def _listed(name: str, kind: str, values: Any) -> list[Any]:
    try:
        if isinstance(values, str):
            raise TypeError
        return list(values)
    except TypeError as error:
        raise InputError(f"{name} must be {kind} or a list of such, but is {values!r:.80}") from error


def _is_whole(value: object) -> bool:
    """Python's, NumPy's and 0-d tensors' whole numbers."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, bool)


def _whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    number = operator.index(value) if _is_whole(value) else None
    if number is None or number < least or (most is not None and number > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {span}, but is {value!r:.80}")
    return number


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} must be a number, but is {value!r:.80}") from error


def _preview_steps(num_steps: int, num: int) -> frozenset[int]:
    """At most `num` steps, as far apart as each other, from the first on."""
    return frozenset(range(0, num_steps, -(-num_steps // num))) if num else frozenset()


def _joined(parts: list[Any]) -> Any:
    """The batches' images as one."""
    if not parts or isinstance(parts[0], list):
        return [image for part in parts for image in part]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)
