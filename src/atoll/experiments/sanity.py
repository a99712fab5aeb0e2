"""Whether figures can be trusted: images of nothing must score worse than real ones, and no model much better.

Precision and density ask whether images lie among the real ones in the space of features. Where features say little,
it is their middle that lies among all of them: the mean image under a pattern of tiles, as a model draws it that has
learned hardly anything, then scores as a photograph does. So as many such quilts are measured as real images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.experiments.tables import LOWER, kind_of

CHECKED, LEAST = 200, 50  # quilts, and as many real images; of fewer than LEAST, chance decides
TILE = 8  # pixels
CONTRAST = 0.5  # of the pattern, beside the contrast within real images
AS_GOOD = 0.9  # of the figure of real images, for those of which more is better
CROWDED = 1.5  # times the density of real images


def tells(key: str, real: float, quilts: float) -> bool:
    """Returns whether quilts are worse than real images by a figure."""
    return quilts > real if kind_of(key).better == LOWER else quilts < AS_GOOD * real


def quilts_of(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Returns as many images [N, S, S, 3] of nothing: the mean of these, and on it one random tile over and over."""
    num, side = images.shape[:2]
    within = np.sqrt(images.var((1, 2)).mean())
    tiles = np.random.default_rng(seed).standard_normal((num, TILE, TILE, 1))
    times = -(-side // TILE)
    pattern = np.tile(tiles, (1, times, times, 1))[:, :side, :side]
    quilts: NDArray[np.uint8] = (images.mean(0) + CONTRAST * within * pattern).round().clip(0, 255).astype(np.uint8)
    return quilts


def doubt_features(sanity: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each network by which quilts are as good as real images."""
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
    """Returns a sentence for each model whose images are denser among real ones than real ones are."""
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
