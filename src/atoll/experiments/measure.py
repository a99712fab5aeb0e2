"""What images are measured by: networks, and what these see in the data, kept so that it is computed once."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from atoll.data.view import DatasetView, decode_rows
from atoll.encoders.codecs import Codec, load_codec, pictures_of
from atoll.encoders.features import Features, make_features
from atoll.errors import InputError, unknown
from atoll.experiments.cache import cached
from atoll.experiments.figures import METRICS, Figure, Figures
from atoll.experiments.sanity import CHECKED, LEAST, Check, quilts_of
from atoll.metrics.clip_score import CLIPScore
from atoll.metrics.coverage import NEIGHBOURS, measure_coverage
from atoll.metrics.diversity import Distance
from atoll.metrics.frechet import Moments, frechet_error, frechet_infinity, frechet_to, least_for_infinity
from atoll.metrics.kernel import kernel_distance
from atoll.metrics.labels import Reader, are_right
from atoll.sampling.pipeline import get_device

OF_FEATURES = frozenset({"frechet", "kernel", "coverage", "labels"})
SPLITS = ("held_out", "train", "all")
MOST_FOR_PAIRS = 10_000  # images whose distances to each other are computed
MOST_IMAGES = 10**6  # of one seed: the seeds of their noise are counted in these
AT_A_TIME = 256  # real images
REAL = "real images"

Images = NDArray[np.uint8]  # [N, S, S, 3]
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
            if getattr(self, name) < value:
                raise InputError(f"{name} must be at least {value}, but is {getattr(self, name)}")
        if self.num > MOST_IMAGES:
            raise InputError(f"num must be at most {MOST_IMAGES}, but is {self.num}: use more seeds")
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown("metric", metric, METRICS)
        if self.split is not None and self.split not in SPLITS:
            raise unknown("split", self.split, SPLITS)
        if not self.features:
            raise InputError("there are no features: give at least one network")


@dataclass(frozen=True, eq=False)
class ImageSet(ABC):
    """Images with their captions and labels, read some at a time."""

    name: str  # in progress bars
    captions: Sequence[str]
    labels: Sequence[str]
    size: int  # images at a time

    def __len__(self) -> int:
        return len(self.captions)

    @abstractmethod
    def about(self, span: slice) -> dict[str, Any]:
        """Returns all that some of the images depend on."""

    @abstractmethod
    def read(self, span: slice) -> Images: ...

    def spans(self, what: str = "", progress: bool = False) -> Iterator[slice]:
        """Yields the places of `size` images at a time, under a progress bar."""
        hidden = None if progress else True
        with tqdm(total=len(self), desc=f"{self.name}: {what}", unit=" images", disable=hidden, leave=False) as bar:
            for first in range(0, len(self), self.size):
                yield (span := slice(first, min(first + self.size, len(self))))
                bar.update(span.stop - first)

    def load(self, progress: bool = False) -> Images:
        """Returns all of them."""
        return np.concatenate([self.read(span) for span in self.spans("drawing", progress)])


@dataclass(frozen=True, eq=False)
class RealImages(ImageSet):
    """Images of a data set as their latents give them: what the codec loses is not held against a model."""

    view: DatasetView
    codec: Codec
    rows: NDArray[np.int64]
    as_quilts: bool = False

    def about(self, span: slice) -> dict[str, Any]:
        codec = self.view.data.card.codec.fingerprint
        about = {"data": self.view.fingerprint, "codec": codec, "rows": self.rows[span].tolist()}
        return about | ({"change": "quilts"} if self.as_quilts else {})

    def read(self, span: slice) -> Images:
        self.view.latents(self.rows[span])  # refuses damaged ones
        images = decode_rows(self.view.data, self.rows[span], self.codec, side=2**20)
        return quilts_of(images) if self.as_quilts else images


def tensor_of(images: Images) -> Tensor:
    """Returns bytes [n, S, S, 3] as images [n, 3, S, S] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def bytes_of(images: object) -> Images:
    """Returns what a pipeline gives as tensors in [0, 1], as bytes."""
    assert isinstance(images, Tensor)
    return pictures_of(images * 2 - 1)


