"""Avatars that a model has made, judged: are they as asked, how near to the data, how varied, and at what cost."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from atoll.data.builtin import make
from atoll.data.builtin.avatar_reader import read_avatars
from atoll.data.builtin.avatars import ATTRIBUTES, attributes_of, draw_avatar
from atoll.data.shards import TRAIN, Dataset
from atoll.encoders.codecs import load_codec, pictures_of
from atoll.encoders.features import make_features
from atoll.errors import InputError, shown
from atoll.experiments.flops import counting
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.sampling.pipeline import AtollPipeline
from atoll.storage import read_json, write_json, write_whole
from atoll.tensors import read_tensors

SIZE = 32  # of the pictures
BATCH = 100  # pictures at a time; each depends on its own seed alone

# --- what is kept of a stage -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kept:
    """Pictures and what is known of them, made by the models of `key`."""

    key: Mapping[str, str]
    about: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def read(cls, folder: Path, name: str, key: Mapping[str, str]) -> "Kept | None":
        """None where there is nothing, or what there is was made by other models."""
        path = folder / f"{name}.json"
        if not path.exists():
            return None
        again = f"remove {path}, and run the demo again"
        found = read_json(path, again)
        if found.get("key") != key:
            return None
        if not isinstance(about := found.get("about"), dict):
            raise InputError(f"{path} is damaged, its 'about' is {shown(about)}: {again}")
        tensors = read_tensors(folder / f"{name}.safetensors", again)
        return cls(key, about, {name: tensor.numpy() for name, tensor in tensors.items()})

    def write(self, folder: Path, name: str) -> None:
        """The JSON file last: it says that the other is there."""
        arrays = {key: np.ascontiguousarray(array) for key, array in self.arrays.items()}
        (folder / f"{name}.json").unlink(missing_ok=True)
        write_whole(folder / f"{name}.safetensors", lambda staged: save_file(arrays, staged))
        write_json(folder / f"{name}.json", {"key": dict(self.key), "about": dict(self.about)})


# --- judging ---------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """The prompts, the same for all models."""

    seen: list[str]  # captions of the training data
    heldout: list[str]
    varied: list[str]  # of each, so many pictures
    seeds: int

    @classmethod
    def of(cls, data: Dataset, num: int, num_heldout: int, num_varied: int, seeds: int) -> "Asked":
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


class Judge:
    """Prompts, seeds and the data's features, the same for all models."""

    def __init__(self, data: Path, asked: Asked) -> None:
        self.asked = asked
        self.features = make_features("simple")
        found = Dataset.open(data)
        self.reference = Moments.of(found.column("features")[:].astype(np.float64))
        # What a model cannot surpass: other real pictures, through the codec.
        codec = load_codec(data)
        rng = np.random.default_rng(1)
        real = [draw_avatar(attributes_of(caption), SIZE, rng) for caption in (*asked.seen, *self._varied)]
        pictures = pictures_of(codec.decode(codec.encode(images_of(np.stack(real)))))
        num = len(asked.seen)
        self.real_distance = self._distance(pictures[:num])
        self.real_spread = self._spread(pictures[num:])
        self.real_right = float(np.mean(are_right(pictures[:num], asked.seen)))

    @property
    def _varied(self) -> list[str]:
        return [caption for caption in self.asked.varied for _ in range(self.asked.seeds)]

    def judge(self, model: Path, key: Mapping[str, str]) -> Kept:
        pipe, asked = AtollPipeline(model), self.asked
        begun = time.perf_counter()
        seen = self._make(pipe, asked.seen, 0)
        seconds = (time.perf_counter() - begun) / len(asked.seen)
        heldout = self._make(pipe, asked.heldout, 10_000)
        varied = self._make(pipe, self._varied, 20_000)
        pairs, pairs_heldout = read_back(seen, asked.seen), read_back(heldout, asked.heldout)
        right_heldout = [found == want for found, want in pairs_heldout]
        figures = {
            "prompt_accuracy": float(np.mean([found == want for found, want in pairs])),
            "prompt_accuracy_heldout": float(np.mean(right_heldout)),
            "attribute_accuracy": _by_attribute(pairs),
            "attribute_accuracy_heldout": _by_attribute(pairs_heldout),
            "num_prompts": len(seen),
            "num_prompts_heldout": len(heldout),
            "frechet": self._distance(seen),
            "diversity": self._spread(varied) / self.real_spread,
            "real": {"prompt_accuracy": self.real_right, "frechet": self.real_distance, "diversity": 1.0},
            "flops_an_image": flops_of_samples(pipe, asked.seen[:8]),
            "seconds_an_image": round(seconds, 4),
        }
        about = {"figures": figures, "heldout": asked.heldout, "heldout_right": right_heldout}
        return Kept(key, about, {"seen": seen, "heldout": heldout})

    def _make(self, pipe: AtollPipeline, captions: Sequence[str], seed: int) -> NDArray[np.uint8]:
        """A picture of each caption, from a seed of its own."""
        seeds = [seed + i for i in range(len(captions))]
        return bytes_of(pipe(captions, seed=seeds, output_type="pt", batch_size=BATCH, progress=False).images)

    def _distance(self, pictures: NDArray[np.uint8]) -> float:
        return frechet_distance(self.reference, Moments.of(self._features(pictures)))

    def _spread(self, pictures: NDArray[np.uint8]) -> float:
        """How far apart pictures of one prompt are, on average over pairs."""
        groups = self._features(pictures).reshape(len(self.asked.varied), self.asked.seeds, -1)
        pairs = combinations(range(self.asked.seeds), 2)
        return float(np.mean([np.linalg.norm(groups[:, a] - groups[:, b], axis=1).mean() for a, b in pairs]))

    def _features(self, pictures: NDArray[np.uint8]) -> NDArray[np.float64]:
        return self.features.extract(images_of(pictures)).double().numpy()


def are_right(pictures: NDArray[np.uint8], captions: Sequence[str]) -> list[bool]:
    """Whether every attribute that the caption tells is in the picture, and no other."""
    return [found == want for found, want in read_back(pictures, captions)]


def read_back(pictures: NDArray[np.uint8], captions: Sequence[str]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """The attributes in each picture, and those that its caption tells."""
    wanted = [attributes_of(caption) for caption in captions]
    return list(zip(read_avatars(pictures), wanted, strict=True))


def _by_attribute(pairs: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]) -> dict[str, float]:
    return {name: float(np.mean([found[name] == want[name] for found, want in pairs])) for name in ATTRIBUTES}


def images_of(pictures: NDArray[np.uint8]) -> Tensor:
    """Bytes [n, S, S, 3] as images [n, 3, S, S] in [-1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def bytes_of(images: object) -> NDArray[np.uint8]:
    """What a pipeline gives as tensors in [0, 1], as bytes."""
    assert isinstance(images, Tensor)
    return pictures_of(images * 2 - 1)


# --- counting --------------------------------------------------------------------------------------------------------


def flops_of_samples(pipe: AtollPipeline, captions: Sequence[str]) -> float:
    """Of making a picture, on average."""
    with counting() as total:
        pipe(captions, seed=0, output_type="latent", batch_size=BATCH, progress=False)
        return total() / len(captions)
