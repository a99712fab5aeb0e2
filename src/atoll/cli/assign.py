"""`atoll assign`."""

from typing import Annotated

import tyro


def assign(data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")], to: str) -> None:
    """Place a data set into the clusters of an existing partition, by its published centroids.

    For example:
      atoll assign more-data --to data/clusters

    Args:
        data: A folder that `atoll prepare` has made, or its URL, with the features of the other.
        to: The folder or URL that holds partition.json and centroids.safetensors of the existing partition.
    """
    from atoll.partition.partition import assign_to

    print(*assign_to(data, to), sep="\n")
