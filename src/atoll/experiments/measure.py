"""Measures images with feature networks and metrics, against a reference set."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.encoders.features import make_features
from atoll.encoders.pretrained import Frozen, dtype_name
from atoll.experiments.cache import cached
from atoll.experiments.images import Images, ImageSet, tensor_of
from atoll.experiments.settings import MOST_FOR_PAIRS, MetricSettings
from atoll.experiments.tables import KINDS
from atoll.metrics.clip_score import CLIPScore
from atoll.metrics.coverage import measure_coverage
from atoll.metrics.diversity import make_distance
from atoll.metrics.frechet import Moments, frechet_distance, frechet_error, frechet_infinity, least_for_infinity
from atoll.metrics.kernel import kernel_distance
from atoll.metrics.labels import Reader, are_right
from atoll.tensors import get_device

OF_FEATURES = frozenset({"frechet", "kernel", "coverage", "labels"})

Vectors = NDArray[np.float32]  # [N, D]
Figures = dict[str, dict[str, Any]]  # as in results.json


def figure(kind: str, value: float, error: float | None = None, network: Frozen | None = None) -> Figures:
    """Returns a figure with its error, under a key of its kind and the feature network, if any."""
    about = {"value": value, "error": error, "error_from": None if error is None else KINDS[kind].error_from}
    if network is None:
        return {kind: about}
    features = {"name": network.spec, "fingerprint": network.fingerprint}
    return {f"{kind}/{network.spec}": {**about, "features": features}}


def mean_of(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and its standard error."""
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return float(np.mean(values)), error


class Reference(NamedTuple):
    """The reference images as one network's features."""

    moments: Moments
    vectors: Vectors  # of some of the images
    reader: Reader | None  # of labels


class MetricSuite:
    """Measures sets of images by networks and metrics, against a reference set."""

    def __init__(
        self, settings: MetricSettings, metrics: Collection[str], reference: ImageSet, out: Path, progress: bool
    ) -> None:
        self.settings, self.metrics, self.reference, self.progress = settings, metrics, reference, progress
        self.folder, self.device = out / "features", get_device(settings.device)
        specs = settings.features if OF_FEATURES.intersection(metrics) else ()
        self.networks = {network.spec: network.to(self.device) for network in map(make_features, specs)}
        self.clip = CLIPScore.open(settings.clip).to(self.device) if settings.clip and "clip" in metrics else None
        self.distance = make_distance(settings.distance).to(self.device) if "diversity" in metrics else None

    def describe(self) -> dict[str, dict[str, Any]]:
        """Returns the entries of all networks in results.json."""
        networks: list[Frozen | None] = [*self.networks.values(), self.distance, self.clip]
        return {
            network.spec: {"spec": network.spec, "dtype": dtype_name(network.dtype), **network.sizes(),
                           "fingerprint": network.fingerprint}
            for network in networks if network is not None
        }  # fmt: skip

    @cached_property
    def references(self) -> dict[str, Reference]:
        """Returns the reference in the features of each network."""
        references = {}
        for name in self.networks:
            vectors = self.vectors(name, self.reference)
            reader = Reader.fit(vectors, self.reference.labels) if "labels" in self.metrics else None
            references[name] = Reference(Moments.of(vectors), vectors[:MOST_FOR_PAIRS], reader)
        return references

    def vectors(self, name: str, images: ImageSet) -> Vectors:
        """Returns a network's features of the images, cached on disk."""
        spans = images.spans(f"seen by {name}", self.progress)
        return np.concatenate([self._vectors_of(name, images, span) for span in spans])

    def _vectors_of(self, name: str, images: ImageSet, span: slice) -> Vectors:
        network = self.networks[name]
        about = {"of": images.about(span), "network": network.fingerprint, "dtype": str(network.dtype)}
        shape = (span.stop - span.start, network.dim)
        return cached(
            self.folder, about, "float32", shape,
            lambda: network.extract(self._pixels(images.read(span))).float().cpu().numpy(),
        )  # fmt: skip

    def _pixels(self, images: Images) -> Tensor:
        return tensor_of(images).to(self.device)

    def measure(self, images: ImageSet) -> Figures:
        """Returns the figures of a set of images."""
        figures: Figures = {}
        for name, network in self.networks.items():
            vectors, reader = self.vectors(name, images), self.references[name].reader
            figures |= self.compare(name, vectors)
            if reader is not None:
                right = [seen == label for seen, label in zip(reader.read(vectors), images.labels, strict=True)]
                figures |= figure("label_accuracy", *mean_of(right), network)
        if self.distance is not None:
            spans, most = images.spans("compared with each other", self.progress), self.settings.paired
            batches = (images.read(span)[: most - span.start] for span in spans if span.start < most)
            distance = self.distance.mean_over_pairs(map(self._pixels, batches))
            figures |= figure("lpips", distance, network=self.distance)
        if self.clip is not None:
            scores: list[float] = []
            for span in images.spans("compared with captions", self.progress):
                scores += self.clip.scores(self._pixels(images.read(span)), images.captions[span]).tolist()
            figures |= figure("clip_score", *mean_of(scores), self.clip)
            figures |= figure("clip_spread", float(np.std(scores)), network=self.clip)
        if "accuracy" in self.metrics:
            figures |= figure("prompt_accuracy", *mean_of(are_right(images.load(), images.captions)))
        return figures

    def compare(self, name: str, vectors: Vectors) -> Figures:
        """Returns the figures that compare features with those of the reference."""
        (moments, real, _), network = self.references[name], self.networks[name]
        figures: Figures = {}
        if "frechet" in self.metrics:
            error = frechet_error(moments, vectors) if len(vectors) >= 4 else None
            figures |= figure("frechet", frechet_distance(moments, Moments.of(vectors)), error, network)
            if len(vectors) >= least_for_infinity(network.dim):
                figures |= figure("frechet_infinity", *frechet_infinity(moments, vectors), network)
        if "kernel" in self.metrics:
            figures |= figure("kernel", *kernel_distance(real, vectors), network)
        if "coverage" in self.metrics:
            num = min(len(real), len(vectors), MOST_FOR_PAIRS)  # equally many of each: recall grows with the number
            shares = measure_coverage(real[:num], vectors[:num], self.settings.neighbours)
            for kind, value in shares._asdict().items():
                figures |= figure(kind, value, network=network)
        return figures

    def measure_groups(self, groups: Iterable[Images]) -> Figures:
        """Returns the mean distance between images of the same prompt, averaged over prompts."""
        assert self.distance is not None
        means = [self.distance.mean_over_pairs([self._pixels(group)]) for group in groups]
        return figure("lpips_per_prompt", *mean_of(means), self.distance)
