"""`atoll assign`."""

from typing import Annotated

import tyro


def assign(data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")], to: str) -> None:
    """Assign a data set to the clusters of an existing partition, using its published centroids.

    For example:
      atoll assign more-data --to data/clusters

    Args:
        data: A folder from `atoll prepare`, or its URL, with the same kind of features as the partitioned data set.
        to: The folder or URL with partition.json and centroids.safetensors of the existing partition.
    """
    from atoll.partition.partition import assign_to

    print(*assign_to(data, to), sep="\n")
