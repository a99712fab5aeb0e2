"""Where jobs run: what one can set by flags."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.config import check_choices
from atoll.errors import InputError

if TYPE_CHECKING:  # imported when it is needed: `atoll --help` must not wait for torch
    from atoll.engines.engine import Engine


@dataclass(frozen=True)
class EngineSettings:
    """Where jobs run, and how many at a time."""

    engine: str = "local"
    """local: processes of this machine; ray: a Ray cluster (docs/cluster.md)."""
    address: str | None = None
    """Of the Ray cluster, such as 10.0.0.1:6379; by default RAY_ADDRESS, or the one on this machine."""
    at_a_time: int | None = None
    """How many jobs to run at a time; by default as many as there are GPUs, or cores where there are none."""

    def __post_init__(self) -> None:
        check_choices(self, engine=("local", "ray"))
        if self.address is not None and self.engine != "ray":
            raise InputError("--address is of a Ray cluster: add --engine ray")
        if self.at_a_time is not None and self.at_a_time < 1:
            raise InputError(f"--at-a-time must be at least 1, but is {self.at_a_time}")

    def open(self, device: str = "auto") -> "Engine":
        """Returns the engine, for jobs on this kind of device; Ray's is connected by then."""
        if self.engine == "ray":
            from atoll.engines.ray import Ray

            return Ray(self.address, device, self.at_a_time)
        from atoll.engines.local import Local

        return Local(device, self.at_a_time)
