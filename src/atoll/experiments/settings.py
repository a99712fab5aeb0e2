"""What `atoll evaluate` measures. Apart, so that its --help need not wait for torch."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from atoll.errors import InputError, unknown

METRICS = ("frechet", "kernel", "coverage", "diversity", "clip", "accuracy", "labels", "flops")
SPLITS = ("held_out", "train", "all")
MOST_IMAGES = 10**6  # of one seed: the seeds of their noise are counted in these
MOST_FOR_PAIRS = 10_000
LEAST = {"first_seed": 0} | dict.fromkeys(("seeds", "neighbours", "varied"), 1)
LEAST |= dict.fromkeys(("num", "paired", "num_reference", "each"), 2)


@dataclass(frozen=True)
class MetricSettings:
    """What is measured."""

    num: int = 1000
    """Images per model and seed."""
    seeds: int = 1
    """How many seeds; with several, figures are means, with errors over the seeds."""
    first_seed: Annotated[int, tyro.conf.arg(name="seed")] = 0
    """The first seed."""
    features: tuple[str, ...] = ("efficientnet",)
    """Networks that images are compared by: efficientnet, efficientnet:96, simple, dino:HUB_ID_OR_FOLDER,
    clip:HUB_ID_OR_FOLDER, inception:FILE."""
    metrics: tuple[str, ...] = ()
    """Any of frechet, kernel, coverage, diversity, clip, accuracy, labels, flops; by default all that can be measured.
    """
    clip: str | None = None
    """The CLIP of the CLIP score, as a hub id or a folder."""
    split: str | None = None
    """Whose captions are prompts: held_out (the default where something is held out), train or all."""
    neighbours: int = 5
    """How many neighbours of an image count, for precision, recall, density and coverage."""
    num_reference: Annotated[int, tyro.conf.arg(name="reference")] = 10_000
    """Real images to compare with, at most."""
    reference_split: str = "train"
    """What these are of: train, or held_out, as in the papers."""
    originals: str | None = None
    """What the data was prepared from, as given to `atoll prepare`: then real images are these themselves, as in the
    papers, and what the codec loses counts. Without, they are as their latents are decoded."""
    distance: str = "stlpips"
    """What tells how varied images are: stlpips, or LPIPS itself by lpips:alexnet-owt-7be5be79.pth, with the file of
    its channel weights after a comma where torchmetrics, which has them, is not installed."""
    varied: int = 50
    """Prompts of which several images are made, for diversity."""
    each: int = 4
    """Images of each of these prompts."""
    paired: int = MOST_FOR_PAIRS
    """Images whose distances to each other are averaged, for diversity over all prompts, at most."""
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
