"""Clusters features that need not fit in memory: k-means, and DDM's two-level k-means with a cap on cluster sizes.

Rows are a column of a data set or anything else that gives `rows[indices]` of shape [n, D]; they are read in chunks
of a few thousand. With the cosine metric each row is scaled to length 1 as it is read, and everything after that is
Euclidean; a row of zeros stays zero and is equally far from everything.

k-means here is greedy k-means++ and Lloyd's passes on a small random sample; there the worst-placed centroids are
moved until that no longer helps ("breathing", after Fritzke 2020, arXiv 2006.15666), which gains more than restarts
do at the same cost. Further passes stream over every row. Results depend on the rows, the arguments and the seed only.

Memory: the sample, 64 rows per centroid (at least 16,384), twice; a few matrices of centroids; and 50 bytes per row
for indices, labels and distances. With 1024 centroids of dimension 1024 this is 0.6 GB, plus 0.5 GB per 10 million
rows.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm, trange

from atoll.data.shards import Column
from atoll.errors import InputError
from atoll.storage import parse_json, write_whole
from atoll.tensors import TensorFile

CHUNK = 4096  # rows read at once; fixed, so that results are reproducible
SEEDING_ROWS = 16  # rows per centroid in the sample for k-means++
STARTS_MOST_K = 64  # up to this many clusters, k-means++ is started 10 times
SAMPLE = 4  # size of the sample for in-memory Lloyd passes, relative to that for k-means++
PASSES = 2  # over all rows, if there are more than in the sample
DRAWS = 8  # points that k-means++ chooses at once, and candidates drawn for each
CELL_ROWS = 8  # minimum average rows per fine centroid
MOST_SPLITS = 16  # rounds of splitting cells to satisfy the cap
SILHOUETTE_ROWS = 2000
METRICS = ("euclidean", "cosine")
FORMAT = 1

FeatureRows = Column | NDArray[Any] | Tensor


@dataclass(frozen=True)
class Centroids:
    """A published partition: a row belongs to the coarse cluster of its nearest fine centroid."""

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
        """Reads and checks a file written by `save`."""
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
    """Returns the coarse cluster of each row [N], for the partitioned data or any other."""
    return centroids.coarse_of_fine[find_nearest(rows, centroids.fine, centroids.metric, progress)[0]]


def find_nearest(rows: FeatureRows, centroids: Tensor, metric: str, progress: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the index of each row's nearest centroid [N], and the squared distance to it [N]."""
    labels, distances = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
    origin = origin_of(centroids, metric)
    shifted = centroids.float() - origin
    for part, x in stream(rows, metric, "assigning", progress):
        distances[part], labels[part] = nearest(x - origin, shifted)
    return labels, distances


def origin_of(points: Tensor, metric: str) -> Tensor:
    """Returns the point to subtract before computing |x|^2 - 2xc + |c|^2, which loses precision far from the origin."""
    return points.float().mean(0) if metric == "euclidean" else torch.zeros(points.shape[1])


