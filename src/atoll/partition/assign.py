"""Which cluster a row belongs to: by published centroids, by label or at random, and how good the result is.

Rows are a column of a data set or anything else that gives `rows[indices]` of shape [n, D]: they are read a few
thousand at a time, so no function here holds them all. With the cosine metric each row is scaled to length 1 as it is
read, and everything after that is Euclidean; a row of zeros stays one and is equally far from everything.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from atoll.data.shards import Column
from atoll.encoders.text import GOLDEN, split_mix
from atoll.errors import InputError
from atoll.storage import parse_json, write_whole
from atoll.tensors import TensorFile

CHUNK = 4096  # rows read at once; fixed, so that no result depends on it
METRICS = ("euclidean", "cosine")
FORMAT = 1

Indices = NDArray[np.int64]
FeatureRows = Column | NDArray[Any] | Tensor


@dataclass(frozen=True)
class Centroids:
    """A partition as it is published: a row belongs to the coarse cluster of its nearest fine centroid."""

    fine: Tensor  # [F, D], float32
    coarse_of_fine: Tensor  # [F], int64
    metric: str = "euclidean"

    @property
    def num_clusters(self) -> int:
        return int(self.coarse_of_fine.max()) + 1

    def save(self, path: Path) -> None:
        about = {"format": FORMAT, "metric": self.metric, "num_clusters": self.num_clusters}
        tensors = {"fine_centroids": self.fine.contiguous(), "coarse_of_fine": self.coarse_of_fine.contiguous()}
        write_whole(path, lambda staged: save_file(tensors, staged, metadata={"atoll": json.dumps(about)}))

    @classmethod
    def load(cls, path: Path) -> "Centroids":
        """Reads what `save` wrote, checked."""
        with TensorFile(path, "give the centroids file that `atoll partition` wrote") as file:
            tensors = file.read() if file.entries.keys() == {"fine_centroids", "coarse_of_fine"} else {}
            try:
                about = parse_json(file.metadata.get("atoll", "").encode())
            except ValueError:
                about = None
        if tensors and isinstance(about, dict) and about.get("format") == FORMAT and about.get("metric") in METRICS:
            fine, coarse = tensors["fine_centroids"], tensors["coarse_of_fine"]
            if fine.dim() == 2 and fine.numel() and fine.is_floating_point() and bool(torch.isfinite(fine).all()):
                numbers = coarse.dtype == torch.int64 and coarse.shape == fine.shape[:1]
                if numbers and 0 <= int(coarse.min()) <= int(coarse.max()) < len(fine):
                    return cls(fine, coarse, about["metric"])
        raise InputError(f"{path} does not hold the centroids of a partition in format {FORMAT}: give another file")


def assign(rows: FeatureRows, centroids: Centroids, progress: bool = False) -> Tensor:
    """Returns the coarse cluster of each row [N], for rows old or new."""
    return centroids.coarse_of_fine[find_nearest(rows, centroids.fine, centroids.metric, progress)[0]]


def find_nearest(rows: FeatureRows, centroids: Tensor, metric: str, progress: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the number of each row's nearest centroid [N], and the squared distance to it [N]."""
    labels, distances = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
    origin = origin_of(centroids, metric)
    shifted = centroids.float() - origin
    for part, x in stream(rows, metric, "assigning", progress):
        distances[part], labels[part] = nearest(x - origin, shifted)
    return labels, distances


def origin_of(points: Tensor, metric: str) -> Tensor:
    """Returns what to subtract before distances are taken by |x|^2 - 2xc + |c|^2, which cancels far from the origin."""
    return points.float().mean(0) if metric == "euclidean" else torch.zeros(points.shape[1])


