"""`atoll partition`."""

from typing import Annotated

import tyro


def partition(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    experts: int,
    method: str = "kmeans",
    fine: int = 1024,
    metric: str = "euclidean",
    balance: float | None = None,
    seed: int = 0,
) -> None:
    """Split a data set into one cluster per expert, each in a folder of its own.

    For example:
      atoll partition data --experts 8
      atoll partition data --experts 8 --balance 1.5
      atoll partition data --experts 8 --method random
      atoll partition s3://bucket/data --experts 8

    Args:
        data: A folder from `atoll prepare`, or its URL in an object store.
        experts: Number of clusters.
        method: kmeans (hierarchical, over image features), random, or label.
        fine: Number of fine centroids; reduced if there are few images.
        metric: euclidean or cosine.
        balance: The largest allowed cluster, as a multiple of the mean size.
        seed: Random seed.
    """
    from atoll.partition.partition import partition as cut

    print(*cut(data, experts, method=method, fine=fine, metric=metric, cap=balance, seed=seed), sep="\n")
