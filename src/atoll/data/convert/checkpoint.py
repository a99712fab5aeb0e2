"""Reading a published state dict: tensors by name, and nothing of it is run."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atoll.errors import InputError
from atoll.files import reason_of


def read_weights(path: Path) -> dict[str, Tensor]:
    """A file of safetensors, or of torch.save, with a table of tensors in it."""
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}: give the file of the weights") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): copy it again from its source") from error
    except Exception as error:  # torch.load raises whatever a damaged file leads it to
        raise InputError(
            f"{path} is damaged, or holds more than tensors, which is not read: copy it again from its source"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{path} must hold a table of tensors by name, and nothing else: give the published file")
    for name, value in found.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"{name} in {path} holds values that are not finite: copy it again from its source")
    return dict(found)
