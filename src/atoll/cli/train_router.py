"""`atoll train-router`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from atoll.training.settings import RouterSettings


def train_router(
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    out: Path,
    settings: Annotated[RouterSettings, tyro.conf.arg(name="")],
    method: Literal["network", "centroids"] = "network",
    mirror: str | None = None,
    recipe: str | None = None,
    dry_run: bool = False,
) -> None:
    """Train the router, which predicts from a noisy latent and its text which expert to use.

    For example:
      atoll train-router data --out router
      atoll train-router data --no-text --out router-blind
      atoll train-router data --method centroids --out router-centroids

    Args:
        data: A folder from `atoll prepare` and `atoll partition`, with all clusters, or its URL.
        out: Output folder: the router, its metrics and checkpoints.
        settings: How to train.
        method: network, or centroids for a router that needs no training.
        mirror: URL in an object store, such as s3://bucket/run, to mirror the folder to, so that another machine can
            resume from there.
        recipe: A built-in recipe, such as laptop, or a TOML file with settings in its table [router]; flags override
            it.
        dry_run: Print the settings, model size, memory and time needed, and stop.
    """
    from atoll.data.local_copy import local_copy
    from atoll.errors import InputError
    from atoll.training.router import make_centroid_router
    from atoll.training.router import train_router as train

    del recipe  # read before the flags were: main.py
    if dry_run and method == "centroids":
        raise InputError("a router from centroids is made in seconds: leave --dry-run out")
    if method == "centroids":
        print(*make_centroid_router(local_copy(data), settings, out), sep="\n")
    else:
        print(*train(local_copy(data), settings, out, dry_run=dry_run, mirror=mirror), sep="\n")
