"""What the demo tells of its avatars: figures of `MetricSuite`, and attribute by attribute, of two sets of prompts."""

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
from atoll.encoders.codecs import load_codec, to_uint8
from atoll.experiments.cache import Snapshot
from atoll.experiments.images import Images, SampledImages, tensor_of
from atoll.experiments.measure import MetricSuite
from atoll.experiments.settings import MetricSettings
from atoll.metrics.labels import are_right
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.settings import Sampling

SIZE = 32  # of the images
BATCH = 100  # images at a time; each depends on its own seed alone
FEATURES = "simple"


class Judge:
    """Judges the demo's models by the same prompts and seeds, and beside other real avatars."""

    def __init__(self, data: Path, num: int, num_heldout: int, num_varied: int, seeds: int) -> None:
        """Of `num_varied` prompts there are as many images as `seeds`."""
        self.data, self.seeds = data, seeds
        dataset = Dataset.open(data)
        captions = sorted(set(dataset.strings("caption", np.flatnonzero(dataset.column("split")[:] == TRAIN))))
        chosen = np.random.default_rng(0).choice(len(captions), min(num, len(captions)), replace=False)
        self.seen = [captions[i] for i in chosen]
        self.repeated = [caption for caption in self.seen[:num_varied] for _ in range(seeds)]
        examples, unseen = iter(make("avatars", 100 * num_heldout, SIZE, seed=1, heldout="only")), dict[str, None]()
        while len(unseen) < num_heldout:
            unseen[next(examples).caption] = None
        self.heldout = list(unseen)
        self._folder = TemporaryDirectory()  # images are drawn anew for each model, so that the time is told right

    @cached_property
    def suite(self) -> MetricSuite:
        settings = MetricSettings(features=(FEATURES,), device="cpu")
        reference = Dataset.open(self.data).column("features")[:].astype(np.float32)
        return MetricSuite(settings, ("frechet", "accuracy"), reference, Path(self._folder.name))

    @cached_property
    def real(self) -> dict[str, float]:
        """Returns what a model cannot surpass: the figures of other real images, through the codec."""
        codec, rng = load_codec(self.data), np.random.default_rng(1)
        drawn = [draw_avatar(attributes_of(caption), SIZE, rng) for caption in (*self.seen, *self.repeated)]
        images = to_uint8(codec.decode(codec.encode(tensor_of(np.stack(drawn)))))
        real, varied = images[: len(self.seen)], images[len(self.seen) :]
        distance = self.suite.compare(FEATURES, self.suite.extract(FEATURES, real))[f"frechet/{FEATURES}"]["value"]
        accuracy = float(np.mean(are_right(real, self.seen)))
        return {"prompt_accuracy": accuracy, "frechet": distance, "spread": self._spread(varied)}

    def judge(self, model: Path, key: Mapping[str, str]) -> Snapshot:
        pipe, real = AtollPipeline(model), dict(self.real)
        spread = real.pop("spread")
        sampling, folder = Sampling(batch=BATCH, guidance=pipe.guidance), Path(self._folder.name)
        sets = [
            SampledImages(
                name=model.name, captions=captions, size=BATCH, pipe=pipe, sampling=sampling, first_seed=first_seed,
                folder=folder,
            )
            for captions, first_seed in ((self.seen, 0), (self.heldout, 10_000), (self.repeated, 20_000))
        ]  # fmt: skip
        start = time.perf_counter()
        seen = sets[0].load()
        seconds = time.perf_counter() - start
        heldout, varied = sets[1].load(), sets[2].load()
        figures = self.suite.measure(sets[0])
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
            "real": {**real, "diversity": 1.0},
            "flops_an_image": sets[0].count_flops(),
            "seconds_an_image": round(seconds / len(seen), 4),
        }
        about = {"figures": results, "heldout": self.heldout, "heldout_right": right_heldout}
        return Snapshot(key, about, {"seen": seen, "heldout": heldout})

    def _spread(self, images: Images) -> float:
        """Returns how far apart images of one prompt are, on average over pairs."""
        vectors = self.suite.extract(FEATURES, images).astype(np.float64)
        groups = vectors.reshape(-1, self.seeds, vectors.shape[1])
        pairs = combinations(range(self.seeds), 2)
        return float(np.mean([np.linalg.norm(groups[:, a] - groups[:, b], axis=1).mean() for a, b in pairs]))


def _by_attribute(images: Images, captions: Sequence[str]) -> dict[str, float]:
    pairs = list(zip(read_avatars(images), map(attributes_of, captions), strict=True))
    return {name: float(np.mean([seen[name] == want[name] for seen, want in pairs])) for name in ATTRIBUTES}
