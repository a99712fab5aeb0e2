"""`atoll serve-expert`."""

from pathlib import Path
from typing import Annotated

import tyro

from atoll.serving.settings import Limits


def serve_expert(
    expert: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERT")],
    port: int = 8100,
    host: str = "127.0.0.1",
    keys: Path | None = None,
    name: tuple[str, ...] = (),
    samples: int = 256,
    device: str = "auto",
    dtype: str | None = None,
    conversion: str | None = None,
) -> None:
    """Serve an expert's velocities, so that others can sample with it without having its weights.

    `atoll serve MODEL --remote NUMBER=URL` sends noisy latents, times and encoded prompts, one request per step, and
    receives dx/dt. The expert's owner can therefore see the prompts.

    For example:
      atoll serve-expert run/expert_2
      atoll serve-expert run/expert_2 --host 0.0.0.0 --keys keys.json --name experts.example.org

    Args:
        expert: The folder of a trained expert.
        port: Port to listen on; 0 picks a free one.
        host: Address to listen on; by default only this machine can connect.
        keys: A JSON file with the SHA-256 of API keys and their limits, counted in samples.
        name: Host names accepted in requests, besides IP addresses and localhost.
        samples: Maximum number of samples per request.
        device: auto, cpu, cuda or cuda:N.
        dtype: Precision of the expert: float32, bfloat16 or float16; by default as saved.
        conversion: calibrated, exact or paper; as for `atoll sample`.
    """
    from atoll.serving.owner import serve_velocities

    serve_velocities(
        expert, host, port, keys=keys, names=name, samples=samples, limits=Limits(), device=device, dtype=dtype,
        conversion=conversion,
    )  # fmt: skip
