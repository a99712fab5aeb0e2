"""What images are measured by: networks, and what these see in the data, kept so that it is computed once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from atoll.data.view import DatasetView, decode_rows
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import Features, make_features
from atoll.errors import InputError, unknown
from atoll.experiments.cache import Store
from atoll.experiments.judge import are_right, images_of
from atoll.experiments.sanity import CHECKED, LEAST, Check, quilts_of
from atoll.experiments.tables import mean_over_seeds
from atoll.metrics.clip_score import CLIPScore
from atoll.metrics.coverage import NEIGHBOURS, measure_coverage
from atoll.metrics.diversity import Distance
from atoll.metrics.frechet import Moments, frechet_error, frechet_infinity, frechet_to, least_for_infinity
from atoll.metrics.kernel import kernel_distance
from atoll.metrics.labels import Reader
from atoll.sampling.pipeline import get_device

METRICS = ("frechet", "kernel", "coverage", "diversity", "clip", "accuracy", "labels", "flops")
OF_FEATURES = frozenset({"frechet", "kernel", "coverage", "labels"})
SPLITS = ("held_out", "train", "all")
LPIPS = "stlpips-alex"
MOST_FOR_PAIRS = 10_000  # images whose distances to each other are computed
MOST_PICTURES = 10**6  # of one seed: the seeds of their noise are counted in these
ROWS_A_FILE = 256

Images = NDArray[np.uint8]
Vectors = NDArray[np.float32]


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
        if self.num > MOST_PICTURES:
            raise InputError(f"num must be at most {MOST_PICTURES}, but is {self.num}: use more seeds")
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown("metric", metric, METRICS)
        if self.split is not None and self.split not in SPLITS:
            raise unknown("split", self.split, SPLITS)
        if not self.features:
            raise InputError("there are no features: give at least one network")


class Figure(NamedTuple):
    """A number of one set of images, and how uncertain it is if there is no other set to tell."""

    value: float
    error: float | None = None


Figures = dict[str, Figure]  # by metric and, after a slash, the network


def shuffled(rows: DatasetView) -> NDArray[np.int64]:
    """The training rows in the order in which they are taken as reference."""
    return np.random.default_rng(1).permutation(rows.train)


def reference_labels(rows: DatasetView, settings: MetricSettings) -> list[str]:
    return rows.data.texts("label", shuffled(rows)[: settings.num_reference])


class MetricSuite:
    """The networks, and the reference that images are compared with: the training images, through the codec."""

    def __init__(
        self, rows: DatasetView, out: Path, settings: MetricSettings, metrics: Sequence[str], progress: bool
    ) -> None:
        self.rows, self.out, self.settings, self.progress = rows, out, settings, progress
        self.metrics = frozenset(metrics)
        self.device = get_device(settings.device)
        self.codec = load_codec(rows.data.folder)
        self.networks: dict[str, Features] = {}
        if self.metrics & OF_FEATURES:
            for spec in settings.features:
                network = make_features(spec)
                own = network.to(self.device) if isinstance(network, nn.Module) else network
                self.networks[network.describe()["spec"]] = own
        self.clip = CLIPScore.open(settings.clip).to(self.device) if settings.clip and "clip" in metrics else None
        self.distance = Distance.pretrained().to(self.device) if "diversity" in metrics else None

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every network by name."""
        found = {name: network.describe() for name, network in self.networks.items()}
        for part in (self.distance, self.clip):
            if part is not None:
                found[part.describe()["spec"]] = part.describe()
        return found

    # --- the data ---------------------------------------------------------------------------------------------------

    @property
    def num_reference(self) -> int:
        return min(self.settings.num_reference, len(self.rows.train))

    @cached_property
    def shuffled(self) -> NDArray[np.int64]:
        """The training rows, of which the first are the reference."""
        return shuffled(self.rows)

    @cached_property
    def others(self) -> NDArray[np.int64]:
        """Rows that are not in the reference: held out, or beyond the number taken."""
        held_out = np.random.default_rng(0).permutation(self.rows.held_out)
        return np.concatenate([held_out, self.shuffled[self.num_reference :]])

    @cached_property
    def references(self) -> dict[str, tuple[Moments, Vectors]]:
        """The moments of the reference by each network, and the vectors of some of it."""
        found = {}
        for name in self.networks:
            vectors = self._vectors_of_rows(name, "train", self.shuffled, self.num_reference)
            found[name] = (Moments.of(vectors), vectors[:MOST_FOR_PAIRS])
        return found

    @cached_property
    def readers(self) -> dict[str, Reader]:
        """What tells labels from the features of each network."""
        return {
            name: Reader.fit(
                self._vectors_of_rows(name, "train", self.shuffled, self.num_reference),
                reference_labels(self.rows, self.settings),
            )
            for name in self.networks
        }

    def images_of_rows(self, rows: NDArray[np.int64]) -> Images:
        """As their latents give them: what the codec loses is not held against a model."""
        self.rows.latents(rows)  # refuses damaged ones
        return decode_rows(self.rows.data, rows, self.codec, side=2**20)

    def _vectors_of_rows(
        self, name: str, which: str, rows: NDArray[np.int64], num: int, change: Callable[[Images], Images] | None = None
    ) -> Vectors:
        """Returns the features of the first rows, whose order and change depend on nothing but the data and `which`."""

        def images_of_slice(some: slice) -> Images:
            images = self.images_of_rows(rows[some])
            return change(images) if change else images

        codec = self.rows.data.card.codec.fingerprint
        of = {"data": self.rows.fingerprint, "codec": codec, "rows": which}
        return self._cached(name, of, ROWS_A_FILE, num, images_of_slice, "real images")

    def vectors(self, name: str, images: Store, num: int, what: str) -> Vectors:
        """Returns the features of images that are in a store, and keeps them beside it."""
        return self._cached(name, dict(images.about), images.size, num, images.read, what)

    def _cached(
        self, name: str, of: Mapping[str, Any], size: int, num: int, read: Callable[[slice], Images], what: str
    ) -> Vectors:
        """Returns the features that a network gives of images; those that were computed before are read."""
        network = self.networks[name]
        about = network.describe()
        key = {"of": of, "network": {"fingerprint": about["fingerprint"], "dtype": about["dtype"]}}
        store = Store.at(self.out / "features", key, size)
        parts = list(
            store.rows(num, lambda some: self._extract(name, read(some)), f"{name} looks at {what}", self.progress)
        )
        if any(part.ndim != 2 or part.shape[1] != network.dim or part.dtype != np.float32 for part in parts):
            raise InputError(
                f"{self.out / 'features'} holds rows that are no {name} features: remove it, and rerun the command"
            )
        return np.concatenate(parts)

    def measure_real(self) -> tuple[int, Figures]:
        """How many real images are outside of the reference, and their figures; none where they are too few."""
        rows = self.others[: self.settings.num]
        if len(rows) < (self.settings.neighbours + 1 if "coverage" in self.metrics else 2):
            return len(rows), {}
        figures: Figures = {}
        for name in self.networks:
            which = f"outside of {self.num_reference}"
            vectors = self._vectors_of_rows(name, which, self.others, len(rows))
            figures |= self.compare(name, vectors, self.rows.data.texts("label", rows), alone=True)
        batches = (self.images_of_rows(some) for some in np.array_split(rows, 1 + len(rows) // 64))
        figures |= self.look(batches, self.rows.data.texts("caption", rows), "real images")
        if self.distance is not None and (groups := self._alike()):
            figures |= self.measure_groups(self.images_of_rows(np.array(rows)) for rows in groups)
        return len(rows), figures

    def check(self) -> list[Check]:
        """The figures of as many real images outside of the reference and quilts; none where there are few."""
        num = min(CHECKED, self.settings.num, len(self.others))
        checks: list[Check] = []
        if num < max(LEAST, self.settings.neighbours + 1):
            return checks
        for name in self.networks:
            real = self._vectors_of_rows(name, f"outside of {self.num_reference}", self.others, num)
            quilts = self._vectors_of_rows(name, f"quilts of {num}", self.shuffled, num, quilts_of)
            figures = [self._distances(name, vectors, alone=False) for vectors in (real, quilts)]
            checks += [Check(key.partition("/")[0], name, *(one[key].value for one in figures)) for key in figures[0]]
        return checks

    def _alike(self) -> list[list[int]]:
        """Rows of the reference that share a caption, `each` of a caption."""
        rows = self.shuffled[: self.num_reference]
        found: dict[str, list[int]] = {}
        for row, caption in zip(rows.tolist(), self.rows.data.texts("caption", rows), strict=True):
            found.setdefault(caption, []).append(row)
        each = self.settings.each
        return [rows[:each] for rows in found.values() if len(rows) >= each][: self.settings.varied]

    # --- figures ----------------------------------------------------------------------------------------------------

    def _extract(self, name: str, images: Images) -> Vectors:
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise InputError(
                f"there are rows {list(images.shape)} of {images.dtype} in place of images: remove what is in "
                f"{self.out / 'pictures'}, and rerun the command"
            )
        vectors = self.networks[name].extract(images_of(images).to(self.device)).float().cpu().numpy()
        if not np.isfinite(vectors).all():
            raise InputError(f"{name} gives features that are not finite: its weights are damaged, copy them again")
        return vectors

    def compare(self, name: str, vectors: Vectors, labels: Sequence[str], alone: bool) -> Figures:
        """Returns a set's distances to the reference, and how often its features show the labels asked for.

        `alone`: there are no other seeds to tell their errors.
        """
        figures = self._distances(name, vectors, alone)
        if "frechet" in self.metrics and len(vectors) >= least_for_infinity(vectors.shape[1]):
            limit = frechet_infinity(self.references[name][0], vectors)
            figures[f"frechet_infinity/{name}"] = Figure(limit.value, limit.error)
        if "labels" in self.metrics:
            right = [float(a == b) for a, b in zip(self.readers[name].read(vectors), labels, strict=True)]
            figures[f"label_accuracy/{name}"] = mean_of(right)
        return figures

    def _distances(self, name: str, vectors: Vectors, alone: bool) -> Figures:
        moments, real = self.references[name]
        figures: Figures = {}
        if "frechet" in self.metrics:
            error = frechet_error(moments, vectors) if alone and len(vectors) >= 4 else None
            figures[f"frechet/{name}"] = Figure(frechet_to(moments, vectors), error)
        if "kernel" in self.metrics:
            distance = kernel_distance(real, vectors)
            figures[f"kernel/{name}"] = Figure(distance.value, distance.spread)
        if "coverage" in self.metrics:
            num = min(len(real), len(vectors), MOST_FOR_PAIRS)  # as many of each: recall grows with the number
            shares = measure_coverage(real[:num], vectors[:num], self.settings.neighbours)
            figures |= {f"{key}/{name}": Figure(value) for key, value in asdict(shares).items()}
        return figures

    def look(self, batches: Iterator[Images], captions: Sequence[str], what: str) -> Figures:
        """What is seen in the images themselves, which come a batch at a time."""
        scores: list[float] = []
        right: list[float] = []
        figures: Figures = {}

        def seen() -> Iterator[Tensor]:
            hidden = None if self.progress else True
            with tqdm(total=len(captions), desc=f"look at {what}", unit=" images", disable=hidden, leave=False) as bar:
                first = 0
                for images in batches:
                    texts = captions[first : first + len(images)]
                    first += len(images)
                    shown = images_of(images).to(self.device)
                    if self.clip is not None:
                        scores.extend(self.clip.scores(shown, texts).tolist())
                    if "accuracy" in self.metrics:
                        right.extend(map(float, are_right(images, texts)))
                    yield shown
                    bar.update(len(images))

        if self.distance is not None:
            figures[f"lpips/{LPIPS}"] = Figure(self.distance.mean_over_pairs(seen()))
        elif self.clip is not None or "accuracy" in self.metrics:
            for _ in seen():
                pass
        if self.clip is not None:
            figures[f"clip_score/{self.clip.spec}"] = mean_of(scores)
        if "accuracy" in self.metrics:
            figures["prompt_accuracy"] = mean_of(right)
        return figures

    def measure_groups(self, groups: Iterator[Images]) -> Figures:
        """How far apart the images of one prompt are, on average over prompts."""
        assert self.distance is not None
        found = [self.distance.mean_over_pairs([images_of(group).to(self.device)]) for group in groups]
        return {f"lpips_per_prompt/{LPIPS}": mean_of(found)}

    def combine(self, sets: Sequence[Figures]) -> dict[str, dict[str, Any]]:
        """The mean over seeds and the deviation among them; of one set, what it says of itself."""
        networks = self.describe()
        return {key: _combined(key, [figures[key] for figures in sets], networks) for key in sets[0]}


def _combined(key: str, found: Sequence[Figure], networks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    values = [figure.value for figure in found]
    mean, deviation = mean_over_seeds(values)
    about: dict[str, Any] = {"value": mean, "error": found[0].error, "error_from": None}
    if deviation is not None:
        about |= {"error": deviation, "error_from": "seeds", "values": values}
    elif found[0].error is not None:
        about["error_from"] = ERRORS.get(key.partition("/")[0], "pictures")
    if name := key.partition("/")[2]:
        about["features"] = {"name": name, "fingerprint": networks[name]["fingerprint"]}
    return about


# What an error is told from where there is one set alone.
ERRORS = {
    "frechet": "leaving out tenths",
    "frechet_infinity": "the fit of the line",
    "kernel": "subsets",
    "lpips_per_prompt": "prompts",
}


def mean_of(values: Sequence[float]) -> Figure:
    """With the standard error of the mean."""
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Figure(float(np.mean(values)), error)