def shuffled(view: DatasetView) -> NDArray[np.int64]:
    """Returns the training rows in the order in which they are taken as reference."""
    return np.random.default_rng(1).permutation(view.train)


def reference_rows(view: DatasetView, settings: MetricSettings) -> NDArray[np.int64]:
    return shuffled(view)[: settings.num_reference]


class MetricSuite:
    """The networks, and the reference that images are compared with: the training images, through the codec."""

    def __init__(
        self,
        view: DatasetView,
        out: Path,
        settings: MetricSettings,
        metrics: Sequence[str],
        progress: bool,
        reference: Vectors | None = None,
    ) -> None:
        """`reference` are features that take the place of those of the training images."""
        self.view, self.out, self.settings, self.progress = view, out, settings, progress
        self.metrics, self._reference = frozenset(metrics), reference
        self.device = get_device(settings.device)
        self.codec = load_codec(view.data.folder)
        self.networks: dict[str, Features] = {}
        if self.metrics & OF_FEATURES:
            networks = [make_features(spec).to(self.device) for spec in settings.features]
            self.networks = {network.spec: network for network in networks}
        self.clip = CLIPScore.open(settings.clip).to(self.device) if settings.clip and "clip" in metrics else None
        self.distance = Distance.pretrained().to(self.device) if "diversity" in metrics else None
        self.rows = reference_rows(view, settings)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Returns what results.json says of every network."""
        networks = [*self.networks.values(), *(part for part in (self.distance, self.clip) if part is not None)]
        return {network.spec: network.describe() for network in networks}

    # --- the data ---------------------------------------------------------------------------------------------------

    @cached_property
    def others(self) -> NDArray[np.int64]:
        """Returns the rows that are not in the reference: held out, or beyond the number taken."""
        held_out = np.random.default_rng(0).permutation(self.view.held_out)
        return np.concatenate([held_out, shuffled(self.view)[len(self.rows) :]])

    @cached_property
    def references(self) -> dict[str, tuple[Moments, Vectors]]:
        """Returns the moments of the reference by each network, and the vectors of some of it."""
        vectors = {name: self._reference_vectors(name) for name in self.networks}
        return {name: (Moments.of(own), own[:MOST_FOR_PAIRS]) for name, own in vectors.items()}

    @cached_property
    def readers(self) -> dict[str, Reader]:
        """Returns what tells labels from the features of each network."""
        labels = self.view.data.strings("label", self.rows)
        return {name: Reader.fit(self._reference_vectors(name), labels) for name in self.networks}

    def _reference_vectors(self, name: str) -> Vectors:
        if self._reference is not None:
            return self._reference
        return self.vectors(name, self.real_images(self.rows))

    def real_images(self, rows: NDArray[np.int64], as_quilts: bool = False) -> RealImages:
        captions, labels = (self.view.data.strings(column, rows) for column in ("caption", "label"))
        return RealImages(REAL, captions, labels, AT_A_TIME, self.view, self.codec, rows, as_quilts)

    def measure_real(self) -> tuple[int, Figures]:
        """Returns how many real images are outside of the reference, and their figures; none where they are too few."""
        images = self.real_images(self.others[: self.settings.num])
        if len(images) < (self.settings.neighbours + 1 if "coverage" in self.metrics else 2):
            return len(images), {}
        figures = self.measure(images)
        if self.distance is not None and (groups := self._alike()):
            figures |= self.measure_groups(map(self.decode, groups))
        return len(images), figures

    def decode(self, rows: NDArray[np.int64]) -> Images:
        return self.real_images(rows).read(slice(0, len(rows)))

    def _alike(self) -> list[NDArray[np.int64]]:
        """Returns rows of the reference that share a caption, `each` of a caption."""
        each = self.settings.each
        by_caption: dict[str, list[int]] = {}
        for row, caption in zip(self.rows.tolist(), self.view.data.strings("caption", self.rows), strict=True):
            by_caption.setdefault(caption, []).append(row)
        return [np.array(rows[:each]) for rows in by_caption.values() if len(rows) >= each][: self.settings.varied]

    def check(self) -> list[Check]:
        """Returns figures of as many real images outside of the reference and quilts; none where there are few."""
        num = min(CHECKED, self.settings.num, len(self.others))
        if num < max(LEAST, self.settings.neighbours + 1):
            return []
        sets = self.real_images(self.others[:num]), self.real_images(shuffled(self.view)[:num], as_quilts=True)
        checks = []
        for name in self.networks:
            real, quilts = (self._distances(name, self.vectors(name, images), alone=False) for images in sets)
            checks += [Check(key.partition("/")[0], name, real[key].value, quilts[key].value) for key in real]
        return checks

    # --- figures ----------------------------------------------------------------------------------------------------

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

    def measure(self, images: ImageSet, alone: bool = True) -> Figures:
        """Returns the figures of a set of images; `alone`: there are no other seeds to tell their errors."""
        figures: Figures = {}
        for name in self.networks:
            vectors = self.vectors(name, images)
            figures |= self._distances(name, vectors, alone)
            if "frechet" in self.metrics and len(vectors) >= least_for_infinity(vectors.shape[1]):
                limit = frechet_infinity(self.references[name][0], vectors)
                figures[f"frechet_infinity/{name}"] = Figure(limit.value, limit.error)
            if "labels" in self.metrics:
                labels = self.readers[name].read(vectors)
                figures[f"label_accuracy/{name}"] = Figure.mean(
                    [a == b for a, b in zip(labels, images.labels, strict=True)]
                )
        return figures | self._look(images)

    def _distances(self, name: str, vectors: Vectors, alone: bool) -> Figures:
        """Returns a set's distances to the reference."""
        moments, real = self.references[name]
        figures: Figures = {}
        if "frechet" in self.metrics:
            error = frechet_error(moments, vectors) if alone and len(vectors) >= 4 else None
            figures[f"frechet/{name}"] = Figure(frechet_to(moments, vectors), error)
        if "kernel" in self.metrics:
            figures[f"kernel/{name}"] = Figure(*kernel_distance(real, vectors))
        if "coverage" in self.metrics:
            num = min(len(real), len(vectors), MOST_FOR_PAIRS)  # as many of each: recall grows with the number
            shares = measure_coverage(real[:num], vectors[:num], self.settings.neighbours)
            figures |= {f"{key}/{name}": Figure(value) for key, value in asdict(shares).items()}
        return figures

    def _look(self, images: ImageSet) -> Figures:
        """Returns what is seen in the images themselves, a batch at a time."""
        scores: list[float] = []
        right: list[bool] = []

        def batches() -> Iterator[Tensor]:
            for span in images.spans("looked at", self.progress):
                own, captions = images.read(span), images.captions[span]
                shown = tensor_of(own).to(self.device)
                if self.clip is not None:
                    scores.extend(self.clip.scores(shown, captions).tolist())
                if "accuracy" in self.metrics:
                    right.extend(are_right(own, captions))
                yield shown

        figures: Figures = {}
        if self.distance is not None:
            figures[f"lpips/{self.distance.spec}"] = Figure(self.distance.mean_over_pairs(batches()))
        elif self.metrics & {"clip", "accuracy"}:
            for _ in batches():
                pass
        if self.clip is not None:
            figures[f"clip_score/{self.clip.spec}"] = Figure.mean(scores)
        if "accuracy" in self.metrics:
            figures["prompt_accuracy"] = Figure.mean(right)
        return figures

    def measure_groups(self, groups: Iterable[Images]) -> Figures:
        """Returns how far apart the images of one prompt are, on average over prompts."""
        assert self.distance is not None
        means = [self.distance.mean_over_pairs([tensor_of(group).to(self.device)]) for group in groups]
        return {f"lpips_per_prompt/{self.distance.spec}": Figure.mean(means)}
