"""What images are measured by: networks, and what these see in the images that others are compared with."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.encoders.features import make_features
from atoll.encoders.pretrained import dtype_name
from atoll.errors import InputError, unknown
from atoll.experiments.cache import cached
from atoll.experiments.figures import METRICS, Figure, Figures
from atoll.experiments.images import Images, ImageSet, tensor_of
from atoll.metrics.clip_score import CLIPScore
from atoll.metrics.coverage import NEIGHBOURS, measure_coverage
from atoll.metrics.diversity import Distance
from atoll.metrics.frechet import Moments, frechet_distance, frechet_error, frechet_infinity, least_for_infinity
from atoll.metrics.kernel import kernel_distance
from atoll.metrics.labels import Reader, are_right
from atoll.sampling.pipeline import get_device

OF_FEATURES = frozenset({"frechet", "kernel", "coverage", "labels"})
SPLITS = ("held_out", "train", "all")
MOST_FOR_PAIRS = 10_000  # images whose distances to each other are computed
MOST_IMAGES = 10**6  # of one seed: the seeds of their noise are counted in these

Vectors = NDArray[np.float32]  # [N, D]


@dataclass(frozen=True)
class MetricSettings:
    """What is measured."""

    num: int = 1000  # images of each seed
    seeds: int = 1  # so many times as many; with several, errors are over these
    first_seed: int = 0
    features: tuple[str, ...] = ("efficientnet",)
    metrics: tuple[str, ...] = ()  # all that can be had
    split: str | None = None  # whose captions are prompts: the held-out ones, or all where none are held out
    clip: str | None = None
    neighbours: int = NEIGHBOURS
    num_reference: int = 10_000  # images of the training data, at most
    varied: int = 50  # prompts of which several images are made, for diversity
    each: int = 4  # so many
    device: str = "cpu"

    def __post_init__(self) -> None:
        least = {"num": 2, "seeds": 1, "first_seed": 0, "neighbours": 1, "num_reference": 2, "varied": 1, "each": 2}
        for name, value in least.items():
            if not value <= getattr(self, name) <= MOST_IMAGES:
                raise InputError(f"{name} must be from {value} to {MOST_IMAGES}, but is {getattr(self, name)}")
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown("metric", metric, METRICS)
        if self.split not in (None, *SPLITS):
            raise unknown("split", self.split, SPLITS)
        if not self.features:
            raise InputError("there are no features: give at least one network")


class Reference(NamedTuple):
    """What a network sees in the images that others are compared with."""

    moments: Moments
    vectors: Vectors  # of some of them
    reader: Reader | None  # of labels


class MetricSuite:
    """The networks, and the images or features that others are compared with."""

    def __init__(
        self,
        settings: MetricSettings,
        metrics: Collection[str],
        reference: ImageSet | Vectors,
        out: Path,
        progress: bool,
    ) -> None:
        self.settings, self.metrics, self.reference = settings, metrics, reference
        self.out, self.progress, self.device = out, progress, get_device(settings.device)
        specs = settings.features if OF_FEATURES.intersection(metrics) else ()
        self.networks = {network.spec: network.to(self.device) for network in map(make_features, specs)}
        self.clip = CLIPScore.open(settings.clip).to(self.device) if settings.clip and "clip" in metrics else None
        self.distance = Distance.pretrained().to(self.device) if "diversity" in metrics else None

    def describe(self) -> dict[str, dict[str, Any]]:
        """Returns what results.json says of every network."""
        return {
            network.spec: {
                "spec": network.spec,
                "dtype": dtype_name(network.dtype),
                **network.sizes(),
                "fingerprint": network.fingerprint,
            }
            for network in (*self.networks.values(), self.distance, self.clip)
            if network is not None
        }

    @cached_property
    def references(self) -> dict[str, Reference]:
        """Returns what each network sees in the reference."""
        references = {}
        for name in self.networks:
            if isinstance(self.reference, ImageSet):
                vectors = self.vectors(name, self.reference)
                reader = Reader.fit(vectors, self.reference.labels) if "labels" in self.metrics else None
            else:
                vectors, reader = self.reference, None
            references[name] = Reference(Moments.of(vectors), vectors[:MOST_FOR_PAIRS], reader)
        return references

    def vectors(self, name: str, images: ImageSet) -> Vectors:
        """Returns the features that a network gives of images; those that were computed before are read."""
        spans = images.spans(f"seen by {name}", self.progress)
        return np.concatenate([self._vectors_of(name, images, span) for span in spans])

    def _vectors_of(self, name: str, images: ImageSet, span: slice) -> Vectors:
        network = self.networks[name]
        about = {"of": images.about(span), "network": network.fingerprint, "dtype": str(network.dtype)}
        shape = (span.stop - span.start, network.dim)
        return cached(self.out / "features", about, "float32", shape, lambda: self.extract(name, images.read(span)))

    def extract(self, name: str, images: Images) -> Vectors:
        vectors: Vectors = self.networks[name].extract(tensor_of(images).to(self.device)).float().cpu().numpy()
        return vectors

    def measure(self, images: ImageSet) -> Figures:
        """Returns the figures of a set of images."""
        figures: Figures = {}
        for name in self.networks:
            vectors, reader = self.vectors(name, images), self.references[name].reader
            figures |= self.compare(name, vectors)
            if reader is not None:
                pairs = zip(reader.read(vectors), images.labels, strict=True)
                figures[f"label_accuracy/{name}"] = Figure.mean([seen == label for seen, label in pairs])
        if self.distance is not None:
            spans = images.spans("compared with each other", self.progress)
            batches = (tensor_of(images.read(span)).to(self.device) for span in spans)
            figures[f"lpips/{self.distance.spec}"] = Figure(self.distance.mean_over_pairs(batches))
        if self.clip is not None:
            scores: list[float] = []
            for span in images.spans("compared with captions", self.progress):
                pixels = tensor_of(images.read(span)).to(self.device)
                scores += self.clip.scores(pixels, images.captions[span]).tolist()
            figures[f"clip_score/{self.clip.spec}"] = Figure.mean(scores)
        if "accuracy" in self.metrics:
            figures["prompt_accuracy"] = Figure.mean(are_right(images.load(), images.captions))
        return figures

    def compare(self, name: str, vectors: Vectors) -> Figures:
        """Returns the distances of features to those of the reference."""
        moments, real, _ = self.references[name]
        figures: Figures = {}
        if "frechet" in self.metrics:
            error = frechet_error(moments, vectors) if len(vectors) >= 4 else None
            figures[f"frechet/{name}"] = Figure(frechet_distance(moments, Moments.of(vectors)), error)
            if len(vectors) >= least_for_infinity(vectors.shape[1]):
                figures[f"frechet_infinity/{name}"] = Figure(*frechet_infinity(moments, vectors))
        if "kernel" in self.metrics:
            figures[f"kernel/{name}"] = Figure(*kernel_distance(real, vectors))
        if "coverage" in self.metrics:
            num = min(len(real), len(vectors), MOST_FOR_PAIRS)  # as many of each: recall grows with the number
            shares = measure_coverage(real[:num], vectors[:num], self.settings.neighbours)
            figures |= {f"{key}/{name}": Figure(value) for key, value in shares._asdict().items()}
        return figures

    def measure_groups(self, groups: Iterable[Images]) -> Figures:
        """Returns how far apart the images of one prompt are, on average over prompts."""
        assert self.distance is not None
        means = [self.distance.mean_over_pairs([tensor_of(group).to(self.device)]) for group in groups]
        return {f"lpips_per_prompt/{self.distance.spec}": Figure.mean(means)}
