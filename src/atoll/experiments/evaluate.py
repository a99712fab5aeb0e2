"""`atoll evaluate`: images that models make of a data set's captions, measured against its images.

OUT/pictures/KEY/     what a model has made, a file per batch; KEY stands for all that the images depend on
OUT/features/KEY/     of these images and of the real ones, by each network
OUT/results.json, results.md, samples.png, metrics.png

Whatever is there is not made again, so the same command resumes after any end. Nothing is written to the data.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.cards import hash_of
from atoll.data.builtin.avatars import attributes_of
from atoll.data.shards import Dataset
from atoll.data.view import DatasetView, refuse_inside
from atoll.diffusion.guidance import Guidance
from atoll.diffusion.solvers import uniform_times
from atoll.errors import InputError, plural
from atoll.experiments.cache import cached, write_text
from atoll.experiments.figures import METRICS, Figure, Figures, combine
from atoll.experiments.flops import counting
from atoll.experiments.measure import (
    MOST_IMAGES,
    REAL,
    Images,
    ImageSet,
    MetricSettings,
    MetricSuite,
    Vectors,
    bytes_of,
    reference_rows,
)
from atoll.experiments.sanity import doubt_density, doubt_features
from atoll.experiments.tables import draw_metrics, render_table
from atoll.metrics.diversity import find_weights
from atoll.metrics.frechet import least_for_infinity
from atoll.metrics.labels import why_unreadable
from atoll.networks.expert import Expert
from atoll.plots.canvas import save_picture
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.ensemble import generate
from atoll.sampling.expert import Prompts
from atoll.sampling.native import SAMPLERS, generate_native
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import get_routing
from atoll.sampling.settings import Sampling
from atoll.storage import alone, make_folder, resolved, write_json

ON_A_SHEET = 12
COUNTED = 8  # images of which FLOPs are counted


@dataclass(frozen=True)
class Contender:
    """A model folder, how it is to make images, and what it is called in tables."""

    name: str
    model: Path
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class SampledImages(ImageSet):
    """Images that a model makes, one of each caption, with seeds from the first on; they are kept in `folder`."""

    folder: Path
    pipe: AtollPipeline
    sampling: Sampling
    first_seed: int
    clusters: NDArray[np.int64] | None  # of the images that the captions belong to, for oracle routing

    def about(self, span: slice) -> dict[str, Any]:
        return {
            "model": self.pipe.index.hash,
            "experts": list(self.pipe.objectives),
            "sampling": asdict(self.sampling),
            "captions": list(self.captions[span]),
            "first_seed": self.first_seed + span.start,
            "device": self.pipe.device.type,
            "clusters": None if self.clusters is None else self.clusters[span].tolist(),
        }

    def read(self, span: slice) -> Images:
        """Returns some of the images, which are made where they are not there."""
        space = self.pipe.index.latent_space
        side = space.shape[1] * space.codec.factor
        shape = (span.stop - span.start, side, side, 3)
        return cached(self.folder, self.about(span), "uint8", shape, lambda: self.paint(span))

    def paint(self, span: slice) -> Images:
        return bytes_of(self.pipe.render(self.latents(span), "pt"))

    def latents(self, span: slice) -> Tensor:
        """Returns the latents of some of the images."""
        how, captions = self.sampling, self.captions[span]
        seeds = [self.first_seed + i for i in range(span.start, span.stop)]
        if how.routing != "oracle" and how.solver not in SAMPLERS:
            latents = self.pipe(
                captions, seed=seeds, output_type="latent", routing=how.routing, guidance_scale=how.guidance,
                num_inference_steps=how.steps, solver=how.solver, batch_size=how.batch, progress=False,
            ).images  # fmt: skip
            assert isinstance(latents, Tensor)
            return latents
        assert how.guidance is not None
        prompts, times = Prompts.encode(self.pipe.text_encoder, captions), uniform_times(how.steps)
        if how.solver in SAMPLERS:
            return generate_native(self._expert, prompts, seeds, how.solver, times, Guidance(how.guidance))
        assert self.clusters is not None
        return generate(
            self.pipe.ensemble, prompts, seeds, solver=how.solver, times=times, guidance=Guidance(how.guidance),
            routing=get_routing("oracle"), labels=torch.from_numpy(self.clusters[span]),
        )  # fmt: skip

    @cached_property
    def _expert(self) -> Expert:
        """Returns the one expert of a model that is sampled on its own schedule."""
        (card, *others) = self.pipe.index.experts
        if others or card is None:
            raise InputError(f"{self.sampling.solver} samples one expert on its own schedule: give a model of one")
        self.pipe.index.check_files(self.pipe.folder, card.folder)
        expert = Expert.load(self.pipe.folder / card.folder)
        expert.network.to(self.pipe.device)
        return expert

    def count_flops(self) -> float:
        """Returns the FLOPs of an image's latents, on average over a few."""
        num = min(COUNTED, len(self.captions))
        with counting() as total:
            self.latents(slice(0, num))
            return total() / num


