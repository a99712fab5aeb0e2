"""What the demo tells of its avatars: `Evaluation`'s figures, attribute by attribute, of seen and held-out prompts."""

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from atoll.data.builtin import make
from atoll.data.builtin.avatar_reader import read_avatars
from atoll.data.builtin.avatars import ATTRIBUTES, attributes_of, draw_avatar
from atoll.data.shards import TRAIN, Dataset
from atoll.encoders.codecs import load_codec, pictures_of
from atoll.experiments.cache import Snapshot
from atoll.experiments.evaluate import Contender, Evaluation
from atoll.experiments.images import Images, tensor_of
from atoll.experiments.measure import MetricSettings
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.metrics.labels import are_right
from atoll.sampling.settings import Sampling

SIZE = 32  # of the images
BATCH = 100  # images at a time; each depends on its own seed alone
FEATURES = "simple"


class Judge:
    """Judges the demo's models by the same prompts and seeds, and beside other real avatars."""

    def __init__(self, data: Path, num: int, num_heldout: int, num_varied: int, seeds: int) -> None:
        """Of `num_varied` prompts there are as many images as `seeds`."""
        self.data, self.num_varied, self.seeds = data, num_varied, seeds
        dataset = Dataset.open(data)
        captions = sorted(set(dataset.strings("caption", np.flatnonzero(dataset.column("split")[:] == TRAIN))))
        chosen = np.random.default_rng(0).choice(len(captions), min(num, len(captions)), replace=False)
        self.seen = [captions[i] for i in chosen]
        examples, unseen = iter(make("avatars", 100 * num_heldout, SIZE, seed=1, heldout="only")), dict[str, None]()
        while len(unseen) < num_heldout:
            unseen[next(examples).caption] = None
        self.heldout = list(unseen)
        self.places = {  # among the prompts, with the first seed
            "seen": (list(range(len(self.seen))), 0),
            "heldout": ([len(self.seen) + i for i in range(num_heldout)], 10_000),
            "varied": ([i for i in range(num_varied) for _ in range(seeds)], 20_000),
        }

    @cached_property
    def evaluation(self) -> Evaluation:
        self._folder = TemporaryDirectory()  # images are drawn anew for each model, so that the time is told right
        settings = MetricSettings(len(self.seen), features=(FEATURES,), metrics=("frechet", "accuracy", "flops"))
        reference = Dataset.open(self.data).column("features")[:].astype(np.float32)
        prompts = [*self.seen, *self.heldout]
        return Evaluation(self.data, Path(self._folder.name), settings, prompts, None, False, reference)

    @cached_property
    def real(self) -> tuple[dict[str, float], float]:
        """Returns what a model cannot surpass, and the spread: of other real images, through the codec."""
        codec, rng = load_codec(self.data), np.random.default_rng(1)
        prompts = [self.seen[i] for name in ("seen", "varied") for i in self.places[name][0]]
        drawn = np.stack([draw_avatar(attributes_of(caption), SIZE, rng) for caption in prompts])
        images = pictures_of(codec.decode(codec.encode(tensor_of(drawn))))
        real, varied = images[: len(self.seen)], images[len(self.seen) :]
        suite = self.evaluation.suite
        distance = frechet_distance(suite.references[FEATURES].moments, Moments.of(suite.extract(FEATURES, real)))
        accuracy = float(np.mean(are_right(real, self.seen)))
        return {"prompt_accuracy": accuracy, "frechet": distance, "diversity": 1.0}, self._spread(varied)

    def judge(self, model: Path, key: Mapping[str, str]) -> Snapshot:
        contender, evaluation = Contender("the model", model, Sampling(batch=BATCH)), self.evaluation
        pipe, (real, spread) = evaluation.open(contender), self.real
        sets = {name: evaluation.images(contender, pipe, *how) for name, how in self.places.items()}
        start = time.perf_counter()
        seen = sets["seen"].load()
        seconds = time.perf_counter() - start
        heldout, varied = sets["heldout"].load(), sets["varied"].load()
        figures = evaluation.judge(contender)["figures"]
        right_heldout = are_right(heldout, self.heldout)
        results = {
            "prompt_accuracy": figures["prompt_accuracy"]["value"],
            "prompt_accuracy_heldout": float(np.mean(right_heldout)),
            "attribute_accuracy": _by_attribute(seen, self.seen),
            "attribute_accuracy_heldout": _by_attribute(heldout, self.heldout),
            "num_prompts": len(seen),
            "num_prompts_heldout": len(heldout),
            "frechet": figures[f"frechet/{FEATURES}"]["value"],
            "diversity": self._spread(varied) / spread,
            "real": real,
            "flops_an_image": figures["flops_an_image"]["value"],
            "seconds_an_image": round(seconds / len(seen), 4),
        }
        about = {"figures": results, "heldout": self.heldout, "heldout_right": right_heldout}
        return Snapshot(key, about, {"seen": seen, "heldout": heldout})

    def _spread(self, images: Images) -> float:
        """Returns how far apart images of one prompt are, on average over pairs."""
        vectors = self.evaluation.suite.extract(FEATURES, images).astype(np.float64)
        groups = vectors.reshape(self.num_varied, self.seeds, -1)
        pairs = combinations(range(self.seeds), 2)
        return float(np.mean([np.linalg.norm(groups[:, a] - groups[:, b], axis=1).mean() for a, b in pairs]))


def _by_attribute(images: Images, captions: Sequence[str]) -> dict[str, float]:
    pairs = list(zip(read_avatars(images), map(attributes_of, captions), strict=True))
    return {name: float(np.mean([seen[name] == want[name] for seen, want in pairs])) for name in ATTRIBUTES}
