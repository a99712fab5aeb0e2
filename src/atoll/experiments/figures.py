"""The figures that images are judged by: what each is called, which way is better, and what its error comes from."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LOWER, HIGHER, VARIED = "lower is better", "higher is better", "higher is more varied"


class Kind(NamedTuple):
    """A kind of figure; its key in results.json is followed by a slash and the network that sees the images, if any."""

    metric: str  # of --metrics, which asks for it
    title: str  # {by} is the network
    better: str = HIGHER
    error_from: str = "pictures"  # where there is one set of images alone
    in_studies: bool = False  # whether the tables of `atoll reproduce` have it


_LABELS = "images in which a linear classifier sees the prompt's label ({by})"
KINDS = {
    "frechet": Kind("frechet", "Frechet distance ({by}; not Inception FID)", LOWER, "leaving out tenths", True),
    "frechet_infinity": Kind(
        "frechet",
        "Frechet distance ({by}; not Inception FID), extrapolated to images without number",
        LOWER,
        "the fit of the line",
    ),
    "kernel": Kind("kernel", "Kernel distance ({by}; not Inception KID)", LOWER, "subsets", True),
    "precision": Kind("coverage", "precision ({by})"),
    "recall": Kind("coverage", "recall ({by})"),
    "density": Kind("coverage", "density ({by})"),
    "coverage": Kind("coverage", "coverage ({by})", in_studies=True),
    "lpips_per_prompt": Kind(
        "diversity", "distance between images of one prompt ({by}; not LPIPS itself)", VARIED, "prompts", True
    ),
    "lpips": Kind("diversity", "distance between all images ({by}; not LPIPS itself)", VARIED),
    "clip_score": Kind("clip", "CLIP score ({id})", in_studies=True),
    "prompt_accuracy": Kind("accuracy", "prompts followed in every attribute", in_studies=True),
    "label_accuracy": Kind("labels", _LABELS, in_studies=True),
    "flops_an_image": Kind("flops", "FLOPs per image", LOWER, in_studies=True),
}
METRICS = tuple(dict.fromkeys(kind.metric for kind in KINDS.values()))
NETWORKS = {
    "simple": "colour and edge features",
    "efficientnet": "EfficientNet-Lite0 features",
    "stlpips-alex": "shift-tolerant LPIPS on AlexNet",
    "inception": "Inception of 2015-12-05, as pytorch-fid scales",
}


class Figure(NamedTuple):
    """A number of one set of images, and how uncertain it is if there is no other set to tell."""

    value: float
    error: float | None = None

    @classmethod
    def mean(cls, values: Sequence[float]) -> "Figure":
        """Returns the mean with its standard error."""
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        return cls(float(np.mean(values)), error)


Figures = dict[str, Figure]


def kind_of(key: str) -> Kind:
    return KINDS[key.partition("/")[0]]


def name_of(key: str) -> str:
    """Returns what a figure is called: `frechet/simple` is no FID, and says so."""
    network = key.partition("/")[2]
    family, _, detail = network.partition(":")
    by = NETWORKS.get(family, f"{network} features")
    if family in NETWORKS and detail:
        by += f" at {detail} pixels"
    title = kind_of(key).title
    if network == "inception":
        title = title.replace("; not Inception FID", "").replace("; not Inception KID", "")
    return title.format(by=by, id=detail)


def over_seeds(sets: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns each figure over seeds: its mean, the deviation where there are several, and all values."""
    found = {}
    for key in sets[0]:
        values = [float(figures[key]["value"]) for figures in sets]
        error = float(np.std(values, ddof=1)) if len(values) > 1 else None
        found[key] = {"value": float(np.mean(values)), "error": error, "values": values}
    return found


def combine(sets: Sequence[Figures], networks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns what results.json says of each figure: over seeds; of one set, with the error that it has by itself."""
    found: dict[str, dict[str, Any]] = {}
    for key, (value, error) in sets[0].items():
        about: dict[str, Any] = {"value": value, "error": error, "error_from": None}
        if len(sets) > 1:
            of_seeds = over_seeds([{key: figures[key]._asdict()} for figures in sets])[key]
            about = {"value": of_seeds["value"], "error": of_seeds["error"], "error_from": "seeds"}
            about["values"] = of_seeds["values"]
        elif error is not None:
            about["error_from"] = kind_of(key).error_from
        if network := key.partition("/")[2]:
            about["features"] = {"name": network, "fingerprint": networks[network]["fingerprint"]}
        found[key] = about
    return found
