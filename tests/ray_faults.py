"""Prepares a data set on a simulated cluster that loses ten workers and a node, and again without: OUT/ray, OUT/local.

python tests/ray_faults.py OUT
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

import atoll.data.prepare as module
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.engines.settings import EngineSettings

WORKERS = ("ray::_call", "ray::IDLE")  # not the agents of a node, with which it dies


def main(out: Path) -> None:
    room = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**room)
    ray.init(cluster.address, log_to_driver=False, logging_level="error")
    engine, killed, chance = EngineSettings("ray").open("cpu"), [], random.Random(0)
    module.BATCH = 32

    def kill_some(function: Any, values: Any) -> Iterator[Any]:
        for i, result in enumerate(engine.map(function, values)):
            if i % 4 == 2 and len(killed) < 10:
                children = psutil.Process().children(recursive=True)
                if workers := [child for child in children if child.name() in WORKERS]:
                    killed.append(chance.choice(workers))
                    killed[-1].kill()
            if i == 20:
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            yield result

    source, settings = Source("shapes", num=2600, size=16), PrepareSettings(size=16, codec="pca:plain", flip=True)
    prepare(source, out / "ray", settings, 0, progress=False, device="cpu", run_elsewhere=kill_some)
    print(f"killed {len(killed)} workers and a node")
    ray.shutdown()
    cluster.shutdown()
    prepare(source, out / "local", settings, 0, progress=False, device="cpu")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
