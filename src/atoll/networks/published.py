"""Reads published checkpoints of any file format as tensors by name, without executing anything in them.

A file cannot make us allocate more memory than it has bytes: its claimed sizes are checked before and after opening.
"""

import argparse
import hashlib
import os
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.cards import CONFIG, is_plain
from atoll.errors import InputError, printable, shown
from atoll.storage import digest_of, open_regular, read_json, real_path, reason_of
from atoll.tensors import MAX_DIMS, check_finite, check_memory, read_tensors

WRAPPERS = ("ema", "state_dict_ema", "model_ema", "state_dict", "model", "module")  # EMA weights first
PREFIXES = ("module.", "_orig_mod.")  # of torch's DistributedDataParallel and torch.compile
NAMES = ("diffusion_pytorch_model", "pytorch_model", "model")
MAX_PICKLE = 8 << 20  # bytes; DiT-XL/2 with EMA and optimiser state has half a million
AGAIN, ALONE = "download it again", "give a file that holds tensors alone"
OBJECTS = f"holds a program or other objects, which are not read: {ALONE}"
SHARED = 4  # weights may share memory, as tied ones do, but total at most this many times the size of the file
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of files from before torch 1.6


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint as read: finite weights, and the file's or folder's metadata."""

    path: Path  # a file or a folder
    weights: dict[str, Tensor]
    sha256: str
    args: Mapping[str, Any] = field(default_factory=dict)  # arguments of its training command, if recorded
    wrapper: str | None = None  # the file's key that held the weights
    config: Mapping[str, Any] = field(default_factory=dict)  # the folder's config.json


def read_weights(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, checked to be finite."""
    return _read_file(path).weights


def read_source(path: Path) -> Source:
    """Reads a .pt, .pth or .safetensors file, or a folder in diffusers' format."""
    source = _read_folder(path) if path.is_dir() else _read_file(path)
    for name, tensor in source.weights.items():
        if not tensor.is_floating_point():
            raise InputError(f"{printable(name, 100)} in {source.path} holds {tensor.dtype}, not weights: give another")
    return source


def _read_folder(root: Path) -> Source:
    """Reads config and weights; of a complete pipeline, those of its transformer. No link may lead out of `root`."""
    folder = root
    if not (folder / CONFIG).exists() and (folder / "transformer" / CONFIG).exists():
        folder = folder / "transformer"
    config = read_json(folder / CONFIG, "give a folder with config.json and weights, or a checkpoint's file", root)
    for name in NAMES:
        index = folder / f"{name}.safetensors.index.json"
        if index.exists():
            shards = [folder / shard for shard in shard_names(index, root)]
            weights = {name: tensor for shard in shards for name, tensor in read_tensors(shard, AGAIN, root).items()}
            digests = "".join(digest_of(shard, root) for shard in shards)
            sha256 = hashlib.sha256(digests.encode()).hexdigest()
            return Source(folder, _finite(weights, folder), sha256, config=config)
        for file in (folder / f"{name}.safetensors", folder / f"{name}.bin"):
            if file.exists():
                return replace(_read_file(file, root), path=folder, config=config)
    if (folder / "expert_0").is_dir():
        raise InputError(f"{folder} holds several parts: give one of them, such as its expert_0, or --to model")
    raise InputError(f"{folder} holds no weights: it should have {NAMES[0]}.safetensors beside its {CONFIG}")


def shard_names(index: Path, root: Path | None = None) -> list[str]:
    """Returns the shard files named by a model's index, all of them in its own folder."""
    table = read_json(index, AGAIN, root).get("weight_map")
    names: list[Any] = list(table.values()) if isinstance(table, Mapping) else [None]
    for name in names:
        if not is_plain(name) or not name.endswith(".safetensors"):
            raise InputError(f"{index} names a file outside its folder or of another kind, {shown(name)}: {AGAIN}")
    return sorted(set(names))


def _read_file(path: Path, root: Path | None = None) -> Source:
    try:
        with open_regular(path, root) as file:
            start, size = file.read(9), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): give a checkpoint's file or folder") from error
    # Check for safetensors first: their leading length may look like a pickle's first byte.
    if len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < size + 2**27:
        return Source(path, _finite(read_tensors(path, AGAIN, root), path), digest_of(path, root))
    if start[:4] == b"PK\3\4" or start[:1] == b"\x80":
        weights, args, wrapper = _unwrapped(_unpickled(path, root), path)
        _check_plain(weights, path, size)
        # Copied, since truncating a memory-mapped file kills the process that reads it.
        own = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
        return Source(path, _finite(own, path), digest_of(path, root), args, wrapper)
    what = {b"<": "a web page", b"v": "a Git LFS pointer, the file itself was not fetched", b"": "empty"}
    raise InputError(f"{path} is {what.get(start[:1], 'neither a torch checkpoint nor a safetensors file')}: {AGAIN}")


