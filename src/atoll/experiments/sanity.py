"""Sanity checks of metrics: images of nothing must score worse than real ones, and no model much better.

Precision and density measure whether samples lie among the real images in feature space. With uninformative features
the middle of that space counts as such: the mean image under a pattern of tiles, which a model draws that has learned
hardly anything, then scores like a photograph. So such quilts are measured too, as many as real images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.experiments.tables import LOWER, kind_of

CHECKED, LEAST = 200, 50  # number of quilts and of real images; with fewer than LEAST, chance decides
TILE = 8  # pixels
CONTRAST = 0.5  # of the pattern, relative to that within real images
AS_GOOD = 0.9  # share of real images' figure from which quilts count as equally good, if higher is better
CROWDED = 1.5  # multiple of real images' density from which a model's is suspicious


def tells(key: str, real: float, quilts: float) -> bool:
    """Returns whether quilts score worse than real images on a figure."""
    return quilts > real if kind_of(key).better == LOWER else quilts < AS_GOOD * real


def quilts_of(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Returns equally many images [N, S, S, 3] of nothing: the mean image with a random tile repeated over it."""
    num, side = images.shape[:2]
    within = np.sqrt(images.var((1, 2)).mean())
    tiles = np.random.default_rng(seed).standard_normal((num, TILE, TILE, 1))
    times = -(-side // TILE)
    pattern = np.tile(tiles, (1, times, times, 1))[:, :side, :side]
    quilts: NDArray[np.uint8] = (images.mean(0) + CONTRAST * within * pattern).round().clip(0, 255).astype(np.uint8)
    return quilts


def doubt_features(sanity: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each network whose features rate quilts as high as real images."""
    numbers: dict[str, dict[str, str]] = {}
    for key, about in sanity.items():
        metric, _, network = key.partition("/")
        if not about["tells"]:
            numbers.setdefault(network, {})[metric] = f"{metric} {about['quilts']:.2f} against {about['real']:.2f}"
    return [
        f"By {network} features, images of nothing (the mean one under a pattern of tiles) are as good as real ones "
        f"({', '.join(own.values())}): do not trust {' and '.join(own)} by {network} on this data, and use --features "
        f"{'efficientnet' if network == 'simple' else 'another network'}."
        for network, own in numbers.items()
    ]


def doubt_density(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each model whose density is far above that of real images."""
    counted = [model for model in models if model["num"] >= LEAST]
    real = [model["figures"] for model in counted if "hash" not in model]
    usual = {key: figure["value"] for figures in real for key, figure in figures.items() if key.startswith("density/")}
    return [
        f"{model['name']} has a density of {own:.2f} by {key.removeprefix('density/')} features, real images "
        f"{usual[key]:.2f}: its images crowd in the middle of the data, because of strong guidance or because they "
        "show little, so look at samples.png, recall and coverage."
        for model in counted
        for key in usual
        if "hash" in model and (own := model["figures"][key]["value"]) > CROWDED * usual[key]
    ]
