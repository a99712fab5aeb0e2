"""Sets of images to measure: those of a data set, and samples of a model, cached on disk."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
from atoll.diffusion.solvers import uniform_times
from atoll.encoders.codec import Codec, to_uint8
from atoll.errors import InputError
from atoll.experiments.cache import cached
from atoll.experiments.flops import counting
from atoll.experiments.originals import Originals
from atoll.experiments.sanity import quilts_of
from atoll.networks.expert import Expert
from atoll.sampling.ensemble import SAMPLERS, generate, generate_native
from atoll.sampling.expert import Prompts
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import get_routing
from atoll.sampling.settings import Sampling

COUNTED = 8  # images over which FLOPs are counted

Images = NDArray[np.uint8]  # [N, S, S, 3]


def tensor_of(images: Images) -> Tensor:
    """Converts bytes [n, S, S, 3] to images [n, 3, S, S] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def bytes_of(images: object) -> Images:
    """Converts a pipeline's images [n, 3, S, S] in [0, 1] to bytes [n, S, S, 3]."""
    assert isinstance(images, Tensor)
    return to_uint8(images * 2 - 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet(ABC):
    """Images with captions and labels, read in batches."""

    name: str  # in progress bars
    captions: Sequence[str]
    labels: Sequence[str] = ()
    size: int = 256  # images per batch

    @abstractmethod
    def about(self, span: slice) -> dict[str, Any]:
        """Returns all that these images depend on, as a cache key."""

    @abstractmethod
    def read(self, span: slice) -> Images: ...

    def spans(self, what: str = "", progress: bool = False) -> Iterator[slice]:
        """Yields the slices of batches, with a progress bar."""
        num, hidden = len(self.captions), None if progress else True
        with tqdm(total=num, desc=f"{self.name}: {what}", unit=" images", disable=hidden, leave=False) as bar:
            for first in range(0, num, self.size):
                yield (span := slice(first, min(first + self.size, num)))
                bar.update(span.stop - first)

    def load(self, progress: bool = False) -> Images:
        return np.concatenate([self.read(span) for span in self.spans("drawing", progress)])


@dataclass(frozen=True, eq=False, kw_only=True)
class RealImages(ImageSet):
    """Images of a data set: originals, or decoded from latents so that the codec's losses do not count."""

    view: DatasetView
    codec: Codec
    rows: NDArray[np.int64]
    as_quilts: bool = False
    originals: Originals | None = None

    def about(self, span: slice) -> dict[str, Any]:
        data, codec = self.view.fingerprint, self.view.data.card.codec.images
        about = {"data": data, "codec": codec, "rows": self.rows[span].tolist(), "as_quilts": self.as_quilts}
        return about if self.originals is None else about | {"originals": True}

    def read(self, span: slice) -> Images:
        self.view.latents(self.rows[span])  # raises an error if they are damaged
        if self.originals is None:
            images = decode_rows(self.view.data, self.rows[span], self.codec, side=2**20)
        else:
            images = self.originals.read(self.rows[span])
        return quilts_of(images) if self.as_quilts else images


@dataclass(frozen=True, eq=False, kw_only=True)
class SampledImages(ImageSet):
    """A model's samples, one per caption, with consecutive seeds."""

    pipe: AtollPipeline
    sampling: Sampling  # with defaults filled in
    first_seed: int
    folder: Path  # of the cache
    clusters: NDArray[np.int64] | None = None  # of the captions' own images, for oracle routing
    bound: Tensor | None = None  # [C, 1, 1], the largest latents, for native samplers that clip x0

    def about(self, span: slice) -> dict[str, Any]:
        return {
            "model": self.pipe.index.hash,
            "experts": list(self.pipe.objectives),
            "sampling": asdict(self.sampling),
            "captions": list(self.captions[span]),
            "first_seed": self.first_seed + span.start,
            "device": self.pipe.device.type,
            "clusters": None if self.clusters is None else self.clusters[span].tolist(),
            **({} if self.bound is None else {"bound": self.bound.flatten().tolist()}),
        }

    def read(self, span: slice) -> Images:
        space = self.pipe.index.latent_space
        side = space.shape[1] * space.codec.factor
        shape = (span.stop - span.start, side, side, 3)
        return cached(self.folder, self.about(span), "uint8", shape, lambda: self.paint(span))

    def paint(self, span: slice) -> Images:
        return bytes_of(self.pipe.render(self.latents(span), "pt"))

    def latents(self, span: slice) -> Tensor:
        how = self.sampling
        seeds = [self.first_seed + i for i in range(span.start, span.stop)]
        prompts = Prompts.encode(self.pipe.text_encoder, self.captions[span])
        steps, guidance, solver = self.pipe.settle(how)
        times = uniform_times(steps)
        if solver.partition(":")[0] in SAMPLERS:
            return generate_native(self._expert, prompts, seeds, solver, times, guidance, self.bound)
        labels = None if self.clusters is None else torch.from_numpy(self.clusters[span])
        return generate(
            self.pipe.ensemble, prompts, seeds, solver=solver, times=times, routing=get_routing(how.routing),
            guidance=guidance, labels=labels,
        )  # fmt: skip

    @cached_property
    def _expert(self) -> Expert:
        """Returns the only expert of a model, for sampling on its own schedule."""
        (card, *others) = self.pipe.index.experts
        if others or card is None:
            raise InputError(f"{self.sampling.solver} samples one expert on its own schedule: give a model of one")
        self.pipe.index.verify_part(self.pipe.folder, card.folder)
        expert = Expert.load(self.pipe.folder / card.folder)
        expert.network.to(self.pipe.device)
        return expert

    def count_flops(self) -> float:
        """Returns the mean FLOPs per image for sampling latents, over a few images."""
        num = min(COUNTED, len(self.captions))
        with counting() as total:
            self.latents(slice(0, num))
            return total() / num
