"""Reading a published state dict: tensors by name, and nothing of it is run."""

from pathlib import Path

from torch import Tensor

from atoll.models.convert.reading import check_finite, read_file


def read_weights(path: Path) -> dict[str, Tensor]:
    """A file of safetensors, or of torch.save, with a table of finite tensors in it."""
    weights, _, _ = read_file(path)
    check_finite(weights, path)
    return weights