def evaluate(
    contenders: Sequence[Contender],
    data: Path,
    out: Path,
    settings: MetricSettings,
    cluster: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Judges the models, writes results.json, results.md and images, and returns what results.json says."""
    if not contenders:
        raise InputError("there is no model to evaluate: give at least one")
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise InputError(f"two models have the same name among {', '.join(names)}: give each its own")
    refuse_inside(out, data)
    make_folder(out)
    with alone(out):
        evaluation = Evaluation(data, out, settings, cluster=cluster, progress=progress)
        for contender in contenders:
            evaluation.check(contender)  # before hours of work on others
        judged = [*evaluation.real(), *(evaluation.judge(contender) for contender in contenders)]
        results = {**evaluation.describe(), **evaluation.doubt(judged), "models": judged}
        write_json(out / "results.json", results)
        write_text(out / "results.md", render_table(results))
        save_picture(draw_metrics(judged), out / "metrics.png")
        rows = {REAL: evaluation.real_images()} | {one.name: evaluation.first_images(one) for one in contenders}
        save_picture(draw_samples(rows, evaluation.prompts[:ON_A_SHEET]), out / "samples.png")
    return results


def name_contenders(models: Sequence[Path], sampling: Sampling) -> list[Contender]:
    """Names each by its folder; by all of its path where two have the same."""
    names = [resolved(model).name for model in models]
    if len(set(names)) < len(names):
        names = [str(model) for model in models]
    return [Contender(name, model, sampling) for model, name in zip(models, names, strict=True)]


class Evaluation:
    """Prompts, seeds and a suite of metrics, the same for all models: `judge` gives the figures of one of them."""

    def __init__(
        self,
        data: Path,
        out: Path,
        settings: MetricSettings,
        prompts: Sequence[str] | None = None,
        cluster: int | None = None,
        progress: bool = True,
        reference: Vectors | None = None,
    ) -> None:
        """`prompts` take the place of the data's captions, `reference` of the features of its images.

        With `cluster`, that one alone is the data.
        """
        self.out, self.settings, self.progress = out, settings, progress
        self.view = DatasetView(Dataset.open(data, cluster))
        self.split = "given"
        self._rows: NDArray[np.int64] | None = None  # that the prompts belong to
        if prompts is None:
            self.split, self._rows = self._choose_rows()
            prompts = self.view.data.strings("caption", self._rows)
        self.prompts = list(prompts)
        if not self.prompts:
            raise InputError("there are no prompts: give at least one")
        self.left_out = self._reasons()
        self.metrics = tuple(name for name in settings.metrics or METRICS if name not in self.left_out)
        self.suite = MetricSuite(self.view, out, settings, self.metrics, progress, reference)
        self.notes: list[str] = []
        self._note_sizes()

    # --- prompts and metrics ----------------------------------------------------------------------------------------

    def _choose_rows(self) -> tuple[str, NDArray[np.int64]]:
        """Returns the split and its rows, in an order that does not depend on how many are taken."""
        view = self.view
        split = self.settings.split or ("held_out" if len(view.held_out) else "train")
        rows = {"held_out": [view.held_out], "train": [view.train], "all": [view.held_out, view.train]}[split]
        chosen = np.concatenate(rows)
        if not len(chosen):
            raise InputError(f"{view.name} holds nothing out: use --split train, or prepare it with --holdout 0.05")
        return split, np.random.default_rng(0).permutation(chosen)

    @cached_property
    def _labels(self) -> list[str]:
        """Returns those of the images that the prompts belong to; empty ones where there are none."""
        return [""] * len(self.prompts) if self._rows is None else self.view.data.strings("label", self._rows)

    def _reasons(self) -> dict[str, str]:
        """Returns why metrics cannot be measured; those that were asked for must be possible."""
        settings, reasons = self.settings, {}
        try:
            for caption in self.prompts:
                attributes_of(caption)
        except InputError:
            reasons["accuracy"] = "the captions are not those of avatars, which alone can be read back from images"
        try:
            find_weights()
        except InputError as error:
            reasons["diversity"] = str(error)
        if self._rows is None:
            reasons["labels"] = "the prompts are given, and have no labels"
        elif why := why_unreadable(self.view.data.strings("label", reference_rows(self.view, settings))):
            reasons["labels"] = why
        num, fewest = settings.neighbours, min(settings.num, settings.num_reference, len(self.view.train))
        if fewest <= num:
            reasons["coverage"] = (
                f"{num} neighbours need {num + 1} images, and there are {fewest}: use more, or fewer --neighbours"
            )
        if not settings.clip:
            reasons["clip"] = "no CLIP was named: give --clip HUB_ID_OR_FOLDER"
        for metric in settings.metrics:
            if metric in reasons:
                raise InputError(f"{metric} cannot be measured: {reasons[metric]}")
        return {} if settings.metrics else reasons

    def _note_sizes(self) -> None:
        """Notes what is to be known of the numbers before they are compared with others."""
        num, captions = self.settings.num, len(self.prompts)
        if captions < num:
            self.notes.append(
                f"{plural(captions, 'caption')} for {num} images: each is used about {num / captions:.1f} times, "
                "with other noise."
            )
        for name, network in self.suite.networks.items() if "frechet" in self.metrics else ():
            if num <= network.dim:
                self.notes.append(
                    f"{num} images span fewer than the {network.dim} dimensions of {name}: for that alone the "
                    "Frechet distance is much too large, in all columns of as many images alike."
                )
            if num < (least := least_for_infinity(network.dim)):
                self.left_out[f"frechet_infinity/{name}"] = f"it needs {least} images or more: --num {least}"

    def describe(self) -> dict[str, Any]:
        """Returns what results.json says beside the models."""
        card = self.view.data.card
        settings = {key: value for key, value in asdict(self.settings).items() if key not in ("features", "clip")}
        return {
            "data": {
                "name": card.source.name,
                "cluster": self.view.data.cluster,
                "fingerprint": self.view.fingerprint,
                "codec": card.codec.fingerprint,
                "license": card.license,
            },
            "prompts": {"split": self.split, "num": len(self.prompts), "hash": hash_of(self.prompts)},
            "reference": {"split": "train", "num": len(self.suite.rows), "pictures": "decoded from latents"},
            "settings": {**settings, "metrics": list(self.metrics)},
            "networks": self.suite.describe(),
            "left_out": self.left_out,
            "notes": self.notes,
        }

    # --- the data ---------------------------------------------------------------------------------------------------

    def real(self) -> list[dict[str, Any]]:
        """Returns the figures of real images outside of the reference: what a model cannot surpass by much."""
        num, figures = self.suite.measure_real()
        if not figures:
            self.notes.append(
                f"Of real images outside of the reference there are {num}, too few to measure: they have no column."
            )
            return []
        if num < self.settings.num:
            self.notes.append(
                f"Only {plural(num, 'real image')} outside of the reference: their distances are larger than "
                f"those of {self.settings.num} would be."
            )
        return [{"name": REAL, "num": num, "seeds": 1, "figures": self._combine([figures])}]

    def doubt(self, judged: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns whether the figures can be trusted, for results.json; what speaks against it is a warning too."""
        checks = self.suite.check()
        sentences = [*doubt_features(checks), *doubt_density(judged)]
        for sentence in sentences:
            warnings.warn(sentence.rstrip("."), stacklevel=3)
        sanity = {f"{check.metric}/{check.network}": check.describe() for check in checks}
        return {"sanity": sanity, "notes": [*sentences, *self.notes]}

    def real_images(self) -> Images:
        """Returns those that the first prompts belong to."""
        assert self._rows is not None
        return self.suite.decode(self._rows[:ON_A_SHEET])

    # --- the models -------------------------------------------------------------------------------------------------

    def check(self, contender: Contender) -> None:
        """Refuses what cannot be judged: one image is drawn, in one step."""
        quick = replace(contender, sampling=replace(contender.sampling, steps=1))
        self.images(quick, self.open(contender), np.zeros(1, np.int64), 0).latents(slice(0, 1))

    def judge(self, contender: Contender) -> dict[str, Any]:
        """Returns all figures of one model."""
        settings, pipe = self.settings, self.open(contender)
        places = np.arange(settings.num) % len(self.prompts)
        seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
        sets = [self.images(contender, pipe, places, seed * MOST_IMAGES) for seed in seeds]
        figures = self._combine([self._measure(images) for images in sets])
        if "diversity" in self.metrics:
            figures |= self._combine([self._measure_varied(contender, pipe)])
        if "flops" in self.metrics:
            figures |= self._combine([{"flops_an_image": Figure(sets[0].count_flops())}])
        return {
            "name": contender.name,
            "hash": pipe.index.hash,
            "experts": list(pipe.objectives),
            "sampling": asdict(sets[0].sampling),
            "num": settings.num,
            "seeds": settings.seeds,
            "figures": figures,
        }

    def first_images(self, contender: Contender) -> Images:
        """Returns those of the first prompts, which `judge` has made."""
        places = np.arange(self.settings.num) % len(self.prompts)
        images = self.images(contender, self.open(contender), places, self.settings.first_seed * MOST_IMAGES)
        spans = islice(images.spans(), math.ceil(ON_A_SHEET / images.size))
        return np.concatenate([images.read(span) for span in spans])[:ON_A_SHEET]

    def open(self, contender: Contender) -> AtollPipeline:
        pipe = AtollPipeline.from_pretrained(
            contender.model, device=self.suite.device, conversion=contender.sampling.conversion
        )
        if pipe.index.latent_space.codec.fingerprint != self.view.data.card.codec.fingerprint:
            warnings.warn(
                f"{contender.name} has another codec than the data: its images are measured against what the codec "
                "of the data gives back",
                stacklevel=2,
            )
        return pipe

    def images(
        self, contender: Contender, pipe: AtollPipeline, places: NDArray[np.int64], first_seed: int
    ) -> SampledImages:
        """Returns images of the prompts at these places, each with the next seed; they are made when they are read."""
        sampling, clusters = contender.sampling, None
        if sampling.guidance is None:
            sampling = replace(sampling, guidance=pipe.guidance)
        if sampling.routing == "oracle":
            clusters = self._clusters(contender, pipe)[places]
        captions, labels = ([texts[i] for i in places] for texts in (self.prompts, self._labels))
        folder = self.out / "pictures"
        return SampledImages(
            contender.name, captions, labels, sampling.batch, folder, pipe, sampling, first_seed, clusters
        )

    def _clusters(self, contender: Contender, pipe: AtollPipeline) -> NDArray[np.int64]:
        """Returns the cluster of the image that each prompt belongs to."""
        if self._rows is None:
            raise InputError("oracle routing needs the clusters of the prompts' images: take prompts from the data")
        clusters = self.view.data.clusters()[self._rows]
        if pipe.num_experts <= (last := int(clusters.max())):
            raise InputError(
                f"{contender.name} has {plural(pipe.num_experts, 'expert')}, but the data has a cluster {last}: give "
                "the data that the model was trained on, or another --routing"
            )
        return clusters

    def _measure(self, images: SampledImages) -> Figures:
        for span in images.spans("drawing", self.progress):
            images.read(span)  # into the cache, from which each network reads it
        return self.suite.measure(images, alone=self.settings.seeds == 1)

    def _measure_varied(self, contender: Contender, pipe: AtollPipeline) -> Figures:
        """Returns how much several images of each of some prompts differ, with seeds beyond those of all others."""
        firsts = [self.prompts.index(caption) for caption in [*dict.fromkeys(self.prompts)][: self.settings.varied]]
        first_seed, each = 2**62 + self.settings.first_seed * MOST_IMAGES, self.settings.each
        images = self.images(contender, pipe, np.repeat(firsts, each), first_seed)
        pixels = images.load(self.progress)
        return self.suite.measure_groups(pixels.reshape(-1, each, *pixels.shape[1:]))

    def _combine(self, sets: Sequence[Figures]) -> dict[str, dict[str, Any]]:
        return combine(sets, self.suite.describe())
