"""From a data set to its clusters: `atoll partition` and `atoll assign`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from atoll.data.shards import Dataset, regroup
from atoll.data.view import decode_rows
from atoll.encoders.codecs import is_quick, load_codec
from atoll.encoders.pretrained import check_same
from atoll.errors import InputError, printable, shown, unknown
from atoll.partition.assign import Centroids, Progress, assign, by_label, by_random, measure
from atoll.partition.kmeans import hierarchical
from atoll.plots.canvas import save_picture
from atoll.plots.contact_sheet import cluster_map, contact_sheet
from atoll.storage import alone, read_json, write_json

METHODS = ("kmeans", "random", "label")
MODELS = ("features", "codec", "text")  # what data sets must have in common to share clusters
ON_A_SHEET, ON_THE_MAP = 60, 900


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
    if method == "random" and cap is not None:
        raise InputError("random clusters are of equal size already: leave --balance out")
    with alone(Path(folder)):
        data = Dataset.open(folder)
        notes: list[str] = []
        centroids = None
        settings: dict[str, Any] = {"method": method, "seed": seed}
        if method == "kmeans":
            with _bar(progress) as show:
                hierarchy = hierarchical(
                    data.column("features"), num_experts, fine=fine, metric=metric, cap=cap, seed=seed, progress=show
                )
            centroids, labels = hierarchy.centroids, hierarchy.labels
            settings |= {"metric": metric, "fine": len(centroids.fine), "cap": cap}
            if hierarchy.fine_used < fine:
                notes = [f"{hierarchy.fine_used} fine centroids instead of {fine}: there are only {len(data)} images"]
        elif method == "random":
            labels = by_random(len(data), num_experts, seed=seed)
        else:
            labels = by_label(data.texts("label"), num_experts, cap=cap)
        return [*notes, *_write(data, labels, num_experts, centroids, settings, metric, progress)]


def assign_to(folder: str | Path, existing: str | Path, progress: bool = True) -> list[str]:
    """Places another data set into the clusters of an existing partition."""
    existing = Path(existing)
    advice = "give the clusters folder of a partitioned data set"
    about = read_json(existing / "partition.json", advice)
    kept = {key: about.get(key) for key in ("method", "seed", "metric", "fine", "cap")}
    if not os.path.lexists(existing / "centroids.safetensors"):
        by = printable(str(kept["method"]), 60)
        raise InputError(f"the partition in {existing} was made by {by}, without centroids to assign by")
    centroids = Centroids.load(existing / "centroids.safetensors")
    if not all(isinstance(about.get(part), dict) for part in MODELS) or kept["metric"] != centroids.metric:
        raise InputError(f"{existing / 'partition.json'} does not describe the centroids beside it: {advice}")
    with alone(Path(folder)), _bar(progress) as show:
        data = Dataset.open(folder)
        for part in MODELS:
            check_same(about[part], getattr(data.card, part).values(), part)
        shape = data.card.latent_shape
        if about.get("latent_shape") != shape:
            raise InputError(f"latents are {shape}, there {shown(about.get('latent_shape'))}: prepare with its --size")
        labels = assign(data.column("features"), centroids, progress=show)
        return _write(data, labels, centroids.num_clusters, centroids, kept, centroids.metric, progress)


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
    with _bar(progress) as show:
        quality = measure(data.column("features"), labels, num_clusters, metric=metric, progress=show)
    models = {part: getattr(data.card, part).values() for part in MODELS}
    shape = data.card.latent_shape
    about = {"format": 1, **settings, "num_clusters": num_clusters, **asdict(quality), "latent_shape": shape, **models}
    cluster_of = labels.numpy()

    def finish(staged: Path) -> None:
        if centroids is not None:
            centroids.save(staged / "centroids.safetensors")
        _draw(data, cluster_of, num_clusters, staged)
        write_json(staged / "partition.json", about)

    regroup(data, cluster_of, num_clusters, finish, progress)
    mean = len(data) / num_clusters
    lines = [
        f"  cluster {k:02d}: {size:7} images, {size / mean:4.2f} of the mean" for k, size in enumerate(quality.sizes)
    ]
    parts = [name for name in ("dataset.json", "vae", "text_encoder", "tokenizer") if (data.folder / name).exists()]
    score = "none" if quality.silhouette is None else f"{quality.silhouette:.3f}"
    folder = data.folder
    return [
        f"{folder}: {num_clusters} clusters by {printable(str(settings['method']), 60)}, silhouette {score}",
        *lines,
        f"look: {folder / 'clusters' / 'map.png'} and sheet.png in each cluster",
        f"to train cluster 0 elsewhere, copy {folder}/{{{', '.join([*parts, 'clusters/00'])}}}",
    ]


def _draw(data: Dataset, cluster_of: NDArray[np.int64], num_clusters: int, folder: Path) -> None:
    """Draws a contact sheet of each cluster, and a map of all."""
    rng, codec = np.random.default_rng(0), load_codec(data.folder)
    on_a_sheet, on_the_map = (ON_A_SHEET, ON_THE_MAP) if is_quick(codec) else (16, 120)
    for cluster in range(num_clusters):
        members = np.flatnonzero(cluster_of == cluster)
        if len(members) == 0:
            continue
        rows = np.sort(rng.choice(members, min(on_a_sheet, len(members)), replace=False))
        captions = data.texts("caption", rows[:3])
        title = f"cluster {cluster}: {len(members)} images ({len(members) / len(data):.0%})"
        sheet = contact_sheet(decode_rows(data, rows, codec), title, captions)
        save_picture(sheet, folder / f"{cluster:02d}" / "sheet.png")
    rows = np.sort(rng.choice(len(data), min(on_the_map, len(data)), replace=False))
    features = data.column("features")[rows].astype(np.float64)
    names = [f"cluster {cluster}" for cluster in range(num_clusters)]
    figure = cluster_map(features, cluster_of[rows], decode_rows(data, rows, codec, side=32), names)
    save_picture(figure, folder / "map.png")


@contextmanager
def _bar(progress: bool) -> Iterator[Progress]:
    """A bar that shows whatever stage is reported to it."""
    with tqdm(unit=" rows", disable=not progress, leave=False) as bar:
        current = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal current
            if stage != current or done < bar.n:
                current = stage
                bar.set_description(stage, refresh=False)
                bar.reset(total)
            bar.update(done - bar.n)

        yield show
