"""Partitions a data set into clusters: `atoll partition` and `atoll assign`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import trange

from atoll.cards import PartitionCard, require_same
from atoll.data.shards import Column, Dataset, Shard, open_to_regroup, regroup, write_shard
from atoll.data.view import decode_rows
from atoll.encoders.codecs import is_quick, load_codec
from atoll.encoders.text import GOLDEN, split_mix
from atoll.errors import InputError, printable, unknown
from atoll.object_store import StorePath, download, place_of
from atoll.partition.kmeans import (
    CHUNK,
    METRICS,
    Centroids,
    FeatureRows,
    assign,
    capacity_of,
    check_k,
    hierarchical,
    measure,
)
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import cluster_map, contact_sheet
from atoll.storage import exists

METHODS = ("kmeans", "random", "label")
CENTROIDS = "centroids.safetensors"
MOST_CLUSTERS = 65536


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
    """Partitions DATA into clusters; returns lines to print."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    if method == "random" and cap is not None:
        raise InputError("random clusters are of equal size already: leave --balance out")
    with open_to_regroup(place_of(folder)) as data, local_features(data, progress) as features:
        notes, centroids = list[str](), None
        settings: dict[str, Any] = {"method": method, "seed": seed}
        if method == "kmeans":
            centroids, labels = hierarchical(features, num_experts, metric, fine, cap, seed, progress)
            used = len(centroids.fine)
            settings |= {"metric": metric, "fine": used, "cap": cap}
            if used < fine:
                notes = [f"{used} fine centroids instead of {fine}: there are only {len(data)} images"]
        elif method == "random":
            labels = by_random(len(data), num_experts, seed)
        else:
            labels = by_label(data.strings("label"), num_experts, cap)
        return [*notes, *_write(data, features, labels, num_experts, centroids, settings, metric, progress)]


def assign_to(folder: str | Path, existing: str | Path, progress: bool = True) -> list[str]:
    """Assigns another data set to the clusters of an existing partition; returns lines to print."""
    existing = place_of(existing)
    card = PartitionCard.read(existing)
    if not exists(existing / CENTROIDS):
        by = printable(card.method, 60)
        raise InputError(f"the partition in {existing} was made by {by}, without centroids to assign by")
    centroids = Centroids.load(existing / CENTROIDS)
    if (card.metric, card.features.dim) != (centroids.metric, centroids.fine.shape[1]):
        raise InputError(f"{existing} does not hold the centroids that it describes: copy it again from its source")
    with open_to_regroup(place_of(folder)) as data, local_features(data, progress) as features:
        for part in ("features", "codec", "text"):
            require_same(getattr(data.card, part), getattr(card, part), part, data.folder, existing)
        if data.card.latent_shape != card.latent_shape:
            raise InputError(
                f"latents are {data.card.latent_shape}, there {card.latent_shape}: prepare with its --size"
            )
        labels = assign(features, centroids, progress)
        settings = {key: getattr(card, key) for key in ("method", "seed", "metric", "fine", "cap")}
        return _write(data, features, labels, centroids.num_clusters, centroids, settings, centroids.metric, progress)


def place_in(folder: str | Path, cluster: int, progress: bool = True) -> list[str]:
    """Assigns a whole data set to one cluster number, for example one that an existing partition does not have.

    An expert trained on it can then join the experts of that partition.
    """
    if not 0 <= cluster < MOST_CLUSTERS:
        raise InputError(f"the cluster must be from 0 to {MOST_CLUSTERS - 1}, but is {cluster}")
    with open_to_regroup(place_of(folder)) as data, local_features(data, progress) as features:
        labels = torch.full((len(data),), cluster)
        settings = {"method": "one cluster", "seed": 0}
        return _write(data, features, labels, cluster + 1, None, settings, "euclidean", progress)


