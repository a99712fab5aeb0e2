"""`atoll evaluate`: compares models' samples of a data set's captions with its images.

OUT/pictures/   samples of the models, a file per batch, named by a hash of all that it depends on
OUT/features/   features of these and of the real images, by each network
OUT/results.json, results.md, samples.png, metrics.png

Existing files are reused, so rerunning the command resumes. Nothing is written to the data.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from atoll.cards import hash_of
from atoll.data.builtin.avatars import attributes_of
from atoll.data.shards import Dataset
from atoll.data.view import DatasetView, refuse_inside
from atoll.encoders.codecs import load_codec
from atoll.engines.engine import Engine
from atoll.errors import InputError, plural
from atoll.experiments.images import Images, RealImages, SampledImages
from atoll.experiments.measure import Figures, MetricSuite, figure, mean_of
from atoll.experiments.originals import Originals
from atoll.experiments.sanity import CHECKED, LEAST, doubt_density, doubt_features, tells
from atoll.experiments.settings import METRICS, MOST_IMAGES, MetricSettings
from atoll.experiments.tables import FLOPS, draw_metrics, over_seeds, render_table
from atoll.metrics.diversity import make_distance
from atoll.metrics.frechet import least_for_infinity
from atoll.metrics.labels import why_unreadable
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import Sampling
from atoll.storage import resolved, work_folder, write_json, write_text

ON_A_SHEET = 12
REAL = "real images"


class Contender(NamedTuple):
    """A model folder with its sampling settings, and its name in tables."""

    name: str
    model: Path
    sampling: Sampling


def name_contenders(models: Sequence[Path], sampling: Sampling) -> list[Contender]:
    """Names each model by its folder, or by its whole path if two folders have the same name."""
    names = [resolved(model).name for model in models]
    if len(set(names)) < len(names):
        names = [str(model) for model in models]
    return [Contender(name, model, sampling) for model, name in zip(models, names, strict=True)]


def evaluate(
    contenders: Sequence[Contender],
    data: Path,
    out: Path,
    settings: MetricSettings,
    cluster: int | None = None,
    progress: bool = True,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Evaluates the models, writes results.json, results.md and images, and returns the content of results.json.

    With an engine, several models are evaluated in parallel.
    """
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise InputError(f"two models have the same name among {', '.join(names)}: give each its own")
    refuse_inside(out, data)
    with work_folder(out):
        evaluation = Evaluation(data, out, settings, cluster=cluster, progress=progress)
        for contender in contenders:
            evaluation.check(contender)  # fail before hours of work on others
        judged = evaluation.real()
        if engine is None:
            judged += map(evaluation.judge, contenders)
        else:
            figures = engine.map(partial(_judge, data, out, settings, cluster), contenders)
            judged += tqdm(figures, "judging", len(contenders), disable=not progress)
        results = {**evaluation.describe(), **evaluation.doubt(judged), "models": judged}
        write_json(out / "results.json", results)
        write_text(out / "results.md", render_table(results))
        save_image(draw_metrics(judged), out / "metrics.png")
        rows = {REAL: evaluation.first_real_images()} | {one.name: evaluation.first_images(one) for one in contenders}
        save_image(draw_samples(rows, evaluation.prompts[:ON_A_SHEET]), out / "samples.png")
    return results


@cache
def open_evaluation(data: Path, out: Path, settings: MetricSettings, cluster: int | None) -> "Evaluation":
    """Returns an evaluation, opened once per process of an engine."""
    return Evaluation(data, out, settings, cluster=cluster, progress=False)


def _judge(
    data: Path, out: Path, settings: MetricSettings, cluster: int | None, contender: Contender
) -> dict[str, Any]:
    return open_evaluation(data, out, settings, cluster).judge(contender)


