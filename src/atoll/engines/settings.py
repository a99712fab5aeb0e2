"""Settings of engines, from flags."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.config import check_choices
from atoll.errors import InputError

if TYPE_CHECKING:  # imported when needed, so that `atoll --help` need not wait for torch
    from atoll.engines.engine import Engine


@dataclass(frozen=True)
class EngineSettings:
    """Where jobs run, and how many in parallel."""

    engine: str = "local"
    """local: processes on this machine; ray: a Ray cluster (docs/cluster.md)."""
    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379; by default RAY_ADDRESS, or the cluster on this machine."""
    at_a_time: int | None = None
    """Number of jobs to run in parallel; by default one per GPU, or per core if there is no GPU."""

    def __post_init__(self) -> None:
        check_choices(self, engine=("local", "ray"))
        if self.address is not None and self.engine != "ray":
            raise InputError("--address is of a Ray cluster: add --engine ray")
        if self.at_a_time is not None and self.at_a_time < 1:
            raise InputError(f"--at-a-time must be at least 1, but is {self.at_a_time}")

    def open(self, device: str = "auto") -> "Engine":
        """Returns the engine for jobs on this kind of device; connects to Ray if that is chosen."""
        if self.engine == "ray":
            from atoll.engines.ray import Ray

            return Ray(self.address, device, self.at_a_time)
        from atoll.engines.local import Local

        return Local(device, self.at_a_time)
