"""k-means against scikit-learn on one thread: speed of MiniBatchKMeans, inertia of KMeans' best of 10.

    python benchmarks/kmeans.py [--rows 100000] [--dim 256] [--clusters 256] [--rounds 6]

Each round draws a mixture of Gaussians of unequal size and width plus 5% noise, with fewer, equally many or more
components than clusters, and runs both in succession with the round's seed. The report is the median over rounds of
the ratio within a round. Both assign every row, and the inertia is over all rows.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans, MiniBatchKMeans

from atoll.partition.kmeans import hierarchical, kmeans


def make_mixture(num_rows: int, dim: int, components: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((components, dim), dtype=np.float32)
    widths = rng.uniform(0.5, 1.5, components).astype(np.float32)
    own = rng.choice(components, num_rows, p=rng.dirichlet(np.full(components, 2.0)))
    x = means[own] + widths[own, None] * rng.standard_normal((num_rows, dim), dtype=np.float32)
    noise = rng.random(num_rows) < 0.05
    x[noise] = 1.5 * rng.standard_normal((int(noise.sum()), dim), dtype=np.float32)
    return x


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} (from {min(values):.3f} to {max(values):.3f})"


def compare_speed(num_rows: int, dim: int, k: int, rounds: int) -> None:
    print(f"{num_rows} x {dim} in {k} clusters, against MiniBatchKMeans with its defaults")
    speeds, inertias = [], []
    for seed in range(rounds):
        components = (3 * k // 2, k, k // 2 + 1)[seed % 3]
        x = make_mixture(num_rows, dim, components, seed)
        theirs, their_seconds = timed(lambda x=x, seed=seed: MiniBatchKMeans(k, random_state=seed).fit(x))  # type: ignore[misc]
        ours, our_seconds = timed(lambda x=x, seed=seed: kmeans(x, k, seed=seed))  # type: ignore[misc]
        speeds.append(their_seconds / our_seconds)
        inertias.append(ours.inertia / theirs.inertia_)
        print(
            f"  {components:4} components: {our_seconds:5.2f} s against {their_seconds:5.2f} s, "
            f"inertia {ours.inertia:.4g} against {theirs.inertia_:.4g}"
        )
    print(f"speed, atoll / MiniBatchKMeans:   {spread(speeds)}")
    print(f"inertia, atoll / MiniBatchKMeans: {spread(inertias)}")


def compare_quality(rounds: int) -> None:
    print("10000 x 64, against KMeans with n_init=10")
    ratios, control, speeds = [], [], []
    for k in (8, 20, 64):
        for seed in range(rounds // 2):
            x = make_mixture(10_000, 64, (3 * k // 2, k, k // 2 + 1)[seed % 3], 100 + seed)
            best, their_seconds = timed(lambda x=x, k=k: KMeans(k, n_init=10, random_state=0).fit(x))  # type: ignore[misc]
            again = KMeans(k, n_init=10, random_state=1).fit(x).inertia_
            ours, our_seconds = timed(lambda x=x, k=k, seed=seed: kmeans(x, k, seed=seed))  # type: ignore[misc]
            ratios.append(ours.inertia / best.inertia_)
            control.append(again / best.inertia_)
            speeds.append(their_seconds / our_seconds)
    print(f"inertia, atoll / KMeans best of 10: {spread(ratios)}")
    print(f"  the same with another of its seeds: {spread(control)}")
    print(f"speed, atoll / KMeans best of 10:   {spread(speeds)}")


def compare_coarse() -> None:
    x = make_mixture(20_000, 64, 12, 0)
    for cap in (None, 1.5, 1.05):
        (centroids, labels), seconds = timed(lambda cap=cap: hierarchical(x, 8, cap=cap))  # type: ignore[misc]
        largest = float(labels.bincount().max()) * 8 / len(x)
        print(f"20000 x 64 in 8 of {len(centroids.fine)} cells, cap {cap}: {seconds:.2f} s, balance {largest:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--clusters", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kmeans(make_mixture(2000, args.dim, 8, 0), 8)  # the first matrix product of a process is slow
    compare_speed(args.rows, args.dim, args.clusters, args.rounds)
    compare_quality(args.rounds)
    compare_coarse()


if __name__ == "__main__":
    main()
