"""Published checkpoints as data: tensors by name, whatever file or folder they come in. Nothing in them is executed."""

import argparse
import hashlib
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atoll.errors import InputError
from atoll.files import read_json, reason_of
from atoll.models.store import CONFIG

WRAPPERS = ("ema", "state_dict_ema", "model_ema", "state_dict", "model", "module")  # the averaged weights first
PREFIXES = ("module.", "_orig_mod.")  # of torch's DistributedDataParallel and torch.compile
NAMES = ("diffusion_pytorch_model", "pytorch_model", "model")
AGAIN = "download it again"


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint as it was found."""

    path: Path  # the file, or the folder of several
    weights: Mapping[str, Tensor]
    sha256: str
    config: Mapping[str, Any] = field(default_factory=dict)  # the folder's config.json
    args: Mapping[str, Any] = field(default_factory=dict)  # what its training command was given, where it says so
    wrapper: str | None = None  # under which key of the file the weights were

    def __post_init__(self) -> None:
        for name, tensor in self.weights.items():
            if not tensor.is_floating_point():
                raise InputError(f"{name} in {self.path} holds {tensor.dtype}, not weights: give another checkpoint")
        check_finite(self.weights, self.path)


def check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    for name, tensor in weights.items():
        known = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor  # float8 cannot tell
        if not bool(torch.isfinite(known).all()):
            raise InputError(
                f"{name} in {path} holds values that are not finite: its training diverged or the file is damaged, "
                "give another"
            )


def read_weights(path: Path) -> dict[str, Tensor]:
    """A file with a table of finite tensors in it, and nothing else."""
    weights, _, _ = read_file(path)
    check_finite(weights, path)
    return weights


def read_source(path: Path) -> Source:
    """A .pt, .pth or .safetensors file, or a folder as diffusers writes it."""
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise InputError(f"there is no {path}: give a checkpoint's file, or the folder of one")
    weights, args, wrapper = read_file(path)
    return Source(path, weights, _digest(path), args=args, wrapper=wrapper)


def _read_folder(folder: Path) -> Source:
    """The folder's config and weights; of a whole pipeline, those of its transformer."""
    if not (folder / CONFIG).exists() and (folder / "transformer" / CONFIG).exists():
        folder = folder / "transformer"
    config = read_json(folder / CONFIG, "give a folder with config.json and weights, or a checkpoint's file")
    for name in NAMES:
        index = folder / f"{name}.safetensors.index.json"
        if index.exists():
            return _read_shards(folder, index, config)
        for suffix in (".safetensors", ".bin"):
            if (folder / f"{name}{suffix}").exists():
                weights, args, wrapper = read_file(folder / f"{name}{suffix}")
                return Source(folder, weights, _digest(folder / f"{name}{suffix}"), config, args, wrapper)
    if (folder / "expert_0").is_dir():
        raise InputError(
            f"{folder} holds several parts: give one of them, such as {folder / 'expert_0'}, or --to model"
        )
    raise InputError(f"{folder} holds no weights: it should have {NAMES[0]}.safetensors beside its {CONFIG}")


def _read_shards(folder: Path, index: Path, config: Mapping[str, Any]) -> Source:
    table = read_json(index, AGAIN).get("weight_map")
    if not isinstance(table, Mapping):
        raise InputError(f"{index} has no table 'weight_map': {AGAIN}")
    weights: dict[str, Tensor] = {}
    hashes = []
    for name in sorted({str(name) for name in table.values()}):
        if "/" in name or "\\" in name:
            raise InputError(f"{index} names a file outside its folder, {name!r}: {AGAIN}")
        weights.update(_read_safetensors(folder / name))
        hashes.append(_digest(folder / name))
    return Source(folder, _unprefixed(weights), hashlib.sha256("".join(hashes).encode()).hexdigest(), config)


def read_file(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any], str | None]:
    """Its weights, the arguments of its training where it has them, and the key that the weights were under."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}: give the file of the weights") from error
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({reason_of(error)}): give a file that is there and may be read"
        ) from error
    if start[:4] == b"PK\3\4" or start[:1] == b"\x80":
        return _unwrapped(_unpickled(path), path)
    if len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < path.stat().st_size + 2**27:
        return _unprefixed(_read_safetensors(path)), {}, None
    what = {b"<": "a web page", b"v": "a Git LFS pointer, the file itself was not fetched"}.get(start[:1])
    what = what or ("empty" if not start else "neither a torch checkpoint nor a safetensors file")
    raise InputError(f"{path} is {what}: {AGAIN}")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing, though the index beside it names it: {AGAIN}") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is truncated or not a safetensors file ({reason_of(error)}): {AGAIN}") from error


def _unpickled(path: Path) -> Any:
    """What torch.load makes of the file with everything but tensors and plain values refused."""
    try:
        refused = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - {"argparse.Namespace"}
    except Exception:  # an old or a damaged file: it is read below, by the same rules, and said what is wrong
        refused = set()
    if refused:
        raise InputError(
            f"{path} is refused: it is a pickle with code in it ({', '.join(sorted(refused)[:3])}), which would run "
            "when it is opened; give a file that holds tensors alone"
        )
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong is said below
        for mapped in (True, False):  # files from before torch 1.6 cannot be mapped
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            except Exception as error:  # pickles fail in any way they like
                failure: Exception = error
                if "mmap" not in str(error):
                    break
    if type(failure).__name__ == "UnpicklingError" and "global" in str(failure).lower():
        raise InputError(
            f"{path} is refused: it is a pickle with code in it, which would run when it is opened; "
            "give a file that holds tensors alone"
        ) from failure
    reason = reason_of(failure).split(". ")[0]
    if "weights only" in reason.lower() or "weights_only" in reason:
        raise InputError(
            f"{path} holds a program or other objects, which are not read: give a file that holds tensors alone"
        ) from failure
    raise InputError(f"{path} is truncated or damaged ({reason}): {AGAIN}") from failure


def _unwrapped(content: Any, path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any], str | None]:
    """The weights in what a file held: themselves, or under a key beside an optimiser's state."""
    args: Any = {}
    wrapper = None
    if isinstance(content, Mapping):
        args = content.get("args", {})
        args = vars(args) if isinstance(args, argparse.Namespace) else args
        wrapper = next((name for name in WRAPPERS if isinstance(content.get(name), Mapping) and content[name]), None)
    found = content if wrapper is None else content[wrapper]
    if not isinstance(found, Mapping) or not found or not all(isinstance(key, str) for key in found):
        raise InputError(f"{path} holds no tensors by name: give a checkpoint with a state dict in it")
    other = next((key for key, value in found.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise InputError(f"{path} is no state dict, its {other!r} is not a tensor: give a checkpoint with one in it")
    return _unprefixed(found), args if isinstance(args, Mapping) else {}, wrapper


def _unprefixed(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = dict(found)
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
