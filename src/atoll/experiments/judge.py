"""Avatars that a model has made, judged: are they as asked, how near to the data, how varied, and at what cost."""

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.builtin import make
from atoll.data.builtin.avatar_reader import read_avatars
from atoll.data.builtin.avatars import ATTRIBUTES, attributes_of, draw_avatar
from atoll.data.shards import TRAIN, Dataset
from atoll.encoders.codecs import load_codec, pictures_of
from atoll.encoders.features import make_features
from atoll.experiments.cache import Snapshot
from atoll.experiments.flops import counting
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.sampling.pipeline import AtollPipeline

SIZE = 32  # of the images
BATCH = 100  # images at a time; each depends on its own seed alone
COUNTED = 8  # images of which FLOPs are counted

Images = NDArray[np.uint8]  # [N, S, S, 3]
Pairs = Sequence[tuple[Mapping[str, str], Mapping[str, str]]]


class DemoPrompts(NamedTuple):
    """The prompts, the same for all models."""

    seen: list[str]  # captions of the training data
    heldout: list[str]
    varied: list[str]  # of each, so many images
    seeds: int

    @classmethod
    def choose(cls, data: Dataset, num: int, num_heldout: int, num_varied: int, seeds: int) -> "DemoPrompts":
        captions = data.texts("caption", np.flatnonzero(data.column("split")[:] == TRAIN))
        distinct = sorted(set(captions))
        chosen = np.random.default_rng(0).choice(len(distinct), min(num, len(distinct)), replace=False)
        seen = [distinct[i] for i in chosen]
        unseen: dict[str, None] = {}
        for example in make("avatars", 100 * num_heldout, SIZE, seed=1, heldout="only"):
            unseen[example.caption] = None
            if len(unseen) == num_heldout:
                break
        return cls(seen, list(unseen), seen[:num_varied], seeds)

    @property
    def repeated(self) -> list[str]:
        return [caption for caption in self.varied for _ in range(self.seeds)]


class Judge:
    """Prompts, seeds and the data's features, the same for all models."""

    def __init__(self, data: Path, prompts: DemoPrompts) -> None:
        self.prompts, self.features = prompts, make_features("simple")
        self.reference = Moments.of(Dataset.open(data).column("features")[:].astype(np.float64))
        # What a model cannot surpass: other real images, through the codec.
        codec, rng = load_codec(data), np.random.default_rng(1)
        captions = (*prompts.seen, *prompts.repeated)
        drawn = np.stack([draw_avatar(attributes_of(caption), SIZE, rng) for caption in captions])
        images = pictures_of(codec.decode(codec.encode(images_of(drawn))))
        real, varied = images[: len(prompts.seen)], images[len(prompts.seen) :]
        self.spread = self._spread(varied)
        accuracy = float(np.mean(are_right(real, prompts.seen)))
        self.real = {"prompt_accuracy": accuracy, "frechet": self._distance(real), "diversity": 1.0}

    def judge(self, model: Path, key: Mapping[str, str]) -> Snapshot:
        pipe, prompts = AtollPipeline(model), self.prompts
        start = time.perf_counter()
        seen = _sample(pipe, prompts.seen, 0)
        seconds = (time.perf_counter() - start) / len(prompts.seen)
        heldout = _sample(pipe, prompts.heldout, 10_000)
        varied = _sample(pipe, prompts.repeated, 20_000)
        pairs, pairs_heldout = read_back(seen, prompts.seen), read_back(heldout, prompts.heldout)
        right_heldout = are_right(heldout, prompts.heldout)
        figures = {
            "prompt_accuracy": float(np.mean(are_right(seen, prompts.seen))),
            "prompt_accuracy_heldout": float(np.mean(right_heldout)),
            "attribute_accuracy": _by_attribute(pairs),
            "attribute_accuracy_heldout": _by_attribute(pairs_heldout),
            "num_prompts": len(seen),
            "num_prompts_heldout": len(heldout),
            "frechet": self._distance(seen),
            "diversity": self._spread(varied) / self.spread,
            "real": self.real,
            "flops_an_image": _flops_per_image(pipe, prompts.seen[:COUNTED]),
            "seconds_an_image": round(seconds, 4),
        }
        about = {"figures": figures, "heldout": prompts.heldout, "heldout_right": right_heldout}
        return Snapshot(key, about, {"seen": seen, "heldout": heldout})

    def _distance(self, images: Images) -> float:
        return frechet_distance(self.reference, Moments.of(self._extract(images)))

    def _spread(self, images: Images) -> float:
        """Returns how far apart images of one prompt are, on average over pairs."""
        groups = self._extract(images).reshape(len(self.prompts.varied), self.prompts.seeds, -1)
        pairs = combinations(range(self.prompts.seeds), 2)
        return float(np.mean([np.linalg.norm(groups[:, a] - groups[:, b], axis=1).mean() for a, b in pairs]))

    def _extract(self, images: Images) -> NDArray[np.float64]:
        return self.features.extract(images_of(images)).double().numpy()


def _sample(pipe: AtollPipeline, captions: Sequence[str], first_seed: int) -> Images:
    """Returns an image of each caption, from a seed of its own."""
    seeds = [first_seed + i for i in range(len(captions))]
    return bytes_of(pipe(captions, seed=seeds, output_type="pt", batch_size=BATCH, progress=False).images)


def _flops_per_image(pipe: AtollPipeline, captions: Sequence[str]) -> float:
    with counting() as total:
        pipe(captions, seed=0, output_type="latent", batch_size=BATCH, progress=False)
        return total() / len(captions)


def are_right(images: Images, captions: Sequence[str]) -> list[bool]:
    """Returns whether every attribute that the caption tells is in the image, and no other."""
    return [seen == want for seen, want in read_back(images, captions)]


def read_back(images: Images, captions: Sequence[str]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Returns the attributes in each image, and those that its caption tells."""
    return list(zip(read_avatars(images), map(attributes_of, captions), strict=True))


def _by_attribute(pairs: Pairs) -> dict[str, float]:
    return {name: float(np.mean([seen[name] == want[name] for seen, want in pairs])) for name in ATTRIBUTES}


def images_of(images: Images) -> Tensor:
    """Returns bytes [n, S, S, 3] as images [n, 3, S, S] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def bytes_of(images: object) -> Images:
    """Returns what a pipeline gives as tensors in [0, 1], as bytes."""
    assert isinstance(images, Tensor)
    return pictures_of(images * 2 - 1)
