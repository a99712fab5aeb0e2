"""Train one text-to-image diffusion model on computers that never talk to each other, and sample from it as one.

Names are imported lazily, so that `import atoll` and `atoll --help` are quick.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.object_store import model_finders

__version__ = "0.1.0"
__all__ = ["AtollPipeline", "DiT", "Ensemble", "Expert", "InputError", "Objective", "Router", "Transfer", "__version__"]

if TYPE_CHECKING:
    from atoll.diffusion.objective import Objective
    from atoll.diffusion.transfer import Transfer
    from atoll.errors import InputError
    from atoll.networks.dit import DiT
    from atoll.networks.expert import Expert
    from atoll.networks.router import Router
    from atoll.sampling.ensemble import Ensemble
    from atoll.sampling.pipeline import AtollPipeline

_HOMES = {
    "AtollPipeline": "sampling.pipeline", "DiT": "networks.dit", "Ensemble": "sampling.ensemble",
    "Expert": "networks.expert", "InputError": "errors", "Objective": "diffusion.objective",
    "Router": "networks.router", "Transfer": "diffusion.transfer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(f"atoll.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _find_in_federation(place: str | Path, revision: str | None) -> Path | None:
    from atoll.federation.registry import find_model

    return find_model(place, revision)


model_finders.append(_find_in_federation)  # so that a federation's URL is accepted wherever a model is
