"""Starts Ray clusters on this machine, whose nodes are processes that can be added and killed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


def patiently(start: Callable[[], Any]) -> Any:
    """Starts a node, and retries once: Ray gives up after 30 seconds, which a busy machine may exceed."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


@contextmanager
def ray_cluster(nodes: int = 2, **options: Any) -> Iterator[Any]:
    """Yields a cluster of so many nodes with two logical CPUs each, and shuts it down."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {**NODE, **options}
    system = {"worker_niceness": 0}  # Ray's default would yield to all other work on this machine
    head = {**node, "include_dashboard": False, "_system_config": system}
    on_sigterm = signal.getsignal(signal.SIGTERM)  # a Ray driver replaces it permanently
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        for _ in range(nodes - 1):
            patiently(lambda: cluster.add_node(**node))
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)