class Evaluation:
    """Prompts, seeds, a reference and metrics that all models share; `judge` returns the figures of one model."""

    def __init__(
        self, data: Path, out: Path, settings: MetricSettings, cluster: int | None = None, progress: bool = True
    ) -> None:
        """Opens the data, or only one `cluster` of it, and the networks of the metrics."""
        self.out, self.settings, self.progress = out, settings, progress
        self.view, self.codec = DatasetView(Dataset.open(data, cluster)), load_codec(data)
        self.split, self._rows = self._choose_rows()
        self.prompts, self._labels = (self.view.data.strings(column, self._rows) for column in ("caption", "label"))
        self._shuffled = np.random.default_rng(1).permutation(self.view.train)
        held_out = np.random.default_rng(0).permutation(self.view.held_out)
        first, second = self._shuffled, held_out
        if settings.reference_split == "held_out":
            first, second = held_out, self._shuffled
            if len(held_out) < 2:
                raise InputError(f"{self.view.name} holds nothing out to compare with: use --reference-split train")
        self._others = np.concatenate([second, first[settings.num_reference :]])  # not in the reference
        rows, self._originals = first[: settings.num_reference], None
        if settings.originals is not None:
            needed = np.concatenate([rows, self._others[: settings.num], self._shuffled[: min(CHECKED, settings.num)],
                                     self._rows[:ON_A_SHEET]])  # fmt: skip
            self._originals = Originals(settings.originals, self.view, needed, out / "originals", progress)
        self.reference = self.real_images(rows)
        self.left_out = self._find_reasons()
        self.metrics = [name for name in settings.metrics or METRICS if name not in self.left_out]
        self.suite = MetricSuite(settings, self.metrics, self.reference, out, progress)
        self.notes = self._note_sizes()

    # --- prompts and metrics ----------------------------------------------------------------------------------------

    def _choose_rows(self) -> tuple[str, NDArray[np.int64]]:
        """Returns the split and its rows, in an order that does not depend on how many are used."""
        train, held_out = self.view.train, self.view.held_out
        split = self.settings.split or ("held_out" if len(held_out) else "train")
        rows = {"held_out": held_out, "train": train, "all": np.concatenate([held_out, train])}[split]
        if not len(rows):
            name = self.view.name
            raise InputError(f"{name} holds nothing out: use --split train, or prepare it with --holdout 0.05")
        return split, np.random.default_rng(0).permutation(rows)

    def _find_reasons(self) -> dict[str, str]:
        """Returns why metrics cannot be measured; raises an InputError if one of them was requested explicitly."""
        settings, reasons = self.settings, {}
        try:
            for caption in self.prompts:
                attributes_of(caption)
        except InputError:
            reasons["accuracy"] = "the captions are not those of avatars, which alone can be read back from images"
        try:
            make_distance(settings.distance)
        except InputError as error:
            reasons["diversity"] = str(error)
        if why := why_unreadable(self.reference.labels):
            reasons["labels"] = why
        if (fewest := min(settings.num, len(self.reference.rows))) <= (num := settings.neighbours):
            needed = f"{num} neighbours need {num + 1} images, and there are {fewest}"
            reasons["coverage"] = f"{needed}: use more, or fewer --neighbours"
        if not settings.clip:
            reasons["clip"] = "no CLIP was named: give --clip HUB_ID_OR_FOLDER"
        for metric in settings.metrics:
            if metric in reasons:
                raise InputError(f"{metric} cannot be measured: {reasons[metric]}")
        return {} if settings.metrics else reasons

    def _note_sizes(self) -> list[str]:
        """Returns caveats about the figures, and records metrics for which there are too few images."""
        num, captions, notes = self.settings.num, len(self.prompts), []
        if captions < num:
            uses = f"each is used about {num / captions:.1f} times, with other noise."
            notes.append(f"{plural(captions, 'caption')} for {num} images: {uses}")
        for name, network in self.suite.networks.items() if "frechet" in self.metrics else ():
            if num <= network.dim:
                notes.append(
                    f"{num} images span fewer than the {network.dim} dimensions of {name}: for that alone the "
                    "Frechet distance is much too large, in all columns of as many images alike."
                )
            if num < (least := least_for_infinity(network.dim)):
                self.left_out[f"frechet_infinity/{name}"] = f"it needs {least} images or more: --num {least}"
        return notes

    def describe(self) -> dict[str, Any]:
        """Returns the content of results.json apart from the models."""
        card = self.view.data.card
        settings = {
            key: value for key, value in asdict(self.settings).items() if key not in ("features", "clip", "originals")
        }
        return {
            "data": {
                "name": card.source.name,
                "cluster": self.view.data.cluster,
                "fingerprint": self.view.fingerprint,
                "codec": card.codec.images,
                "license": card.license,
            },
            "prompts": {"split": self.split, "num": len(self.prompts), "hash": hash_of(self.prompts)},
            "reference": {
                "split": self.settings.reference_split,
                "num": len(self.reference.rows),
                "pictures": "decoded from latents" if self._originals is None else "originals",
            },
            "settings": {**settings, "metrics": self.metrics},
            "networks": self.suite.describe(),
            "left_out": self.left_out,
            "notes": self.notes,
        }

    # --- the data ---------------------------------------------------------------------------------------------------

    def real_images(self, rows: NDArray[np.int64], as_quilts: bool = False) -> RealImages:
        captions, labels = (self.view.data.strings(column, rows) for column in ("caption", "label"))
        return RealImages(
            name=REAL, captions=captions, labels=labels, view=self.view, codec=self.codec, rows=rows,
            as_quilts=as_quilts, originals=self._originals,
        )  # fmt: skip

    def first_real_images(self) -> Images:
        """Returns the real images of the first prompts."""
        return self.real_images(self._rows[:ON_A_SHEET]).load()

    def real(self) -> list[dict[str, Any]]:
        """Returns the figures of real images outside of the reference, which a model cannot surpass by much."""
        num = min(self.settings.num, len(self._others))
        if num < (self.settings.neighbours + 1 if "coverage" in self.metrics else 2):
            self.notes.append(
                f"Of real images outside of the reference there are {num}, too few to measure: they have no column."
            )
            return []
        if num < self.settings.num:
            self.notes.append(
                f"Only {plural(num, 'real image')} outside of the reference: their distances are larger than "
                f"those of {self.settings.num} would be."
            )
        figures = self.suite.measure(self.real_images(self._others[:num]))
        if "diversity" in self.metrics and (groups := self._alike()):
            figures |= self.suite.measure_groups(self.real_images(rows).load() for rows in groups)
        return [{"name": REAL, "num": num, "seeds": 1, "figures": figures}]

    def _alike(self) -> list[NDArray[np.int64]]:
        """Returns groups of `each` rows of the reference that share a caption."""
        rows_of: dict[str, list[int]] = {}
        for row, caption in zip(self.reference.rows.tolist(), self.reference.captions, strict=True):
            rows_of.setdefault(caption, []).append(row)
        each = self.settings.each
        return [np.array(rows[:each]) for rows in rows_of.values() if len(rows) >= each][: self.settings.varied]

    def check_features(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of equally many real images and quilts (sanity.py); {} if there are too few."""
        num = min(CHECKED, self.settings.num, len(self._others))
        if num < max(LEAST, self.settings.neighbours + 1):
            return {}
        sets = self.real_images(self._others[:num]), self.real_images(self._shuffled[:num], as_quilts=True)
        sanity = {}
        for name in self.suite.networks:
            both = [self.suite.compare(name, self.suite.vectors(name, images)) for images in sets]
            for key in both[0]:
                real, quilts = (figures[key]["value"] for figures in both)
                sanity[key] = {"real": real, "quilts": quilts, "tells": tells(key, real, quilts)}
        return sanity

    def doubt(self, judged: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns checks of whether the figures can be trusted, for results.json; also warns if they cannot."""
        sanity = self.check_features()
        sentences = [*doubt_features(sanity), *doubt_density(judged)]
        for sentence in sentences:
            warnings.warn(sentence.rstrip("."), stacklevel=3)
        return {"sanity": sanity, "notes": [*sentences, *self.notes]}

    # --- the models -------------------------------------------------------------------------------------------------

    def check(self, contender: Contender) -> None:
        """Verifies all experts and samples one image in one step; raises an InputError if the model cannot be used."""
        pipe = self.open(contender)
        pipe.settle(contender.sampling)
        quick = contender._replace(sampling=replace(contender.sampling, steps=pipe.made_for or 1))
        pipe.index.verify(pipe.folder, again=False)
        self.images(quick, pipe, [0], 0).latents(slice(0, 1))

    def judge(self, contender: Contender) -> dict[str, Any]:
        """Returns all figures of one model."""
        settings, pipe = self.settings, self.open(contender)
        sets = [self._usual_images(contender, pipe, seed) for seed in range(settings.seeds)]
        for images in sets:
            for span in images.spans("drawing", self.progress):
                images.read(span)  # fills the cache, from which each network reads
        figures, *others = [self.suite.measure(images) for images in sets]
        if others:
            figures = over_seeds([figures, *others])
        if "diversity" in self.metrics:
            figures |= self._measure_varied(contender, pipe)
        if "flops" in self.metrics:
            figures |= figure(FLOPS, sets[0].count_flops())
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
        """Returns a model's images of the first prompts, which `judge` has cached."""
        images = self._usual_images(contender, self.open(contender), 0)
        spans = islice(images.spans(), math.ceil(ON_A_SHEET / images.size))
        return np.concatenate([images.read(span) for span in spans])[:ON_A_SHEET]

    def correlate(self, contender: Contender, other: Contender) -> Figures:
        """Returns the correlation of two models' images of the same prompts, from the same and from other noise (DDM's
        Fig. 5): of pixels minus the mean image, averaged over prompts."""
        mine = self._pixels_of(contender, 0)
        figures: Figures = {}
        for kind, seed in (("same_noise", 0), ("other_noise", 1)):
            theirs = self._pixels_of(other, seed)
            lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
            figures |= figure(kind, *mean_of(((mine * theirs).sum(1) / np.maximum(lengths, 1e-9)).tolist()))
        return figures

    def _pixels_of(self, contender: Contender, seed: int) -> NDArray[np.float64]:
        """Returns a model's images of all prompts as vectors, minus their mean."""
        pixels = self._usual_images(contender, self.open(contender), seed).load(self.progress)
        vectors = pixels.reshape(len(pixels), -1).astype(np.float64)
        return vectors - vectors.mean(0)

    def open(self, contender: Contender) -> AtollPipeline:
        pipe = AtollPipeline.from_pretrained(
            contender.model, device=self.suite.device, conversion=contender.sampling.conversion
        )
        if pipe.index.latent_space.codec.images != self.view.data.card.codec.images:
            warnings.warn(
                f"{contender.name} has another codec than the data: its images are measured against what the codec "
                "of the data gives back",
                stacklevel=2,
            )
        return pipe

    def images(
        self, contender: Contender, pipe: AtollPipeline, places: Sequence[int], first_seed: int
    ) -> SampledImages:
        """Returns images of the prompts at these places, with consecutive seeds; they are sampled when read."""
        sampling, clusters = contender.sampling, None
        sampling = replace(sampling, **pipe.settle(sampling)._asdict())
        if sampling.routing == "oracle":
            clusters = self.view.data.clusters()[self._rows]
            num = pipe.index.num_experts
            if num <= (last := int(clusters.max())):
                raise InputError(
                    f"{contender.name} has {plural(num, 'expert')}, but the data has a cluster {last}: "
                    "give the data that the model was trained on, or another --routing"
                )
            clusters = clusters[places]
        captions, labels = ([texts[i] for i in places] for texts in (self.prompts, self._labels))
        return SampledImages(
            name=contender.name, captions=captions, labels=labels, size=sampling.batch, pipe=pipe, sampling=sampling,
            first_seed=first_seed, clusters=clusters, folder=self.out / "pictures",
            bound=self.view.bound if str(sampling.solver).endswith((":clip", ":dynamic")) else None,
        )  # fmt: skip

    def _usual_images(self, contender: Contender, pipe: AtollPipeline, seed: int) -> SampledImages:
        """Returns images of all prompts in turn, repeated until there are enough."""
        places = [i % len(self.prompts) for i in range(self.settings.num)]
        return self.images(contender, pipe, places, (self.settings.first_seed + seed) * MOST_IMAGES)

    def _measure_varied(self, contender: Contender, pipe: AtollPipeline) -> Figures:
        """Returns the diversity of several images per prompt, with seeds that no other images use."""
        captions, each = [*dict.fromkeys(self.prompts)][: self.settings.varied], self.settings.each
        places = [self.prompts.index(caption) for caption in captions for _ in range(each)]
        images = self.images(contender, pipe, places, 2**62 + self.settings.first_seed * MOST_IMAGES)
        pixels = images.load(self.progress)
        return self.suite.measure_groups(pixels.reshape(-1, each, *pixels.shape[1:]))
