"""From a data set to its clusters: `atoll partition` and `atoll assign`."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from atoll.cards import PartitionCard, require_same
from atoll.data.shards import Dataset, regroup
from atoll.data.view import decode_rows
from atoll.encoders.codecs import is_quick, load_codec
from atoll.errors import InputError, printable, unknown
from atoll.partition.assign import METRICS, Centroids, Indices, assign, by_label, by_random, measure
from atoll.partition.kmeans import hierarchical
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import cluster_map, contact_sheet
from atoll.storage import alone

METHODS = ("kmeans", "random", "label")
CENTROIDS = "centroids.safetensors"


def partition(
    folder: str | Path,
    num_experts: int,
    *,
    method: str = "kmeans",
    fine: int = 1024,
    metric: str = "euclidean",
    cap: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> list[str]:
    """Cuts DATA into clusters; returns what to tell the user."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    if method == "random" and cap is not None:
        raise InputError("random clusters are of equal size already: leave --balance out")
    with alone(Path(folder)):
        data = Dataset.open(folder)
        notes: list[str] = []
        centroids = None
        settings: dict[str, Any] = {"method": method, "seed": seed}
        if method == "kmeans":
            features = data.column("features")
            centroids, labels = hierarchical(
                features, num_experts, metric, fine=fine, cap=cap, seed=seed, progress=progress
            )
            used = len(centroids.fine)
            settings |= {"metric": metric, "fine": used, "cap": cap}
            if used < fine:
                notes = [f"{used} fine centroids instead of {fine}: there are only {len(data)} images"]
        elif method == "random":
            labels = by_random(len(data), num_experts, seed=seed)
        else:
            labels = by_label(data.strings("label"), num_experts, cap=cap)
        return [*notes, *_write(data, labels, num_experts, centroids, settings, metric, progress)]


def assign_to(folder: str | Path, existing: str | Path, progress: bool = True) -> list[str]:
    """Places another data set into the clusters of an existing partition."""
    existing = Path(existing)
    card = PartitionCard.read(existing)
    if not os.path.lexists(existing / CENTROIDS):
        by = printable(card.method, 60)
        raise InputError(f"the partition in {existing} was made by {by}, without centroids to assign by")
    centroids = Centroids.load(existing / CENTROIDS)
    if (card.metric, card.features.dim) != (centroids.metric, centroids.fine.shape[1]):
        raise InputError(f"{existing} does not hold the centroids that it describes: copy it again from its source")
    with alone(Path(folder)):
        data = Dataset.open(folder)
        for part in ("features", "codec", "text"):
            require_same(getattr(data.card, part), getattr(card, part), part, data.folder, existing)
        if data.card.latent_shape != card.latent_shape:
            raise InputError(
                f"latents are {data.card.latent_shape}, there {card.latent_shape}: prepare with its --size"
            )
        labels = assign(data.column("features"), centroids, progress)
        settings = {key: getattr(card, key) for key in ("method", "seed", "metric", "fine", "cap")}
        return _write(data, labels, centroids.num_clusters, centroids, settings, centroids.metric, progress)


def _write(
    data: Dataset,
    labels: Tensor,
    num_clusters: int,
    centroids: Centroids | None,
    settings: dict[str, Any],
    metric: str,
    progress: bool,
) -> list[str]:
    """Regroups the rows, with all that describes the clusters beside them."""
    quality = measure(data.column("features"), labels, num_clusters, metric, progress=progress)
    parts = {part: getattr(data.card, part) for part in ("latent_shape", "features", "codec", "text")}
    card = PartitionCard(**settings, num_clusters=num_clusters, **quality, **parts)

    def finish(staged: Path) -> None:
        if centroids is not None:
            centroids.save(staged / CENTROIDS)
        _draw(data, labels.numpy(), num_clusters, staged)
        card.write(staged)

    regroup(data, labels.numpy(), num_clusters, finish, progress)
    folder, mean = data.folder, len(data) / num_clusters
    score = "none" if card.silhouette is None else f"{card.silhouette:.3f}"
    copied = [name for name in ("dataset.json", "vae", "text_encoder", "tokenizer") if (folder / name).exists()]
    return [
        f"{folder}: {num_clusters} clusters by {printable(card.method, 60)}, silhouette {score}",
        *(f"  cluster {k:02d}: {size:7} images, {size / mean:4.2f} of the mean" for k, size in enumerate(card.sizes)),
        f"look: {folder / 'clusters' / 'map.png'} and sheet.png in each cluster",
        f"to train cluster 0 elsewhere, copy {folder}/{{{', '.join([*copied, 'clusters/00'])}}}",
    ]


def _draw(data: Dataset, cluster_of: Indices, num_clusters: int, folder: Path) -> None:
    """Draws a contact sheet of each cluster, and a map of all."""
    rng, codec = np.random.default_rng(0), load_codec(data.folder)
    on_a_sheet, on_the_map = (60, 900) if is_quick(codec) else (16, 120)
    for cluster in range(num_clusters):
        members = np.flatnonzero(cluster_of == cluster)
        if len(members) == 0:
            continue
        rows = np.sort(rng.choice(members, min(on_a_sheet, len(members)), replace=False))
        title = f"cluster {cluster}: {len(members)} images ({len(members) / len(data):.0%})"
        sheet = contact_sheet(decode_rows(data, rows, codec), title, data.strings("caption", rows[:3]))
        save_image(sheet, folder / f"{cluster:02d}" / "sheet.png")
    rows = np.sort(rng.choice(len(data), min(on_the_map, len(data)), replace=False))
    features = data.column("features")[rows].astype(np.float64)
    names = [f"cluster {cluster}" for cluster in range(num_clusters)]
    figure = cluster_map(features, cluster_of[rows], decode_rows(data, rows, codec, side=32), names)
    save_image(figure, folder / "map.png")