def nearest(x: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the squared distance to, and the index of, the nearest centroid of each x[n, D]."""
    parts = [half.min(1) for half in half_distances(x, centroids)]
    least, labels = torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
    return floor(least.mul_(2), x.square().sum(1)), labels


def half_distances(x: Tensor, centroids: Tensor) -> Iterator[Tensor]:
    """Yields |c|^2 / 2 - xc for each x and c, in blocks of rows of 4 MB, which fit into the cache."""
    halves = centroids.square().sum(1) / 2
    for part in x.split(max(256, (1 << 20) // len(centroids))):
        yield torch.addmm(halves, part, centroids.T, alpha=-1)


def floor(distances: Tensor, norms: Tensor) -> Tensor:
    """Adds |x|^2 to |c|^2 - 2xc, and sets values within rounding error to 0: equal rows must be at distance 0."""
    distances += norms
    return distances.masked_fill_(distances < 1e-6 * norms, 0)


def stream(
    rows: FeatureRows, metric: str, stage: str, progress: bool, indices: NDArray[np.int64] | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields all rows, or those at `indices`, in float32 chunks with their positions."""
    indices = np.arange(len(rows)) if indices is None else indices
    with tqdm(total=len(indices), desc=stage, unit=" rows", disable=not progress, leave=False) as bar:
        for start in range(0, len(indices), CHUNK):
            part = slice(start, start + CHUNK)
            yield part, read(rows, indices[part], metric)
            bar.update(len(indices[part]))


def read(rows: FeatureRows, indices: NDArray[np.int64], metric: str) -> Tensor:
    """Returns some rows as float32 [n, D], checked, and of length 1 if the metric is cosine."""
    x = torch.from_numpy(np.asarray(rows[indices])).float()
    norms = torch.linalg.vector_norm(x, dim=1)
    finite = torch.isfinite(norms.square())
    if not bool(finite.all()):
        row = indices[~finite.numpy()][0]
        raise InputError(f"the features of row {row} are not finite numbers: compute them again or leave that row out")
    return x / norms.clamp(min=1e-12)[:, None] if metric == "cosine" else x


def sample_indices(num_rows: int, most: int, seed: int) -> NDArray[np.int64]:
    """Returns at most `most` distinct random row numbers, ascending."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False, shuffle=False))


def check_k(k: int, num_rows: int) -> None:
    if not 1 <= k <= num_rows:
        raise InputError(f"{num_rows} images cannot make {k} clusters: ask for 1 to {num_rows}")


def capacity_of(cap: float, num_rows: int, k: int) -> int:
    """Returns the maximum size of a cluster: cap times the mean, but never so small that the rows would not fit."""
    if not cap >= 1:
        raise InputError(f"--balance must be at least 1 (1 makes all clusters equal), but is {cap:g}")
    return int(min(num_rows, max(cap * num_rows / k + 1e-9, -(-num_rows // k))))


@dataclass(frozen=True)
class Clusters:
    """The result of k-means. No cluster is empty; there are fewer than k only if there are fewer distinct rows."""

    centroids: Tensor  # [k, D], float32; of length 1 for the cosine metric
    labels: Tensor  # [N], the nearest centroid of each row
    sizes: Tensor  # [k]
    inertia: float  # the sum of squared distances to the nearest centroid


def kmeans(rows: FeatureRows, k: int, metric: str = "euclidean", seed: int = 0, progress: bool = False) -> Clusters:
    """Returns k clusters of low inertia.

    On the sample, Lloyd's passes end when one gains less than 1e-4 of the inertia; over all rows there are two.
    k-means++ is started 10 times for up to 64 clusters and once for more, where three starts gained 0.4% and
    moving centroids 2.5% in the same time.
    """
    check_k(k, len(rows))
    width = read(rows, np.array([0]), metric).shape[1]
    few = max(CHUNK, SEEDING_ROWS * k)
    indices = sample_indices(len(rows), SAMPLE * few, seed)
    x = torch.empty(len(indices), width)
    for part, values in stream(rows, metric, "reading", progress, indices):
        x[part] = values
    origin = origin_of(x, metric)
    generator = torch.Generator().manual_seed(seed)
    x = x.sub_(origin)[torch.randperm(len(x), generator=generator)]
    points = _Points(x, metric == "cosine")
    centroids = _start(points.at(torch.arange(min(few, len(x)))), k, 10 if k <= STARTS_MOST_K else 1, generator)
    centroids, _ = points.lloyd(centroids, 50, 1e-4, progress)
    centroids += origin
    del points, x
    for _ in range(PASSES if len(indices) < len(rows) else 0):
        centroids = _stream_pass(rows, centroids, metric, progress)
    return _finish(rows, centroids, metric, progress)


def _stream_pass(rows: FeatureRows, centroids: Tensor, metric: str, progress: bool) -> Tensor:
    """Returns the centroids after one Lloyd pass over all rows; empty ones move to the rows of highest cost."""
    k, costs, origin = len(centroids), torch.empty(len(rows)), origin_of(centroids, metric)
    shifted = centroids - origin
    sums, sizes = torch.zeros(shifted.shape, dtype=torch.float64), torch.zeros(k, dtype=torch.int64)
    for part, chunk in stream(rows, metric, "k-means", progress):
        x = chunk - origin
        costs[part], labels = nearest(x, shifted)
        sums += add_up(x, labels, k)
        sizes += torch.bincount(labels, minlength=k)
    moved = _means(sums, sizes, shifted, metric == "cosine")
    empty = (sizes == 0).nonzero()[:, 0]
    far = costs.topk(len(empty)).indices.sort().values
    far = far[costs[far] > 0]
    if len(far):
        moved[empty[: len(far)]] = read(rows, far.numpy(), metric) - origin
    return moved + origin


def _means(sums: Tensor, sizes: Tensor, centroids: Tensor, spherical: bool) -> Tensor:
    """Returns the mean of each cluster, of length 1 if spherical; the centroid of an empty one is unchanged."""
    weights = torch.linalg.vector_norm(sums, dim=1) if spherical else sizes
    return torch.where(weights[:, None] > 1e-9, sums / weights[:, None], centroids).float()


def _finish(rows: FeatureRows, centroids: Tensor, metric: str, progress: bool) -> Clusters:
    """Assigns every row; an empty centroid moves to the row farthest from its own centroid, or is dropped."""
    for attempt in range(4):
        labels, distances = find_nearest(rows, centroids, metric, progress)
        sizes = torch.bincount(labels, minlength=len(centroids))
        empty = (sizes == 0).nonzero()[:, 0]
        if len(empty) == 0:
            break
        far = distances.topk(len(empty)).indices.sort().values
        far = far[distances[far] > 0]
        if len(far) == 0 or attempt > 1:
            centroids = centroids[sizes > 0]
        else:
            centroids[empty[: len(far)]] = read(rows, far.numpy(), metric)
    return Clusters(centroids, labels, sizes, float(distances.double().sum()))


class _Points:
    """Weighted points in memory, with the steps of k-means."""

    def __init__(self, x: Tensor, spherical: bool, weights: Tensor | None = None) -> None:
        self.x, self.spherical = x, spherical
        self.weights = torch.ones(len(x)) if weights is None else weights

    def at(self, indices: Tensor) -> "_Points":
        return _Points(self.x[indices], self.spherical, self.weights[indices])

    def nearest(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted squared distance of each point to its nearest centroid, and the centroid's index."""
        parts = [nearest(x, centroids) for x in self.x.split(CHUNK)]
        return torch.cat([d for d, _ in parts]) * self.weights, torch.cat([label for _, label in parts])

    def means(self, labels: Tensor, centroids: Tensor) -> Tensor:
        k = len(centroids)
        sums = torch.zeros(k, self.x.shape[1], dtype=torch.float64)
        for x, w, own in zip(self.x.split(CHUNK), self.weights.split(CHUNK), labels.split(CHUNK), strict=True):
            sums += add_up(x * w[:, None], own, k)
        sizes = torch.zeros(k, dtype=torch.float64).index_add_(0, labels, self.weights.double())
        return _means(sums, sizes, centroids, self.spherical)

    def lloyd(self, centroids: Tensor, most: int, tolerance: float, progress: bool = False) -> tuple[Tensor, float]:
        """Returns the centroids after at most `most` passes, and the inertia at the last pass."""
        before = math.inf
        for iteration in trange(most, desc="k-means", unit=" passes", disable=not progress, leave=False):
            costs, labels = self.nearest(centroids)
            inertia = float(costs.double().sum())
            centroids = self.means(labels, centroids)
            empty = (torch.bincount(labels, minlength=len(centroids)) == 0).nonzero()[:, 0]
            far = costs.topk(min(len(empty), len(costs))).indices
            far = far[costs[far] > 0]
            centroids[empty[: len(far)]] = self.x[far]  # empty ones move to the points of highest cost
            if not len(far) and iteration and before - inertia <= tolerance * before:
                break
            before = inertia
        return centroids, inertia

    def plus_plus(self, costs: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Returns up to `count` points by greedy k-means++: candidates are drawn by cost, and the best of them kept.

        Candidates for several choices are drawn at once, since a single large matrix product is much faster.
        """
        chosen: list[int] = []
        norms = self.x.square().sum(1)
        while len(chosen) < count and float(costs.sum()) > 0:
            few = max(1, min(DRAWS, count - len(chosen), (1 << 21) // (DRAWS * len(self.x))))
            drawn = torch.multinomial(costs, DRAWS * few, replacement=True, generator=generator)
            own = norms[drawn, None].expand(-1, len(self.x))
            to_each = floor(torch.addmm(own, self.x[drawn], self.x.T, alpha=-2), norms).mul_(self.weights)
            for _ in range(few):
                best = int(torch.minimum(to_each, costs, out=to_each).sum(1).argmin())
                if float(costs[drawn[best]]) > 0:
                    costs = to_each[best].clone()
                    chosen.append(int(drawn[best]))
        return self.x[chosen]

    def thin(self, centroids: Tensor, k: int) -> Tensor:
        """Returns the k centroids whose removal would cost most; of two close centroids, at most one is removed."""
        two = [half.topk(2, dim=1, largest=False) for half in half_distances(self.x, centroids)]
        first, second = torch.cat([part.values for part in two]).T
        nearest_one = torch.cat([part.indices[:, 0] for part in two])
        gains = torch.zeros(len(centroids)).index_add_(0, nearest_one, (second - first) * self.weights)
        partner = torch.cdist(centroids, centroids).fill_diagonal_(math.inf).argmin(1).tolist()
        gone: dict[int, int] = {}
        for i in gains.argsort(stable=True).tolist():
            if len(gone) < len(centroids) - k and i not in gone.values():
                gone[i] = partner[i]
        return centroids[[i for i in range(len(centroids)) if i not in gone]]


def _start(points: _Points, k: int, restarts: int, generator: torch.Generator) -> Tensor:
    """Returns the best of several k-means++ starts, improved by moving an eighth of its centroids, then fewer."""
    best, least = points.x[:1], math.inf
    for _ in range(restarts):
        first = points.x[torch.multinomial(points.weights, 1, generator=generator)]
        chosen = points.plus_plus(points.nearest(first)[0], k - 1, generator)
        centroids, inertia = points.lloyd(torch.cat([first, chosen]), 20, 1e-3)
        if inertia < least:
            best, least = centroids, inertia
    extra, failed = max(1, k // 8), 0
    while 1 < k == len(best) and failed < min(4, restarts + 1):
        added = points.plus_plus(points.nearest(best)[0], extra, generator)
        more, _ = points.lloyd(torch.cat([best, added]), 3, 1e-3)
        centroids, inertia = points.lloyd(points.thin(more, k), 10, 1e-3)
        if inertia < least * (1 - 5e-3 / restarts):
            best, least = centroids, inertia
        else:
            extra, failed = max(1, extra // 2), failed + 1
    return best


def hierarchical(
    rows: FeatureRows,
    k: int,
    metric: str = "euclidean",
    fine: int = 1024,
    cap: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> tuple[Centroids, Tensor]:
    """Returns DDM's partition, fine k-means and then k coarse clusters of the fine centroids, and each row's cluster.

    Small data get fewer fine centroids, N / 8 but at least k. A fine centroid is weighted by its number of rows: the
    coarse inertia is then, up to a constant, that of the rows themselves, and remote cells with a handful of rows
    cannot claim a cluster (on 12 data sets, unweighted was worse in inertia on each, by 0.4% to 24%, and in balance
    on 8). With `cap`, no cluster has more than cap times the mean size (or one row above the mean, if that is more):
    whole cells move to other clusters at the least added cost, and cells too large for this are split.
    """
    check_k(k, len(rows))
    if fine < k:
        raise InputError(f"--fine must be at least the {k} clusters that are made of fine centroids, but is {fine}")
    capacity = len(rows) if cap is None else capacity_of(cap, len(rows), k)
    used = min(fine, max(k, len(rows) // CELL_ROWS))
    cells = kmeans(rows, used, metric, seed, progress)
    for attempt in range(1, MOST_SPLITS + 2):
        coarse = _coarse(cells, k, metric, seed, capacity)
        if coarse is not None:
            return Centroids(cells.centroids, coarse, metric), coarse[cells.labels]
        centroids = _split(rows, cells, k, metric, seed + attempt, capacity)
        before, cells = cells, _finish(rows, centroids, metric, progress)
        if len(cells.sizes) == len(before.sizes) or int(cells.sizes.max()) == int(before.sizes.max()) > capacity:
            break
    raise InputError(
        f"--balance {cap:g} cannot be kept, since {int(cells.sizes.max())} images are equal or nearly so: "
        "remove duplicates, or raise it"
    )


def _coarse(cells: Clusters, k: int, metric: str, seed: int, capacity: int) -> Tensor | None:
    """Returns the cluster of each cell, numbered from the largest; None if they do not fit under the capacity."""
    origin = origin_of(cells.centroids, metric)
    points = _Points(cells.centroids - origin, metric == "cosine", cells.sizes.float())
    centroids = _start(points, k, 8, torch.Generator().manual_seed(seed))
    centroids, _ = points.lloyd(centroids, 100, 0)
    if len(centroids) < k:
        raise InputError(f"the images have only {len(centroids)} distinct values: ask for at most as many clusters")
    labels, least = None, math.inf
    for _ in range(10):
        costs = torch.cdist(points.x, centroids).square().double() * cells.sizes[:, None]
        packed = pack(cells.sizes.numpy(), costs.numpy(), capacity)
        total = math.inf if packed is None else float(costs.numpy()[range(len(packed)), packed].sum())
        if total >= least:
            break
        labels, least = torch.from_numpy(packed), total
        centroids = points.means(labels, centroids)
    if labels is None:
        return None
    sizes = torch.zeros(k, dtype=torch.int64).index_add_(0, labels, cells.sizes)
    return sizes.argsort(descending=True, stable=True).argsort()[labels]


def _split(rows: FeatureRows, cells: Clusters, k: int, metric: str, seed: int, capacity: int) -> Tensor:
    """Returns the centroids with the largest cells split by k-means within each."""
    fits = max(1, int((capacity - len(rows) / k) / max(1 - 1 / k, 1e-9)))  # cells up to this size can always be packed
    large = cells.sizes.argsort(descending=True, stable=True)[: max(8, len(cells.sizes) // 8)]
    centroids = list(cells.centroids.split(1))
    for cell in large[cells.sizes[large] > fits].tolist():
        size = int(cells.sizes[cell])
        members = np.flatnonzero(cells.labels.numpy() == cell)
        x = read(rows, members[sample_indices(size, CHUNK, seed)], metric)
        centroids[cell] = kmeans(x, min(8, -(-size // fits), len(x)), metric, seed=seed).centroids
    return torch.cat(centroids)


def pack(size: Any, cost: Any, capacity: int) -> Any:
    """Returns a bin for each item at low total cost[item, bin], no bin above capacity or empty; None if not found.

    Items start in their cheapest bin and leave overfull bins by the move of least added cost per unit of overflow
    removed. Items of size at most (capacity - mean) / (1 - 1/bins) always fit.
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
    rows: FeatureRows, labels: Tensor, k: int, metric: str = "euclidean", progress: bool = False
) -> dict[str, Any]:
    """Returns the quality measures in partition.json for any assignment to k clusters, in two passes over the rows.

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
        "silhouette": silhouette(rows, labels, metric),
    }


def silhouette(rows: FeatureRows, labels: Tensor, metric: str = "euclidean") -> float | None:
    """Returns the mean of (b - a) / max(a, b) over a random sample; None if it has fewer than 2 clusters.

    a is the mean distance to the own cluster's rows, b to those of the next cluster.
    """
    indices = sample_indices(len(rows), SILHOUETTE_ROWS, seed=0)
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


def add_up(x: Tensor, labels: Tensor, k: int) -> Tensor:
    """Returns the sum of each cluster's rows [k, D]: float32 is exact enough within a chunk, not over all of them."""
    return torch.zeros(k, x.shape[1]).index_add_(0, labels, x)
