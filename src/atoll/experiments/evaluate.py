"""`atoll evaluate`: images that models make of a data set's captions, measured against its images.

OUT/pictures/KEY/     what a model has made, a file per batch; KEY stands for all that the images depend on
OUT/features/KEY/     of these images and of the real ones, by each network
OUT/results.json, results.md, samples.png, metrics.png

Whatever is there is not made again, so the same command resumes after any end. Nothing is written to the data.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
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
from atoll.experiments.cache import Store, write_text
from atoll.experiments.flops import counting
from atoll.experiments.judge import bytes_of
from atoll.experiments.measure import (
    METRICS,
    MOST_PICTURES,
    Figure,
    Figures,
    Images,
    MetricSettings,
    MetricSuite,
    reference_labels,
)
from atoll.experiments.sanity import crowded, doubts_about
from atoll.experiments.tables import draw_metrics, render_table
from atoll.metrics.diversity import find_weights
from atoll.metrics.frechet import least_for_infinity
from atoll.metrics.labels import why_unreadable
from atoll.networks.expert import Expert
from atoll.plots.canvas import save_picture
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling import defaults
from atoll.sampling.ensemble import generate
from atoll.sampling.expert import Prompts
from atoll.sampling.native import SAMPLERS, generate_native
from atoll.sampling.pipeline import MOST_STEPS, AtollPipeline, check_guidance
from atoll.sampling.routing import get_routing
from atoll.storage import alone, make_folder, resolved, write_json

ON_A_SHEET = 12
COUNTED = 8  # images of which FLOPs are counted
REAL = "real images"


@dataclass(frozen=True)
class Sampling:
    """How images are made."""

    routing: str = defaults.ROUTING  # also oracle: the expert of the cluster that the caption's image is in
    guidance: float | None = None  # None: as the model wants it
    steps: int = defaults.STEPS
    solver: str = defaults.SOLVER  # also ancestral and ddim, for one expert on its own schedule
    conversion: str | None = None
    batch: int = 50

    def __post_init__(self) -> None:
        for name, value, most in (("steps", self.steps, MOST_STEPS), ("batch", self.batch, MOST_PICTURES)):
            if not 1 <= value <= most:
                raise InputError(f"{name} must be a whole number from 1 to {most}, but is {value}")
        if self.guidance is not None:
            check_guidance(self.guidance)


@dataclass(frozen=True)
class Contender:
    """A model folder, how it is to make images, and what it is called in tables."""

    name: str
    model: Path
    sampling: Sampling = Sampling()


@dataclass(frozen=True, eq=False)
class SampleSet:
    """A set of images that a model is to make: one of each caption, with seeds from the first on."""

    pipe: AtollPipeline
    sampling: Sampling
    captions: list[str]
    first_seed: int
    about: dict[str, Any]  # all that the images depend on, but for how many they are
    clusters: NDArray[np.int64] | None = None  # of the images that the captions belong to

    def paint(self, some: slice, output_type: str = "pt") -> Tensor:
        """Images [n, 3, S, S] in [0, 1], or their latents."""
        seeds = [self.first_seed + i for i in range(some.start, some.stop)]
        captions, how = self.captions[some], self.sampling
        if how.routing != "oracle" and how.solver not in SAMPLERS:
            images = self.pipe(
                captions, seed=seeds, output_type=output_type, routing=how.routing, guidance_scale=how.guidance,
                num_inference_steps=how.steps, solver=how.solver, batch_size=how.batch, progress=False,
            ).images  # fmt: skip
            assert isinstance(images, Tensor)
            return images
        prompts, times = Prompts.encode(self.pipe.text_encoder, captions, ""), uniform_times(how.steps)
        assert how.guidance is not None
        guidance = Guidance(how.guidance)
        if how.solver in SAMPLERS:
            latents = generate_native(self._native, prompts, seeds, how.solver, times, guidance)
        else:
            assert self.clusters is not None
            latents = generate(
                self.pipe.ensemble, prompts, seeds, solver=how.solver, times=times, guidance=guidance,
                routing=get_routing("oracle"), labels=torch.from_numpy(self.clusters[some]),
            )  # fmt: skip
        rendered: Tensor = self.pipe.render(latents, output_type)
        return rendered

    @cached_property
    def _native(self) -> Expert:
        """The one expert of a model that is sampled on its own schedule."""
        (found, *others) = self.pipe.index.experts
        if others or found is None:
            raise InputError(f"{self.sampling.solver} samples one expert on its own schedule: give a model of one")
        self.pipe.index.check_files(self.pipe.folder, found.folder)
        expert = Expert.load(self.pipe.folder / found.folder)
        expert.network.to(self.pipe.device)
        return expert


def evaluate(
    contenders: Sequence[Contender],
    data: Path,
    out: Path,
    settings: MetricSettings,
    cluster: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Judge the models, write results.json, results.md and images, and return what results.json says."""
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
    """Each by the name of its folder; by all of its path where two have the same."""
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
    ) -> None:
        """`prompts` take the place of the data's captions; with `cluster`, that one alone is the data."""
        self.out, self.settings, self.progress = out, settings, progress
        self.rows = DatasetView(Dataset.open(data, cluster))
        self.split, self._prompt_rows, self.prompts = self._choose_prompts(prompts)
        self.left_out: dict[str, str] = {}
        self.notes: list[str] = []
        self.metrics = self._choose_metrics()
        self.suite = MetricSuite(self.rows, out, settings, self.metrics, progress)
        self._note_sizes()

    # --- prompts and metrics ----------------------------------------------------------------------------------------

    def _choose_prompts(self, given: Sequence[str] | None) -> tuple[str, NDArray[np.int64] | None, list[str]]:
        """The split, its rows and their captions, in an order that does not depend on how many are taken."""
        if given is not None:
            if not given:
                raise InputError("there are no prompts: give at least one")
            return "given", None, list(given)
        rows = self.rows
        split = self.settings.split or ("held_out" if len(rows.held_out) else "train")
        both = np.concatenate([rows.held_out, rows.train])
        chosen = {"held_out": rows.held_out, "train": rows.train, "all": both}[split]
        if not len(chosen):
            raise InputError(f"{rows.name} holds nothing out: use --split train, or prepare it with --holdout 0.05")
        chosen = np.random.default_rng(0).permutation(chosen)
        return split, chosen, rows.data.texts("caption", chosen)

    @cached_property
    def _labels(self) -> list[str]:
        """Of the images that the prompts belong to; empty where there are none."""
        if self._prompt_rows is None:
            return [""] * len(self.prompts)
        return self.rows.data.texts("label", self._prompt_rows)

    def _choose_metrics(self) -> tuple[str, ...]:
        """Those asked for, which must be possible; or all that are."""
        wanted = self.settings.metrics or METRICS
        reasons = {
            "accuracy": self._why_no_accuracy(),
            "diversity": _why_no_lpips(),
            "labels": self._why_no_labels(),
            "coverage": self._why_no_coverage(),
            "clip": "" if self.settings.clip else "no CLIP was named: give --clip HUB_ID_OR_FOLDER",
        }
        for metric, reason in reasons.items():
            if reason and metric in self.settings.metrics:
                raise InputError(f"{metric} cannot be measured: {reason}")
            if reason and metric in wanted:
                self.left_out[metric] = reason
        return tuple(metric for metric in wanted if metric not in self.left_out)

    def _why_no_accuracy(self) -> str:
        try:
            for caption in self.prompts:
                attributes_of(caption)
        except InputError:
            return "the captions are not those of avatars, which alone can be read back from images"
        return ""

    def _why_no_labels(self) -> str:
        if self._prompt_rows is None:
            return "the prompts are given, and have no labels"
        return why_unreadable(reference_labels(self.rows, self.settings))

    def _why_no_coverage(self) -> str:
        least = self.settings.neighbours + 1
        fewest = min(self.settings.num, self.settings.num_reference, len(self.rows.train))
        if fewest >= least:
            return ""
        return f"{least - 1} neighbours need {least} images, and there are {fewest}: use more, or fewer --neighbours"

    def _note_sizes(self) -> None:
        """What is to be known of the numbers before they are compared with others."""
        num, captions = self.settings.num, len(self.prompts)
        if captions < num:
            self.notes.append(
                f"{plural(captions, 'caption')} for {num} images: each is used about {num / captions:.1f} times, "
                "with other noise."
            )
        if "frechet" not in self.metrics:
            return
        for name, network in self.suite.networks.items():
            if num <= network.dim:
                self.notes.append(
                    f"{num} images span fewer than the {network.dim} dimensions of {name}: for that alone the "
                    "Frechet distance is much too large, in all columns of as many images alike."
                )
            if num < (least := least_for_infinity(network.dim)):
                self.left_out[f"frechet_infinity/{name}"] = f"it needs {least} images or more: --num {least}"

    def describe(self) -> dict[str, Any]:
        """What results.json says beside the models."""
        card = self.rows.data.card
        settings = {key: value for key, value in asdict(self.settings).items() if key not in ("features", "clip")}
        return {
            "data": {
                "name": card.source.name,
                "cluster": self.rows.data.cluster,
                "fingerprint": self.rows.fingerprint,
                "codec": card.codec.fingerprint,
                "license": card.license,
            },
            "prompts": {"split": self.split, "num": len(self.prompts), "hash": hash_of(self.prompts)},
            "reference": {"split": "train", "num": self.suite.num_reference, "pictures": "decoded from latents"},
            "settings": {**settings, "metrics": list(self.metrics)},
            "networks": self.suite.describe(),
            "left_out": self.left_out,
            "notes": self.notes,
        }

    # --- the data ---------------------------------------------------------------------------------------------------

    def real(self) -> list[dict[str, Any]]:
        """The same figures of real images that are not in the reference: what a model cannot surpass by much."""
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
        return [{"name": REAL, "num": num, "seeds": 1, "figures": self.suite.combine([figures])}]

    def doubt(self, judged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What results.json says of whether the figures can be trusted; what speaks against it is a warning too."""
        checks = self.suite.check()
        told = [*doubts_about(checks), *crowded(judged)]
        for text in told:
            warnings.warn(text.rstrip("."), stacklevel=3)
        found = {f"{check.metric}/{check.network}": check.describe() for check in checks}
        return {"sanity": found, "notes": [*told, *self.notes]}

    def real_images(self) -> Images:
        """Those that the first prompts belong to."""
        assert self._prompt_rows is not None
        return self.suite.images_of_rows(self._prompt_rows[:ON_A_SHEET])

    # --- the models -------------------------------------------------------------------------------------------------

    def check(self, contender: Contender) -> None:
        """Refuse what cannot be judged: one image is drawn, in one step."""
        quick = replace(contender, sampling=replace(contender.sampling, steps=1))
        self._sample_set(self._open(contender), quick, self.settings.first_seed).paint(slice(0, 1), "latent")

    def judge(self, contender: Contender) -> dict[str, Any]:
        """All figures of one model."""
        settings = self.settings
        pipe = self._open(contender)
        seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
        figures = self.suite.combine(
            [self._judge_set(self._sample_set(pipe, contender, seed), contender) for seed in seeds]
        )
        if "diversity" in self.metrics:
            figures |= self.suite.combine([self._judge_varied(pipe, contender)])
        if "flops" in self.metrics:
            samples = self._sample_set(pipe, contender, settings.first_seed)
            figures |= self.suite.combine([{"flops_an_image": Figure(count_flops(samples))}])
        return {
            "name": contender.name,
            "hash": pipe.index.hash,
            "experts": list(pipe.objectives),
            "sampling": asdict(_resolved(contender.sampling, pipe)),
            "num": settings.num,
            "seeds": settings.seeds,
            "figures": figures,
        }

    def first_images(self, contender: Contender) -> Images:
        """Of the first prompts, which `judge` has made."""
        samples = self._sample_set(self._open(contender), contender, self.settings.first_seed)
        found: list[Images] = []
        for part in self._images(samples, contender):
            found.append(part)
            if sum(map(len, found)) >= ON_A_SHEET:
                break
        return np.concatenate(found)[:ON_A_SHEET]

    def _open(self, contender: Contender) -> AtollPipeline:
        pipe = AtollPipeline.from_pretrained(
            contender.model, device=self.suite.device, conversion=contender.sampling.conversion
        )
        if pipe.index.latent_space.codec.fingerprint != self.rows.data.card.codec.fingerprint:
            warnings.warn(
                f"{contender.name} has another codec than the data: its images are measured against what the codec "
                "of the data gives back",
                stacklevel=2,
            )
        return pipe

    def _sample_set(self, pipe: AtollPipeline, contender: Contender, seed: int) -> SampleSet:
        """For an image of each prompt, and of the first ones again until there are enough."""
        places = np.arange(self.settings.num) % len(self.prompts)
        return self._make_set(pipe, contender, places, seed * MOST_PICTURES, hash_of(self.prompts))

    def _varied_set(self, pipe: AtollPipeline, contender: Contender) -> SampleSet:
        """For several images of each of some prompts, with seeds beyond those of all others."""
        firsts = list({caption: i for i, caption in reversed(list(enumerate(self.prompts)))}.values())
        places = np.repeat(np.sort(firsts)[: self.settings.varied], self.settings.each)
        first_seed = 2**62 + self.settings.first_seed * MOST_PICTURES
        return self._make_set(pipe, contender, places, first_seed, hash_of([self.prompts, self.settings.each]))

    def _make_set(
        self, pipe: AtollPipeline, contender: Contender, places: NDArray[np.int64], first_seed: int, prompts: str
    ) -> SampleSet:
        sampling, clusters = _resolved(contender.sampling, pipe), None
        about = {
            "model": pipe.index.hash,
            "experts": list(pipe.objectives),
            "sampling": asdict(sampling),
            "prompts": prompts,
            "seed": first_seed,
            "device": self.suite.device.type,
        }
        if sampling.routing == "oracle":
            clusters = self._clusters(pipe, contender)[places]
            about["clusters"] = hash_of(clusters.tolist())
        return SampleSet(pipe, sampling, [self.prompts[i] for i in places], first_seed, about, clusters)

    def _clusters(self, pipe: AtollPipeline, contender: Contender) -> NDArray[np.int64]:
        """The cluster of the image that each prompt belongs to."""
        if self._prompt_rows is None:
            raise InputError("oracle routing needs the clusters of the prompts' images: take prompts from the data")
        found = self.rows.data.clusters()[self._prompt_rows]
        if pipe.num_experts <= (last := int(found.max())):
            raise InputError(
                f"{contender.name} has {plural(pipe.num_experts, 'expert')}, but the data has a cluster {last}: give "
                "the data that the model was trained on, or another --routing"
            )
        return found

    def _images(self, samples: SampleSet, contender: Contender) -> Iterator[Images]:
        """A batch at a time; what is in the store is read."""
        what = f"{contender.name} draws"
        return self._store(samples).rows(
            len(samples.captions), lambda some: bytes_of(samples.paint(some)), what, self.progress
        )

    def _store(self, samples: SampleSet) -> Store:
        return Store.at(self.out / "pictures", samples.about, samples.sampling.batch)

    def _judge_set(self, samples: SampleSet, contender: Contender) -> Figures:
        """The figures of the images of one seed."""
        for _ in self._images(samples, contender):
            pass  # into the store, from which each network reads them
        figures: Figures = {}
        labels = [self._labels[i % len(self._labels)] for i in range(len(samples.captions))]
        for name in self.suite.networks:
            vectors = self.suite.vectors(name, self._store(samples), len(samples.captions), contender.name)
            figures |= self.suite.compare(name, vectors, labels, alone=self.settings.seeds == 1)
        return figures | self.suite.look(self._images(samples, contender), samples.captions, contender.name)

    def _judge_varied(self, pipe: AtollPipeline, contender: Contender) -> Figures:
        images = np.concatenate(list(self._images(self._varied_set(pipe, contender), contender)))
        each = self.settings.each
        return self.suite.measure_groups(images[i : i + each] for i in range(0, len(images), each))


def _resolved(sampling: Sampling, pipe: AtollPipeline) -> Sampling:
    return replace(sampling, guidance=pipe.guidance) if sampling.guidance is None else sampling


def count_flops(samples: SampleSet) -> float:
    """Of making an image, on average over a few."""
    num = min(COUNTED, len(samples.captions))
    with counting() as total:
        samples.paint(slice(0, num), "latent")
        return total() / num


def _why_no_lpips() -> str:
    try:
        find_weights()
    except InputError as error:
        return str(error)
    return ""