def by_random(num_rows: int, k: int, seed: int = 0) -> Tensor:
    """Returns a random cluster for each row [N], from (seed, row number) alone, with sizes that differ by at most 1.

    Each run of k consecutive rows is a random permutation of the clusters, so rows added later change nothing.
    """
    check_k(k, num_rows)
    runs = -(-num_rows // k)
    start = split_mix(torch.tensor((seed + 2**63) % 2**64 - 2**63) + GOLDEN)
    keys = split_mix(torch.arange(runs * k) + start + GOLDEN) ^ -(2**63)  # signed order now equals the unsigned order
    return keys.reshape(runs, k).argsort(stable=True).reshape(-1)[:num_rows].clone()


def by_label(labels: Sequence[str], k: int, cap: float | None = None) -> Tensor:
    """Returns the cluster of each row [N] from its label: one per label in sorted order, or k balanced groups."""
    names = sorted(set(labels))  # np.unique would pad all of them to the longest
    number = {name: i for i, name in enumerate(names)}
    of_row = np.fromiter(map(number.__getitem__, labels), np.int64, len(labels))
    sizes = np.bincount(of_row)
    check_k(k, len(of_row))
    if k > len(names):
        raise InputError(f"there are only {len(names)} labels for {k} clusters: ask for at most {len(names)}")
    of_name, loads = np.arange(len(names)), sizes
    if k < len(names):
        loads = np.zeros(k, dtype=np.int64)
        for name in np.argsort(-sizes, kind="stable"):
            of_name[name] = loads.argmin()
            loads[of_name[name]] += sizes[name]
    if cap is not None and loads.max() > (capacity := capacity_of(cap, len(of_row), k)):
        least = -(-int(loads.max()) * k * 100 // len(of_row)) / 100
        raise InputError(
            f"whole labels do not fit into {k} clusters of at most {capacity} images: "
            f"set --balance to {least:g}, or cluster by k-means"
        )
    return torch.from_numpy(of_name[of_row])


@contextmanager
def local_features(data: Dataset, progress: bool = True) -> Iterator[Column]:
    """Yields the features of a data set; from an object store, a temporary local copy, since they are read often."""
    column = data.column("features")
    if not isinstance(data.folder, StorePath):
        yield column
        return
    with TemporaryDirectory(prefix="atoll-") as folder:
        shards = []
        for start in trange(0, len(column), CHUNK, desc="read features", disable=not progress, leave=False):
            features, path = column[start : start + CHUNK], Path(folder) / f"{start}.safetensors"
            write_shard(path, {"row": np.arange(start, start + len(features)), "features": features}, {})
            shards.append(Shard(path))
        yield Dataset(Path(folder), data.card, shards).column("features")


def _write(
    data: Dataset,
    features: FeatureRows,
    labels: Tensor,
    num_clusters: int,
    centroids: Centroids | None,
    settings: dict[str, Any],
    metric: str,
    progress: bool,
) -> list[str]:
    """Regroups the rows, and writes the files that describe the clusters beside them."""
    quality = measure(features, labels, num_clusters, metric, progress)
    parts = {part: getattr(data.card, part) for part in ("latent_shape", "features", "codec", "text")}
    card = PartitionCard(**settings, num_clusters=num_clusters, **quality, **parts)

    def finish(staged: Path) -> None:
        if centroids is not None:
            centroids.save(staged / CENTROIDS)
        _draw(data, features, labels, num_clusters, staged)
        card.write(staged)

    regroup(data, labels.numpy(), num_clusters, finish, progress)
    folder, mean = data.folder, len(data) / num_clusters
    score = "none" if card.silhouette is None else f"{card.silhouette:.3f}"
    if isinstance(folder, StorePath):
        train = f"to train cluster 0 anywhere: atoll train {folder} --cluster 0 --out expert"
    else:
        names = [name for name in ("dataset.json", "vae", "text_encoder", "tokenizer") if (folder / name).exists()]
        train = f"to train cluster 0 elsewhere, copy {folder}/{{{', '.join([*names, 'clusters/00'])}}}"
    return [
        f"{folder}: {num_clusters} clusters by {printable(card.method, 60)}, silhouette {score}",
        *(f"  cluster {k:02d}: {size:7} images, {size / mean:4.2f} of the mean" for k, size in enumerate(card.sizes)),
        f"look: {folder / 'clusters' / 'map.png'} and sheet.png in each cluster",
        train,
    ]


def _draw(data: Dataset, features: FeatureRows, labels: Tensor, num_clusters: int, folder: Path) -> None:
    """Draws a contact sheet of each cluster, and a map of all clusters."""
    with TemporaryDirectory(prefix="atoll-") as local:
        if isinstance(data.folder, StorePath):
            download(data.folder / "vae", Path(local) / "vae")
        codec = load_codec(local if isinstance(data.folder, StorePath) else data.folder)
    rng = np.random.default_rng(0)
    on_a_sheet, on_the_map = (60, 900) if is_quick(codec) else (16, 120)
    for cluster in range(num_clusters):
        members = np.flatnonzero(labels == cluster)
        if not len(members):
            continue
        rows = np.sort(rng.choice(members, min(on_a_sheet, len(members)), replace=False))
        title = f"cluster {cluster}: {len(members)} images ({len(members) / len(data):.0%})"
        sheet = contact_sheet(decode_rows(data, rows, codec), title, data.strings("caption", rows[:3]))
        save_image(sheet, folder / f"{cluster:02d}" / "sheet.png")
    rows = np.sort(rng.choice(len(data), min(on_the_map, len(data)), replace=False))
    positions = np.asarray(features[rows]).astype(np.float64)
    names = [f"cluster {cluster}" for cluster in range(num_clusters)]
    figure = cluster_map(positions, labels[rows].numpy(), decode_rows(data, rows, codec, side=32), names)
    save_image(figure, folder / "map.png")
