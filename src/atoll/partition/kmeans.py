"""Clusters of features that need not fit in memory: k-means, and DDM's two levels of it with a cap on sizes.

k-means here is greedy k-means++ and Lloyd's passes on a small random sample; there the worst-placed centroids are
moved until that no longer helps ("breathing", after Fritzke 2020, arXiv 2006.15666), which gains more than restarts
do at the same cost. Lloyd's passes then go over all rows that fit in `memory`, and one last pass streams over
every row. Results depend on the rows, the arguments and the seed only.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.partition.assign import (
    CHUNK,
    Centroids,
    FeatureRows,
    Progress,
    add_up,
    capacity_of,
    check_k,
    check_metric,
    find_nearest,
    floor,
    half_distances,
    nearest,
    origin_of,
    pack,
    sample_indices,
    take,
)

SEEDING_ROWS = 16  # a centroid, in the sample that k-means starts on
STARTS_MOST_K = 64  # up to so many clusters, k-means++ starts 10 times
PASSES = 2  # over all rows in memory, where they are many more than the sample
DRAWS = 8  # points that k-means++ chooses at once, and how many it draws for each
CELL_ROWS = 8  # a fine centroid should stand for so many rows at least
MOST_SPLITS = 16  # rounds of splitting cells for the cap
MEMORY = 1 << 30


@dataclass(frozen=True)
class Clusters:
    """What k-means found; every cluster has rows, and there are fewer than k only if there are fewer distinct rows."""

    centroids: Tensor  # [k, D], float32; of length 1 for the cosine metric
    labels: Tensor  # [N], the nearest centroid of each row
    sizes: Tensor  # [k]
    inertia: float  # the sum of squared distances to the nearest centroid
    rows_in_memory: int  # less than N when these were a sample


@dataclass(frozen=True)
class Hierarchy:
    """K coarse clusters made of fine cells, and how they came about."""

    centroids: Centroids
    labels: Tensor  # [N], the coarse cluster of each row; what `assign` gives for the same rows
    sizes: Tensor  # [K]
    fine_sizes: Tensor  # [F]
    fine_used: int  # less than asked for small data; cells split for the cap come on top


def kmeans(
    rows: FeatureRows,
    k: int,
    *,
    metric: str = "euclidean",
    seed: int = 0,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> Clusters:
    """Returns k clusters of little inertia.

    On the sample, Lloyd's passes end when one gains less than 1e-4 of the inertia; over many more rows there are two.
    There are 10 k-means++ starts for up to 64 clusters and one for more, where three gained 0.4% and
    moving centroids 2.5% in the same time. The rows in memory take `memory` bytes at most, and chunks come on top.
    """
    check_metric(metric)
    check_k(k, len(rows))
    points, origin = _load(rows, k, metric, seed, memory, progress)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(points.x), generator=generator)
    centroids = _start(points.at(order[: max(CHUNK, SEEDING_ROWS * k)]), k, 10 if k <= STARTS_MOST_K else 1, generator)
    sample = order[: 4 * max(CHUNK, SEEDING_ROWS * k)]
    centroids, _ = points.at(sample).lloyd(centroids, 50, 1e-4, progress)
    if len(sample) < len(order):
        centroids, _ = points.lloyd(centroids, PASSES, 0, progress)
    rows_in_memory = len(points.x)
    del points
    return _finish(rows, centroids + origin, metric, rows_in_memory, progress)


def _load(
    rows: FeatureRows, k: int, metric: str, seed: int, memory: int, progress: Progress | None
) -> tuple["_Points", Tensor]:
    """The rows, or a random sample of them that fits in memory, and the origin they were shifted to."""
    width = take(rows, torch.tensor([0]), metric).shape[1]
    indices = sample_indices(len(rows), max(k, memory // (4 * width)), seed)
    x = torch.empty(len(indices), width)
    for start in range(0, len(indices), CHUNK):
        part = indices[start : start + CHUNK]
        x[start : start + len(part)] = take(rows, part, metric)
        if progress:
            progress("reading", start + len(part), len(indices))
    origin = origin_of(x, metric)
    return _Points(x.sub_(origin), metric == "cosine"), origin


def _finish(
    rows: FeatureRows, centroids: Tensor, metric: str, rows_in_memory: int, progress: Progress | None
) -> Clusters:
    """Assign every row; a centroid that is nearest to none goes to the row farthest from its own, or is dropped."""
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
            centroids[empty[: len(far)]] = take(rows, far, metric)
    return Clusters(centroids, labels, sizes, float(distances.double().sum()), rows_in_memory)


class _Points:
    """Weighted points in memory, and what k-means does with them."""

    def __init__(self, x: Tensor, spherical: bool, weights: Tensor | None = None) -> None:
        self.x, self.spherical = x, spherical
        self.weighted, self.weights = weights is not None, torch.ones(len(x)) if weights is None else weights
        self.norms = torch.cat([part.square().sum(1) for part in x.split(CHUNK)])

    def at(self, indices: Tensor) -> "_Points":
        return _Points(self.x[indices], self.spherical, self.weights[indices] if self.weighted else None)

    def nearest(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted squared distance of each point to its nearest centroid, and which that is."""
        parts = [nearest(x, centroids, n) for x, n in zip(self.x.split(CHUNK), self.norms.split(CHUNK), strict=True)]
        return torch.cat([d for d, _ in parts]) * self.weights, torch.cat([label for _, label in parts])

    def means(self, labels: Tensor, centroids: Tensor) -> Tensor:
        """The mean of each cluster; that of an empty one stays where it was."""
        k = len(centroids)
        sums = torch.zeros(k, self.x.shape[1], dtype=torch.float64)
        for x, w, own in zip(self.x.split(CHUNK), self.weights.split(CHUNK), labels.split(CHUNK), strict=True):
            sums += add_up(x * w[:, None] if self.weighted else x, own, k)
        if self.spherical:
            sizes = torch.linalg.vector_norm(sums, dim=1)
        else:
            sizes = torch.zeros(k, dtype=torch.float64).index_add_(0, labels, self.weights.double())
        return torch.where(sizes[:, None] > 1e-9, sums / sizes[:, None], centroids).float()

    def lloyd(
        self, centroids: Tensor, most: int, tolerance: float, progress: Progress | None = None
    ) -> tuple[Tensor, float]:
        """Returns the centroids after at most so many passes, and the inertia at the last of them."""
        before = math.inf
        for iteration in range(1, most + 1):
            costs, labels = self.nearest(centroids)
            inertia = float(costs.double().sum())
            centroids = self.means(labels, centroids)
            repaired = self._repair(centroids, costs, labels)
            if progress:
                progress(f"k-means, pass {iteration}", len(self.x), len(self.x))
            if not repaired and iteration > 1 and before - inertia <= tolerance * before:
                break
            before = inertia
        return centroids, inertia

    def _repair(self, centroids: Tensor, costs: Tensor, labels: Tensor) -> bool:
        """Put centroids without points on the points that cost most."""
        empty = (torch.bincount(labels, minlength=len(centroids)) == 0).nonzero()[:, 0]
        if len(empty) == 0:
            return False
        far = costs.topk(min(len(empty), len(costs))).indices
        far = far[costs[far] > 0]
        centroids[empty[: len(far)]] = self.x[far]
        return len(far) > 0

    def plus_plus(self, costs: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Up to `count` points by greedy k-means++: drawn by their cost, and of those drawn the ones that save most.

        Draws are made for several choices at once, since one matrix product for many is much the fastest.
        """
        chosen: list[int] = []
        while len(chosen) < count and float(costs.sum()) > 0:
            few = max(1, min(DRAWS, count - len(chosen), (1 << 21) // (DRAWS * len(self.x))))
            drawn = torch.multinomial(costs, DRAWS * few, replacement=True, generator=generator)
            norms = self.norms[drawn, None].expand(-1, len(self.x))
            to_each = floor(torch.addmm(norms, self.x[drawn], self.x.T, alpha=-2), self.norms).mul_(self.weights)
            for _ in range(few):
                best = int(torch.minimum(to_each, costs, out=to_each).sum(1).argmin())
                if float(costs[drawn[best]]) > 0:
                    costs = to_each[best].clone()
                    chosen.append(int(drawn[best]))
        return torch.tensor(chosen, dtype=torch.int64)

    def thin(self, centroids: Tensor, k: int) -> Tensor:
        """The k centroids without which the points would cost most; of two close ones at most one goes."""
        gains = torch.zeros(len(centroids))
        done = 0
        for half in half_distances(self.x, centroids):
            two = half.topk(2, dim=1, largest=False)
            weights = self.weights[done : done + len(half)]
            gains.index_add_(0, two.indices[:, 0], (two.values[:, 1] - two.values[:, 0]) * weights)
            done += len(half)
        apart = torch.cdist(centroids, centroids).fill_diagonal_(math.inf)
        partner = apart.argmin(1).tolist()
        gone: set[int] = set()
        frozen: set[int] = set()
        for i in gains.argsort(stable=True).tolist():
            if len(gone) < len(centroids) - k and i not in frozen:
                gone.add(i)
                frozen.add(partner[i])
        keep = torch.tensor([i not in gone for i in range(len(centroids))])
        return centroids[keep]


def _start(points: _Points, k: int, restarts: int, generator: torch.Generator) -> Tensor:
    """The best of several k-means++ starts, improved by moving an eighth of its centroids, and then fewer."""
    best, least = points.x[:1], math.inf
    for _ in range(restarts):
        first = points.x[torch.multinomial(points.weights, 1, generator=generator)]
        costs, _ = points.nearest(first)
        chosen = points.plus_plus(costs, k - 1, generator)
        centroids, inertia = points.lloyd(torch.cat([first, points.x[chosen]]), 20, 1e-3)
        if inertia < least:
            best, least = centroids, inertia
    extra, failed = max(1, k // 8), 0
    while 1 < k == len(best) and failed < min(4, restarts + 1):
        costs, _ = points.nearest(best)
        added = points.plus_plus(costs, extra, generator)
        more, _ = points.lloyd(torch.cat([best, points.x[added]]), 3, 1e-3)
        centroids, inertia = points.lloyd(points.thin(more, k), 10, 1e-3)
        if inertia < least * (1 - 5e-3 / restarts):
            best, least = centroids, inertia
        else:
            extra, failed = max(1, extra // 2), failed + 1
    return best


def hierarchical(
    rows: FeatureRows,
    k: int,
    *,
    fine: int = 1024,
    metric: str = "euclidean",
    cap: float | None = None,
    seed: int = 0,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> Hierarchy:
    """DDM's partition: fine k-means, then k coarse clusters of the fine centroids.

    Small data get fewer fine centroids, N / 8 but at least k. A fine centroid weighs as many rows as it stands
    for: the coarse inertia is then, up to a constant, that of the rows themselves, and far-off cells of a handful
    of rows cannot claim a cluster (on 12 data sets, unweighted was worse in inertia on each, by 0.4% to 24%, and
    in balance on 8). With `cap`, no cluster has more than cap times the mean size (or one row above the mean, if
    that is more): whole cells go to other clusters at the least added cost, and cells too large for it are split.
    """
    check_k(k, len(rows))
    if fine < k:
        raise InputError(f"fine must be at least the {k} clusters that are made of fine centroids, but is {fine}")
    capacity = len(rows) if cap is None else capacity_of(cap, len(rows), k)
    used = min(fine, max(k, len(rows) // CELL_ROWS))
    cells = kmeans(rows, used, metric=metric, seed=seed, memory=memory, progress=progress)
    coarse = _coarse(cells, k, metric, seed, capacity)
    for attempt in range(1, MOST_SPLITS + 1):
        if coarse is not None:
            break
        centroids = _split(rows, cells, k, metric, seed + attempt, capacity)
        if len(centroids) == len(cells.centroids):
            break
        cells = _finish(rows, centroids, metric, cells.rows_in_memory, progress)
        coarse = _coarse(cells, k, metric, seed, capacity)
    if coarse is None:
        raise InputError(
            f"cap {cap:g} cannot be kept with whole cells of up to {int(cells.sizes.max())} rows: "
            f"raise cap, or raise fine above {fine}"
        )
    labels = coarse[cells.labels]
    published = Centroids(cells.centroids, coarse, metric)
    return Hierarchy(published, labels, torch.bincount(labels, minlength=k), cells.sizes, used)


def _coarse(cells: Clusters, k: int, metric: str, seed: int, capacity: int) -> Tensor | None:
    """The cluster of each cell, numbered from the largest; None if the cells do not fit under the capacity."""
    origin = origin_of(cells.centroids, metric)
    points = _Points(cells.centroids - origin, metric == "cosine", cells.sizes.float())
    start = _start(points, k, 8, torch.Generator().manual_seed(seed))
    centroids, _ = points.lloyd(start, 100, 0)
    if len(centroids) < k:
        raise InputError(f"the rows have only {len(centroids)} distinct values: ask for at most as many clusters")
    labels, least = None, math.inf
    for _ in range(10):
        costs = torch.cdist(points.x, centroids).square().double() * cells.sizes[:, None]
        packed = pack(cells.sizes.tolist(), costs.numpy(), capacity)
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
    """The centroids with those of the largest cells replaced by several, by k-means in each."""
    fits = max(1, int((capacity - len(rows) / k) / max(1 - 1 / k, 1e-9)))  # cells up to this size can always be packed
    large = cells.sizes.argsort(descending=True, stable=True)[: max(8, len(cells.sizes) // 8)]
    centroids = list(cells.centroids.split(1))
    for cell in large[cells.sizes[large] > fits].tolist():
        size = int(cells.sizes[cell])
        members = (cells.labels == cell).nonzero()[:, 0]
        x = take(rows, members[sample_indices(size, CHUNK, seed)], metric)
        centroids[cell] = kmeans(x, min(8, -(-size // fits), len(x)), metric=metric, seed=seed).centroids
        if len(centroids[cell]) == 1 and size > capacity:
            raise InputError(
                f"{size} rows are equal, more than the {capacity} that cap allows in a cluster: "
                f"remove duplicates, or set cap to at least {math.ceil(size * k * 100 / len(rows)) / 100:g}"
            )
    return torch.cat(centroids)
