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
    """Let others sample with an expert without giving them its weights: it answers with velocities.

    Who runs `atoll serve MODEL --remote NUMBER=URL` sends noisy latents, times and encoded prompts, one request per
    step, and gets dx/dt. So the owner of an expert sees what prompts it is asked about.

    For example:
      atoll serve-expert run/expert_2
      atoll serve-expert run/expert_2 --host 0.0.0.0 --keys keys.json --name experts.example.org

    Args:
        expert: The folder of a trained expert.
        port: Where to listen; 0 takes any that is free.
        host: The address to listen on; by default only this machine can ask.
        keys: A JSON file with the SHA-256 of API keys and their limits, counted in samples.
        name: Host names by which the server may be called, beside addresses and localhost.
        samples: The most samples in one request.
        device: auto, cpu, cuda or cuda:N.
        dtype: What the expert computes in; by default as it was saved.
        conversion: calibrated, exact or paper; as for `atoll sample`.
    """
    from atoll.serving.owner import serve_velocities

    serve_velocities(
        expert, host, port, keys=keys, names=name, samples=samples, limits=Limits(), device=device, dtype=dtype,
        conversion=conversion,
    )  # fmt: skip