# --- pickles ------------------------------------------------------------------------------------------------------


def _unpickled(path: Path, root: Path | None) -> Any:
    """Returns the result of torch.load, restricted to tensors and plain values."""
    try:
        with open_regular(path, root) as file:
            zipped = file.read(4) == b"PK\3\4"
            content = (_zipped_pickle if zipped else _legacy_pickle)(file, path)
        if len(content) > MAX_PICKLE:
            raise InputError(f"{path} says more beside its tensors than {MAX_PICKLE >> 20} MB: {ALONE}")
        if b"\nbytearray\n" in content:  # the one function torch allows that can allocate any amount of memory
            raise InputError(f"{path} {OBJECTS}")
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(real_path(path, root), map_location="cpu", weights_only=True, mmap=zipped)
    except InputError:
        raise
    except Exception as error:  # pickle, zipfile and pickletools may raise anything on bad files
        message = str(error)
        if type(error).__name__ == "UnpicklingError" and "global" in message.lower():
            name = re.search(r"GLOBAL (\S+)", message)
            code = f" ({printable(name[1], 100)})" if name else ""
            what = f"is refused: it is a pickle with code in it{code}, which would run when it is opened; {ALONE}"
            raise InputError(f"{path} {what}") from error
        if "weights only" in message.lower() or "weights_only" in message:
            raise InputError(f"{path} {OBJECTS}") from error
        reason = printable(reason_of(error).split(". ")[0], 200)
        raise InputError(f"{path} is truncated or damaged ({reason}): {AGAIN}") from error


def _zipped_pickle(file: BufferedReader, path: Path) -> bytes:
    """Returns an archive's pickle; raises if it would unpack to more bytes than it has, unlike any written by torch."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise InputError(f"{path} {OBJECTS}")
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > size:
            raise InputError(f"{path} is packed, as torch never saves tensors: unpack it, or give another copy")
        (content,) = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        return archive.open(content).read(MAX_PICKLE + 1)


def _legacy_pickle(file: BufferedReader, path: Path) -> bytes:
    """Returns the pickles of a file from before torch 1.6, reading just enough to detect one that is too long."""
    file.seek(0)
    content = BytesIO(file.read(MAX_PICKLE + 1))
    if content.read(len(LEGACY)) != LEGACY:
        raise InputError(f"{path} {OBJECTS}")
    for _ in range(4):  # version, system info, objects and storage keys; the storages follow
        for _ in pickletools.genops(content):
            pass
    return content.getvalue()[: content.tell()]


def _unwrapped(content: Any, path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any], str | None]:
    """Finds the weights in a file's content: at the top level, or under a key such as "ema"."""
    content = content if isinstance(content, Mapping) else {}
    args = content.get("args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    wrapper = next((name for name in WRAPPERS if isinstance(content.get(name), Mapping) and content[name]), None)
    weights = content if wrapper is None else content[wrapper]
    if not weights or not all(isinstance(key, str) for key in weights):
        raise InputError(f"{path} holds no tensors by name: give a checkpoint with a state dict in it")
    return dict(weights), args if isinstance(args, Mapping) else {}, wrapper


def _check_plain(weights: Mapping[str, Any], path: Path, size: int) -> None:
    """Raises for non-plain tensors, and for those that claim more memory than the file has bytes, say by strides of 0.

    Bytes are counted by shape, since this is the size of a copy.
    """
    total = 0
    for name, tensor in weights.items():
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
        if not plain or tensor.device.type != "cpu" or tensor.is_quantized or tensor.dim() > MAX_DIMS:
            raise InputError(f"{printable(name, 100)} in {path} is no plain dense tensor: {ALONE}")
        num_bytes = tensor.numel() * tensor.itemsize
        total += num_bytes
        if num_bytes > tensor.untyped_storage().nbytes() or total > SHARED * size:
            raise InputError(f"{printable(name, 100)} in {path} claims more numbers than the file has: {AGAIN}")
    check_memory(total, str(path))


def _finite(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns the weights without the prefixes of torch's wrappers; raises unless all are finite."""
    check_finite(weights, path)
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights
