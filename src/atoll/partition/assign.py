"""Which cluster a row belongs to: by published centroids, by label or at random, and how good the result is.

Rows are anything with a length and slices `rows[a:b]` of shape [n, D], such as a memory map: they are read a few
thousand at a time, so no function here holds them all. With the cosine metric each row is scaled to length 1 as
it is read, and everything after that is Euclidean; a row of zeros stays one and is equally far from everything.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.encoders.text import GOLDEN, split_mix
from atoll.errors import InputError, unknown
from atoll.storage import parse_json, write_whole
from atoll.tensors import TensorFile

CHUNK = 4096  # rows read at once; fixed, so that no result depends on it
METRICS = ("euclidean", "cosine")
FORMAT = 1

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many rows of it are done, and of how many."""


class FeatureRows(Protocol):
    """A table of features that need not be in memory; a slice is a tensor or an array of shape [n, D]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


@dataclass(frozen=True)
class Centroids:
    """A partition as it is published: a row belongs to the coarse cluster of its nearest fine centroid."""

    fine: Tensor  # [F, D], float32
    coarse_of_fine: Tensor  # [F], int64
    metric: str = "euclidean"

    def __post_init__(self) -> None:
        check_metric(self.metric)
        if self.fine.dim() != 2 or 0 in self.fine.shape or self.coarse_of_fine.shape != self.fine.shape[:1]:
            raise InputError(
                f"fine centroids of shape {list(self.fine.shape)} and coarse_of_fine of shape "
                f"{list(self.coarse_of_fine.shape)} do not fit: they must be [F, D] and [F]"
            )
        if not self.fine.is_floating_point() or not bool(torch.isfinite(self.fine).all()):
            raise InputError("the fine centroids hold values that are not finite numbers: compute them again")
        if self.coarse_of_fine.dtype != torch.int64 or int(self.coarse_of_fine.min()) < 0:
            raise InputError("coarse_of_fine must hold cluster numbers (int64, from 0): compute the centroids again")
        if int(self.coarse_of_fine.max()) >= len(self.fine):
            raise InputError(f"{len(self.fine)} fine centroids cannot make {self.num_clusters} clusters: use others")

    @property
    def num_clusters(self) -> int:
        return int(self.coarse_of_fine.max()) + 1

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, replaced in one go."""
        about = {"format": FORMAT, "metric": self.metric, "num_clusters": self.num_clusters}
        tensors = {"fine_centroids": self.fine.contiguous(), "coarse_of_fine": self.coarse_of_fine.contiguous()}
        write_whole(Path(path), lambda staged: save_file(tensors, staged, metadata={"atoll": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> "Centroids":
        """Read what `save` wrote, checked."""
        advice = "give the centroids file that `atoll partition` wrote"
        with TensorFile(Path(path), advice) as file:
            tensors = file.read() if file.entries.keys() == {"fine_centroids", "coarse_of_fine"} else {}
            try:
                about = parse_json(file.metadata.get("atoll", "{}").encode())
            except ValueError:
                about = None
        if not tensors or not isinstance(about, dict) or about.get("format") != FORMAT:
            raise InputError(f"{path} does not hold the centroids of a partition in format {FORMAT}: give another file")
        try:
            return cls(tensors["fine_centroids"], tensors["coarse_of_fine"], about.get("metric", ""))
        except InputError as error:
            raise InputError(f"{path} cannot be used: {error}") from error


def assign(rows: FeatureRows, centroids: Centroids, *, progress: Progress | None = None) -> Tensor:
    """The coarse cluster of each row [N], for rows old or new."""
    fine, _ = find_nearest(rows, centroids.fine, centroids.metric, progress)
    return centroids.coarse_of_fine[fine]


def find_nearest(
    rows: FeatureRows, centroids: Tensor, metric: str, progress: Progress | None = None, stage: str = "assigning"
) -> tuple[Tensor, Tensor]:
    """For each row the number of its nearest centroid [N], and the squared distance to it [N]."""
    labels, distances = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
    origin = origin_of(centroids, metric)
    shifted = centroids.float() - origin
    for start, x in stream(rows, metric, progress, stage):
        if x.shape[1] != centroids.shape[1]:
            raise InputError(
                f"the rows have {x.shape[1]} features but the centroids {centroids.shape[1]}: "
                "compute the features as those of the partition were"
            )
        part = slice(start, start + len(x))
        distances[part], labels[part] = nearest(x - origin, shifted)
    return labels, distances


def origin_of(points: Tensor, metric: str) -> Tensor:
    """What to subtract before distances are taken by |x|^2 - 2xc + |c|^2, which cancels far from the origin."""
    return points.float().mean(0) if metric == "euclidean" else torch.zeros(points.shape[1])


def nearest(x: Tensor, centroids: Tensor, norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Squared distance to, and number of, the nearest centroid of each x[n, D]; norms are |x|^2 if known."""
    parts = [half.min(1) for half in half_distances(x, centroids)]
    least, labels = torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
    return floor(least.mul_(2), x.square().sum(1) if norms is None else norms), labels


def half_distances(x: Tensor, centroids: Tensor) -> Iterator[Tensor]:
    """|c|^2 / 2 - xc for each x and c, a few rows at a time: 4 MB, which stays in the cache."""
    halves = centroids.square().sum(1) / 2
    for part in x.split(max(256, (1 << 20) // len(centroids))):
        yield torch.addmm(halves, part, centroids.T, alpha=-1)


def floor(distances: Tensor, norms: Tensor) -> Tensor:
    """|c|^2 - 2xc completed by |x|^2, and what is only rounding set to 0: equal rows must be at distance 0."""
    distances += norms
    return distances.masked_fill_(distances < 1e-6 * norms, 0)


def stream(
    rows: FeatureRows, metric: str, progress: Progress | None = None, stage: str = "reading"
) -> Iterator[tuple[int, Tensor]]:
    """All rows in order, in chunks of float32 with the number of their first."""
    for start in range(0, len(rows), CHUNK):
        x = read(rows, start, min(start + CHUNK, len(rows)), metric)
        yield start, x
        if progress:
            progress(stage, start + len(x), len(rows))


def take(rows: FeatureRows, indices: Tensor, metric: str) -> Tensor:
    """The rows at ascending indices [n, D]: by chunks where they lie close, one by one where they are far apart."""
    parts = []
    for window in indices.split_with_sizes(torch.bincount(indices // CHUNK).tolist()):
        if len(window) == 0:
            continue
        first, last = int(window[0]), int(window[-1])
        if last - first < 16 * len(window):
            x = read(rows, first, last + 1, metric)
            parts.append(x if len(x) == len(window) else x[window - first])
        else:
            parts += [read(rows, i, i + 1, metric) for i in window.tolist()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read(rows: FeatureRows, start: int, stop: int, metric: str) -> Tensor:
    """Rows start to stop as float32 [n, D], checked, and of length 1 if the metric is cosine."""
    values = rows[start:stop]
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        values = torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    if values.dim() != 2 or len(values) != stop - start or values.shape[1] == 0:
        raise InputError(f"features must be a table [rows, D], but rows {start} to {stop} are {list(values.shape)}")
    x = values.float()
    norms = torch.linalg.vector_norm(x, dim=1)
    finite = torch.isfinite(norms.square())
    if not bool(finite.all()):
        row = start + int(finite.logical_not().nonzero()[0])
        raise InputError(f"the features of row {row} are not finite numbers: compute them again or leave that row out")
    return x / norms.clamp(min=1e-12)[:, None] if metric == "cosine" else x


def check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)


def check_k(k: int, num_rows: int) -> None:
    if k < 1:
        raise InputError(f"the number of clusters must be at least 1, but is {k}")
    if k > num_rows:
        raise InputError(f"{num_rows} rows cannot make {k} clusters: ask for at most {num_rows}")


def capacity_of(cap: float, num_rows: int, k: int) -> int:
    """The most rows a cluster may have: cap times the mean, but never so few that the rows would not fit."""
    if not cap >= 1:
        raise InputError(f"cap must be at least 1 (1 makes all clusters equal), but is {cap:g}")
    return int(min(num_rows, max(cap * num_rows / k + 1e-9, -(-num_rows // k))))


def by_random(num_rows: int, k: int, *, seed: int = 0) -> Tensor:
    """A random cluster for each row [N], from (seed, row number) alone, with sizes that differ by at most 1.

    Each run of k consecutive rows is a random permutation of the clusters, so rows added later change nothing.
    """
    check_k(k, num_rows)
    runs = -(-num_rows // k)
    start = split_mix(torch.tensor((seed + 2**63) % 2**64 - 2**63) + GOLDEN)
    keys = split_mix(torch.arange(runs * k) + start + GOLDEN) ^ -(2**63)  # whose order is that of unsigned numbers
    return keys.reshape(runs, k).argsort(stable=True).reshape(-1)[:num_rows].clone()


def by_label(labels: Sequence[int] | Sequence[str] | Any, k: int, *, cap: float | None = None) -> Tensor:
    """The cluster of each row [N] from its label: one for each label in sorted order, or k balanced groups."""
    values = np.asarray(labels).tolist() if not isinstance(labels, list | tuple) else labels
    names = sorted(set(values))  # np.unique would make all of them as long as the longest
    number = {name: i for i, name in enumerate(names)}
    of_row = np.fromiter((number[value] for value in values), np.int64, len(values))
    sizes = np.bincount(of_row)
    check_k(k, len(of_row))
    if k > len(names):
        raise InputError(f"there are only {len(names)} labels for {k} clusters: ask for at most {len(names)}")
    if k == len(names):
        of_name = np.arange(k)
    else:
        of_name, loads = np.zeros(len(names), dtype=np.int64), np.zeros(k, dtype=np.int64)
        for name in np.argsort(-sizes, kind="stable"):
            of_name[name] = loads.argmin()
            loads[of_name[name]] += sizes[name]
    if cap is not None:
        capacity = capacity_of(cap, len(of_row), k)
        packed = pack(sizes.tolist(), np.ones((len(names), k)), capacity, start=of_name)
        if packed is None:
            most = int(np.bincount(of_name, weights=sizes, minlength=k).max())
            raise InputError(
                f"whole labels do not fit into {k} clusters of at most {capacity} rows: "
                f"set cap to {-(-most * k * 100 // len(of_row)) / 100:g}, or cluster by k-means"
            )
        of_name = packed
    return torch.from_numpy(of_name)[torch.from_numpy(of_row)]


def pack(sizes: Sequence[int], costs: Any, capacity: int, *, start: Any = None) -> Any:
    """A bin for each item at low total cost[item, bin], no bin above capacity and none empty; None if not found.

    Items begin in their cheapest bin (or in `start`) and leave the full bins by the move of least added cost for
    each unit of overflow it removes. Where that is stuck, a search with backtracking looks for any packing: few
    items are searched exhaustively, and many of at most (capacity - mean) / (1 - 1/bins) always fit.
    """
    size, cost = np.asarray(sizes, dtype=np.int64), np.asarray(costs, dtype=np.float64)
    items, bins = cost.shape
    place = np.array(cost.argmin(1) if start is None else start)
    loads = np.bincount(place, weights=size, minlength=bins).astype(np.int64)

    def move(item: int, target: int) -> None:
        loads[place[item]] -= size[item]
        loads[target] += size[item]
        place[item] = target

    while (loads > capacity).any():
        overflow = (loads - capacity)[place]
        added = (cost - cost[np.arange(items), place][:, None]) / np.minimum(size, overflow.clip(1))[:, None]
        allowed = (overflow > 0)[:, None] & (loads[None] + size[:, None] <= capacity)
        if not allowed.any():
            packing = _search(size, cost, capacity)
            if packing is None:
                return None
            place, loads = packing, np.bincount(packing, weights=size, minlength=bins).astype(np.int64)
            break
        move(*divmod(int(np.where(allowed, added, np.inf).argmin()), bins))

    for _ in range(4 * items):
        alone = np.bincount(place, minlength=bins)[place] == 1
        gain = np.where(alone[:, None], 0, cost[np.arange(items), place][:, None] - cost)
        empty = np.bincount(place, minlength=bins) == 0
        if empty.any() and not alone.all():
            gain = np.where(alone[:, None] | ~empty[None], -np.inf, gain)  # an expert without data helps nobody
        else:
            gain = np.where(loads[None] + size[:, None] <= capacity, gain, 0)
            if gain.max() <= 1e-12 * abs(cost).max():
                break
        move(*divmod(int(gain.argmax()), bins))
    return place


def _search(size: Any, cost: Any, capacity: int, most_steps: int = 20_000) -> Any:
    """Any packing, largest items first: bins in order of cost, and then, in case that fails, of room."""
    items, bins = cost.shape
    order = np.argsort(-size, kind="stable")
    smallest, suffix = int(size.min()), np.append(np.cumsum(size[order][::-1])[::-1], 0)
    for by_room in (False, True):
        room, place = [capacity] * bins, np.zeros(items, dtype=np.int64)
        options: list[list[int]] = []  # for each item placed so far, the bins still to be tried
        depth, steps = 0, 0
        while depth < items and steps < most_steps:
            steps += 1
            item = int(order[depth])
            if len(options) == depth:
                ranked = sorted(range(bins), key=lambda b: -room[b] if by_room else cost[item, b], reverse=True)
                ranks = {room[b]: b for b in ranked if room[b] >= size[item]}  # of equally full bins, the best alone
                usable = sum(r for r in room if r >= smallest) >= suffix[depth]
                options.append([b for b in ranked if ranks.get(room[b]) == b] if usable else [])
            else:
                room[place[item]] += int(size[item])
            if options[depth]:
                place[item] = options[depth].pop()
                room[place[item]] -= int(size[item])
                depth += 1
            else:
                options.pop()
                depth -= 1
                if depth < 0:
                    return None
        if depth == items:
            return place
    return None


@dataclass(frozen=True)
class Quality:
    """How good a partition is; distances are to the mean of the row's own cluster, 1 - cosine for that metric."""

    sizes: tuple[int, ...]
    share_of_largest: float
    balance: float  # the largest size over the mean size
    mean_distance: tuple[float, ...]
    inertia: float  # the sum of squared Euclidean distances, of rows of length 1 for the cosine metric
    silhouette: float | None  # on a random sample; None where fewer than 2 clusters are in it


def measure(
    rows: FeatureRows,
    labels: Tensor,
    k: int,
    *,
    metric: str = "euclidean",
    sample: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Quality:
    """Sizes, distances and silhouette of any assignment of rows to k clusters, in two passes over the rows."""
    check_metric(metric)
    if labels.shape != (len(rows),) or len(labels) == 0 or not 0 <= int(labels.min()) <= int(labels.max()) < k:
        raise InputError(f"labels must be one number from 0 to {k - 1} for each of the {len(rows)} rows")
    sizes = torch.bincount(labels, minlength=k)
    means: Tensor | None = None
    for start, x in stream(rows, metric, progress, "cluster means"):
        means = torch.zeros(k, x.shape[1], dtype=torch.float64) if means is None else means
        means += add_up(x, labels[start : start + len(x)], k)
    assert means is not None
    means /= sizes.clamp(min=1)[:, None]
    if metric == "cosine":
        means /= torch.linalg.vector_norm(means, dim=1, keepdim=True).clamp(min=1e-12)
    distance, inertia = torch.zeros(k, dtype=torch.float64), 0.0
    for start, x in stream(rows, metric, progress, "distances"):
        own = labels[start : start + len(x)]
        squared = (x - means[own]).square().sum(1)
        inertia += float(squared.sum())
        distance.index_add_(0, own, squared / 2 if metric == "cosine" else squared.sqrt())
    return Quality(
        sizes=tuple(sizes.tolist()),
        share_of_largest=float(sizes.max()) / len(rows),
        balance=float(sizes.max()) * k / len(rows),
        mean_distance=tuple((distance / sizes.clamp(min=1)).tolist()),
        inertia=inertia,
        silhouette=silhouette(rows, labels, metric=metric, sample=sample, seed=seed),
    )


def add_up(x: Tensor, labels: Tensor, k: int) -> Tensor:
    """The sum of the rows of each cluster [k, D]: float32 is exact enough within a chunk, not over all of them."""
    return torch.zeros(k, x.shape[1]).index_add_(0, labels, x)


def silhouette(
    rows: FeatureRows, labels: Tensor, *, metric: str = "euclidean", sample: int = 2000, seed: int = 0
) -> float | None:
    """The mean of (b - a) / max(a, b) over a random sample: a to the own cluster's rows, b to the next cluster's."""
    indices = sample_indices(len(rows), sample, seed)
    x = take(rows, indices, metric).double()
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


def sample_indices(num_rows: int, most: int, seed: int) -> Tensor:
    """At most so many distinct row numbers, ascending."""
    if num_rows <= most:
        return torch.arange(num_rows)
    chosen = np.random.default_rng(seed).choice(num_rows, most, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen))
