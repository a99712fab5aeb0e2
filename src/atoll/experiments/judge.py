"""What the demo tells of its avatars: `Evaluation`'s figures, attribute by attribute, of seen and held-out prompts."""

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.data.builtin import make
from atoll.data.builtin.avatar_reader import read_avatars
from atoll.data.builtin.avatars import ATTRIBUTES, attributes_of, draw_avatar
from atoll.data.shards import TRAIN, Dataset
from atoll.encoders.codecs import load_codec, pictures_of
from atoll.experiments.cache import Snapshot
from atoll.experiments.evaluate import Contender, Evaluation
from atoll.experiments.measure import Images, MetricSettings, tensor_of
from atoll.metrics.frechet import frechet_to
from atoll.metrics.labels import are_right
from atoll.sampling.settings import Sampling

SIZE = 32  # of the images
BATCH = 100  # images at a time; each depends on its own seed alone
FEATURES = "simple"


class DemoPrompts(NamedTuple):
    """The prompts, the same for all models."""

    seen: list[str]  # captions of the training data
    heldout: list[str]
    varied: list[str]  # of each, so many images
    seeds: int

    @classmethod
    def choose(cls, data: Dataset, num: int, num_heldout: int, num_varied: int, seeds: int) -> "DemoPrompts":
        captions = data.strings("caption", np.flatnonzero(data.column("split")[:] == TRAIN))
        distinct = sorted(set(captions))
        chosen = np.random.default_rng(0).choice(len(distinct), min(num, len(distinct)), replace=False)
        seen = [distinct[i] for i in chosen]
        unseen: dict[str, None] = {}
        for example in make("avatars", 100 * num_heldout, SIZE, seed=1, heldout="only"):
            unseen[example.caption] = None
            if len(unseen) == num_heldout:
                break
        return cls(seen, list(unseen), seen[:num_varied], seeds)


class Judge:
    """Judges the demo's models by the same prompts and seeds, and beside other real avatars."""

    def __init__(self, data: Path, prompts: DemoPrompts) -> None:
        self.prompts = prompts
        self._folder = TemporaryDirectory()  # images are drawn anew for each model, so that the time is told right
        settings = MetricSettings(len(prompts.seen), features=(FEATURES,), metrics=("frechet", "accuracy", "flops"))
        reference = Dataset.open(data).column("features")[:].astype(np.float32)
        self.evaluation = Evaluation(
            data, Path(self._folder.name), settings, [*prompts.seen, *prompts.heldout], None, False, reference
        )
        # What a model cannot surpass: other real images, through the codec.
        codec, rng = load_codec(data), np.random.default_rng(1)
        repeated = [caption for caption in prompts.varied for _ in range(prompts.seeds)]
        drawn = [draw_avatar(attributes_of(caption), SIZE, rng) for caption in (*prompts.seen, *repeated)]
        images = pictures_of(codec.decode(codec.encode(tensor_of(np.stack(drawn)))))
        real, varied = images[: len(prompts.seen)], images[len(prompts.seen) :]
        self.spread = self._spread(varied)
        moments, _ = self.evaluation.suite.references[FEATURES]
        distance = frechet_to(moments, self.evaluation.suite.extract(FEATURES, real))
        accuracy = float(np.mean(are_right(real, prompts.seen)))
        self.real = {"prompt_accuracy": accuracy, "frechet": distance, "diversity": 1.0}

    def judge(self, model: Path, key: Mapping[str, str]) -> Snapshot:
        prompts, contender = self.prompts, Contender("the model", model, Sampling(batch=BATCH))
        num, num_varied = len(prompts.seen), len(prompts.varied)
        seconds, seen = self._draw(contender, np.arange(num), 0)
        _, heldout = self._draw(contender, num + np.arange(len(prompts.heldout)), 10_000)
        _, varied = self._draw(contender, np.repeat(np.arange(num_varied), prompts.seeds), 20_000)
        figures = self.evaluation.judge(contender)["figures"]
        right_heldout = are_right(heldout, prompts.heldout)
        results = {
            "prompt_accuracy": figures["prompt_accuracy"]["value"],
            "prompt_accuracy_heldout": float(np.mean(right_heldout)),
            "attribute_accuracy": _by_attribute(seen, prompts.seen),
            "attribute_accuracy_heldout": _by_attribute(heldout, prompts.heldout),
            "num_prompts": len(seen),
            "num_prompts_heldout": len(heldout),
            "frechet": figures[f"frechet/{FEATURES}"]["value"],
            "diversity": self._spread(varied) / self.spread,
            "real": self.real,
            "flops_an_image": figures["flops_an_image"]["value"],
            "seconds_an_image": round(seconds / num, 4),
        }
        about = {"figures": results, "heldout": prompts.heldout, "heldout_right": right_heldout}
        return Snapshot(key, about, {"seen": seen, "heldout": heldout})

    def _draw(self, contender: Contender, places: NDArray[np.int64], first_seed: int) -> tuple[float, Images]:
        """Returns the seconds it took, and an image of each prompt, from a seed of its own."""
        images = self.evaluation.images(contender, self.evaluation.open(contender), places, first_seed)
        start = time.perf_counter()
        pixels = images.load()
        return time.perf_counter() - start, pixels

    def _spread(self, images: Images) -> float:
        """Returns how far apart images of one prompt are, on average over pairs."""
        vectors = self.evaluation.suite.extract(FEATURES, images).astype(np.float64)
        groups = vectors.reshape(len(self.prompts.varied), self.prompts.seeds, -1)
        pairs = combinations(range(self.prompts.seeds), 2)
        return float(np.mean([np.linalg.norm(groups[:, a] - groups[:, b], axis=1).mean() for a, b in pairs]))


def _by_attribute(images: Images, captions: Sequence[str]) -> dict[str, float]:
    pairs = list(zip(read_avatars(images), map(attributes_of, captions), strict=True))
    return {name: float(np.mean([seen[name] == want[name] for seen, want in pairs])) for name in ATTRIBUTES}
