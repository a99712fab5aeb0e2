"""Settings of `atoll evaluate`. In a module of their own, so that its --help need not import torch."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from atoll.errors import InputError, unknown

METRICS = ("frechet", "kernel", "coverage", "diversity", "clip", "accuracy", "labels", "flops")
SPLITS = ("held_out", "train", "all")
MOST_IMAGES = 10**6  # per seed, so that each seed has its own range of noise seeds
MOST_FOR_PAIRS = 10_000
LEAST = {"first_seed": 0} | dict.fromkeys(("seeds", "neighbours", "varied"), 1)
LEAST |= dict.fromkeys(("num", "paired", "num_reference", "each"), 2)


@dataclass(frozen=True)
class MetricSettings:
    """The metrics to measure, and the images to measure them on."""

    num: int = 1000
    """Images per model and seed."""
    seeds: int = 1
    """Number of seeds; with several, figures are means, with errors over the seeds."""
    first_seed: Annotated[int, tyro.conf.arg(name="seed")] = 0
    """The first seed."""
    features: tuple[str, ...] = ("efficientnet",)
    """Feature networks: any of efficientnet, efficientnet:96, simple, dino:HUB_ID_OR_FOLDER, clip:HUB_ID_OR_FOLDER,
    inception:FILE."""
    metrics: tuple[str, ...] = ()
    """Any of frechet, kernel, coverage, diversity, clip, accuracy, labels, flops; by default all that can be measured.
    """
    clip: str | None = None
    """CLIP for the CLIP score: a hub id or a folder."""
    split: str | None = None
    """Split whose captions are the prompts: held_out (the default if anything is held out), train or all."""
    neighbours: int = 5
    """Number of nearest neighbours for precision, recall, density and coverage."""
    num_reference: Annotated[int, tyro.conf.arg(name="reference")] = 10_000
    """Maximum number of real images to compare with."""
    reference_split: str = "train"
    """Split of these real images: train, or held_out as in the papers."""
    originals: str | None = None
    """Source of the data, as given to `atoll prepare`: compares with the original images, as in the papers, so that the
    codec's losses count. By default real images are decoded from their latents."""
    distance: str = "stlpips"
    """Distance for diversity: stlpips, or LPIPS itself by lpips:alexnet-owt-7be5be79.pth, followed by a comma and the
    file of its channel weights if torchmetrics, which has a copy, is not installed."""
    varied: int = 50
    """Number of prompts with several images each, for diversity."""
    each: int = 4
    """Images per such prompt."""
    paired: int = MOST_FOR_PAIRS
    """Maximum number of images whose pairwise distances are averaged, for diversity over all prompts."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if not least <= getattr(self, name) <= MOST_IMAGES:
                raise InputError(f"{name} must be from {least} to {MOST_IMAGES}, but is {getattr(self, name)}")
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown("metric", metric, METRICS)
        if self.split not in (None, *SPLITS):
            raise unknown("split", self.split, SPLITS)
        if self.reference_split not in SPLITS[:2]:
            raise unknown("reference split", self.reference_split, SPLITS[:2])
        if not self.features:
            raise InputError("there are no features: give at least one network")