def nearest(x: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the squared distance to, and the number of, the nearest centroid of each x[n, D]."""
    parts = [half.min(1) for half in half_distances(x, centroids)]
    least, labels = torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
    return floor(least.mul_(2), x.square().sum(1)), labels


def half_distances(x: Tensor, centroids: Tensor) -> Iterator[Tensor]:
    """Yields |c|^2 / 2 - xc for each x and c, a few rows at a time: 4 MB, which stays in the cache."""
    halves = centroids.square().sum(1) / 2
    for part in x.split(max(256, (1 << 20) // len(centroids))):
        yield torch.addmm(halves, part, centroids.T, alpha=-1)


def floor(distances: Tensor, norms: Tensor) -> Tensor:
    """Completes |c|^2 - 2xc by |x|^2, and sets what is only rounding to 0: equal rows must be at distance 0."""
    distances += norms
    return distances.masked_fill_(distances < 1e-6 * norms, 0)


def stream(
    rows: FeatureRows, metric: str, stage: str, progress: bool = False, indices: Indices | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields all rows, or those at `indices`, in chunks of float32 with their places."""
    indices = np.arange(len(rows)) if indices is None else indices
    with tqdm(total=len(indices), desc=stage, unit=" rows", disable=not progress, leave=False) as bar:
        for start in range(0, len(indices), CHUNK):
            part = slice(start, start + CHUNK)
            yield part, read(rows, indices[part], metric)
            bar.update(len(indices[part]))


def read(rows: FeatureRows, indices: Indices, metric: str) -> Tensor:
    """Returns some rows as float32 [n, D], checked, and of length 1 if the metric is cosine."""
    x = torch.from_numpy(np.asarray(rows[indices])).float()
    norms = torch.linalg.vector_norm(x, dim=1)
    finite = torch.isfinite(norms.square())
    if not bool(finite.all()):
        row = indices[~finite.numpy()][0]
        raise InputError(f"the features of row {row} are not finite numbers: compute them again or leave that row out")
    return x / norms.clamp(min=1e-12)[:, None] if metric == "cosine" else x


def sample_indices(num_rows: int, most: int, seed: int) -> Indices:
    """Returns at most so many distinct row numbers, ascending."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False, shuffle=False))


def check_k(k: int, num_rows: int) -> None:
    if not 1 <= k <= num_rows:
        raise InputError(f"{num_rows} images cannot make {k} clusters: ask for 1 to {num_rows}")


def capacity_of(cap: float, num_rows: int, k: int) -> int:
    """Returns the most rows a cluster may have: cap times the mean, but never so few that the rows would not fit."""
    if not cap >= 1:
        raise InputError(f"--balance must be at least 1 (1 makes all clusters equal), but is {cap:g}")
    return int(min(num_rows, max(cap * num_rows / k + 1e-9, -(-num_rows // k))))


def by_random(num_rows: int, k: int, *, seed: int = 0) -> Tensor:
    """Returns a random cluster for each row [N], from (seed, row number) alone, with sizes that differ by at most 1.

    Each run of k consecutive rows is a random permutation of the clusters, so rows added later change nothing.
    """
    check_k(k, num_rows)
    runs = -(-num_rows // k)
    start = split_mix(torch.tensor((seed + 2**63) % 2**64 - 2**63) + GOLDEN)
    keys = split_mix(torch.arange(runs * k) + start + GOLDEN) ^ -(2**63)  # whose order is that of unsigned numbers
    return keys.reshape(runs, k).argsort(stable=True).reshape(-1)[:num_rows].clone()


def by_label(labels: Sequence[str], k: int, *, cap: float | None = None) -> Tensor:
    """Returns the cluster of each row [N] from its label: one for each label in sorted order, or k balanced groups."""
    names = sorted(set(labels))  # np.unique would make all of them as long as the longest
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


def pack(size: Any, cost: Any, capacity: int) -> Any:
    """Returns a bin for each item at low total cost[item, bin], no bin above capacity or empty; None if not found.

    Items begin in their cheapest bin and leave the full bins by the move of least added cost for
    each unit of overflow it removes. Items of at most (capacity - mean) / (1 - 1/bins) always fit.
    """
    items, bins = cost.shape
    place = cost.argmin(1)

    def loads() -> Any:
        return np.bincount(place, weights=size, minlength=bins).astype(np.int64)

    while (loads() > capacity).any():
        overflow = (loads() - capacity)[place]
        added = (cost - cost[np.arange(items), place][:, None]) / np.minimum(size, overflow.clip(1))[:, None]
        allowed = (overflow > 0)[:, None] & (loads() + size[:, None] <= capacity)
        if not allowed.any():
            return None
        item, target = divmod(int(np.where(allowed, added, np.inf).argmin()), bins)
        place[item] = target
    for _ in range(4 * items):
        count = np.bincount(place, minlength=bins)
        alone = (count[place] == 1)[:, None]
        gain = np.where(alone, 0, cost[np.arange(items), place][:, None] - cost)
        if not count.all() and not alone.all():
            gain = np.where(alone | (count > 0), -np.inf, gain)  # an expert without data helps nobody
        else:
            gain = np.where(loads() + size[:, None] <= capacity, gain, 0)
            if gain.max() <= 1e-12 * abs(cost).max():
                break
        item, target = divmod(int(gain.argmax()), bins)
        place[item] = target
    return place


def measure(
    rows: FeatureRows, labels: Tensor, k: int, metric: str = "euclidean", *, sample: int = 2000, progress: bool = False
) -> dict[str, Any]:
    """Returns what partition.json says of the quality of any assignment to k clusters, after two passes over the rows.

    Distances are to the mean of the row's own cluster, 1 - cosine for that metric; `balance` is the largest size over
    the mean size, `inertia` the sum of squared Euclidean distances, of rows of length 1 for the cosine metric.
    """
    sizes = torch.bincount(labels, minlength=k)
    means = torch.zeros(k, 1, dtype=torch.float64)
    for part, x in stream(rows, metric, "cluster means", progress):
        means = means + add_up(x, labels[part], k)
    means /= sizes.clamp(min=1)[:, None]
    if metric == "cosine":
        means /= torch.linalg.vector_norm(means, dim=1, keepdim=True).clamp(min=1e-12)
    distance, inertia = torch.zeros(k, dtype=torch.float64), 0.0
    for part, x in stream(rows, metric, "distances", progress):
        squared = (x - means[labels[part]]).square().sum(1)
        inertia += float(squared.sum())
        distance.index_add_(0, labels[part], squared / 2 if metric == "cosine" else squared.sqrt())
    return {
        "sizes": sizes.tolist(),
        "share_of_largest": float(sizes.max()) / len(rows),
        "balance": float(sizes.max()) * k / len(rows),
        "mean_distance": (distance / sizes.clamp(min=1)).tolist(),
        "inertia": inertia,
        "silhouette": silhouette(rows, labels, metric, sample),
    }


def add_up(x: Tensor, labels: Tensor, k: int) -> Tensor:
    """Returns the sum of each cluster's rows [k, D]: float32 is exact enough within a chunk, not over all of them."""
    return torch.zeros(k, x.shape[1]).index_add_(0, labels, x)


def silhouette(rows: FeatureRows, labels: Tensor, metric: str = "euclidean", sample: int = 2000) -> float | None:
    """Returns the mean of (b - a) / max(a, b) over a random sample, None where fewer than 2 clusters are in it.

    a is the mean distance to the own cluster's rows, b to those of the next cluster.
    """
    indices = sample_indices(len(rows), sample, seed=0)
    x = read(rows, indices, metric).double()
    names, own = labels[indices].unique(return_inverse=True)
    if len(names) < 2:
        return None
    distances = torch.cdist(x, x) if metric == "euclidean" else (1 - x @ x.T).fill_diagonal_(0)
    counts = torch.bincount(own)
    sums = torch.zeros(len(x), len(names), dtype=torch.float64).index_add_(1, own, distances)
    inside = sums.gather(1, own[:, None])[:, 0] / (counts[own] - 1).clamp(min=1)
    others = (sums / counts).scatter(1, own[:, None], torch.inf).min(1).values
    scores = (others - inside) / torch.maximum(inside, others).clamp(min=1e-300)
    return float(torch.where(counts[own] > 1, scores, 0).mean())
