"""Ray clusters on this machine, whose nodes are processes that can be added and killed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


def patiently(start: Callable[[], Any]) -> Any:
    """Starts a node, which Ray gives up after 30 seconds: on a machine that is busy, once more."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


@contextmanager
def ray_cluster(nodes: int = 2, **options: Any) -> Iterator[Any]:
    """Yields a cluster of so many nodes with two logical CPUs each, and ends it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {**NODE, **options}
    system = {"worker_niceness": 0}  # or whatever else this machine does comes first
    head = {**node, "include_dashboard": False, "_system_config": system}
    on_sigterm = signal.getsignal(signal.SIGTERM)  # which a driver of Ray replaces for good
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        for _ in range(nodes - 1):
            patiently(lambda: cluster.add_node(**node))
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)
