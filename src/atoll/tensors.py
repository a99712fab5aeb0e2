"""Reads untrusted safetensors files: the header is checked against the file before memory is allocated.

Tensors are copied rather than memory-mapped. A mapped tensor's alignment depends on the length of the header, and MKL's
rounding of small products depends on the alignment of the operands, so the same weights would give results that differ
in the last bits from those of weights never saved to disk; and truncating a mapped file kills the process.
"""

import math
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from atoll.errors import InputError, NotFiniteError, printable, shown
from atoll.storage import open_regular, parse_json, reason_of

MAX_HEADER = 100 << 20  # bytes, the format's own limit
MAX_DIMS = 16
WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"  # an environment variable
ALIGNMENT = 64  # bytes, as torch aligns its own tensors
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip


def tensors_of(content: bytes) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors message; raises ValueError if it is none that torch can hold."""
    try:
        return load(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:  # KeyError: a type torch lacks
        raise ValueError("it is not safetensors") from error


class Entry(NamedTuple):
    """A tensor as the header describes it; its bytes are file[start:end]."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An open safetensors file. Raises InputError, with a message that ends in `advice`, for invalid files."""

    def __init__(self, path: Path, advice: str, root: Path | None = None) -> None:
        self.path, self.advice = path, advice
        try:
            self._file = open_regular(path, root)
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing: {advice}") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read ({reason_of(error)}): {advice}") from error
        try:
            self.entries, self.metadata = read_header(self._file)
        except (OSError, ValueError) as error:
            self.close()
            raise self._damaged(error) from error
        check_memory(sum(entry.end - entry.start for entry in self.entries.values()), str(path))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Returns all tensors, or those named, in a single new allocation, each aligned to 64 bytes.

        The allocator returns a large block to the system as soon as it is freed, but keeps small ones.
        """
        entries = self.entries if names is None else {name: self.entries[name] for name in names}
        lengths = {name: entry.end - entry.start for name, entry in entries.items()}
        padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths.values()]
        pieces = torch.empty(sum(padded), dtype=torch.uint8).split(padded)
        memory = {name: piece[: lengths[name]] for name, piece in zip(entries, pieces, strict=True)}
        try:
            for name in sorted(entries, key=lambda name: entries[name].start):
                self._file.seek(entries[name].start)
                if self._file.readinto(memory[name].numpy()) < lengths[name]:
                    raise ValueError("it was cut short while it was read")
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return {name: memory[name].view(DTYPES[entry.dtype]).view(entry.shape) for name, entry in entries.items()}

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"{self.path} is truncated or not a safetensors file ({reason_of(error)}): {self.advice}")


def read_tensors(path: Path, advice: str, root: Path | None = None) -> dict[str, Tensor]:
    """Returns all tensors of a file."""
    with TensorFile(path, advice, root) as file:
        return file.read()


def read_header(file: BufferedReader) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the file's entries and metadata; raises ValueError unless they account for the file's bytes exactly."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise ValueError(f"{size} bytes are too few for its header")
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no table of strings")
    entries = {name: _entry(name, about, 8 + length, size) for name, about in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size} bytes, and its header describes {end}")
    return entries, metadata


def _entry(name: str, about: Any, start: int, size: int) -> Entry:
    try:
        dtype, shape, (first, last) = about["dtype"], about["shape"], about["data_offsets"]
        counts = [first, last, *shape]
        right = all(type(count) is int and count >= 0 for count in counts) and len(shape) <= MAX_DIMS
        if right and math.prod(shape) * DTYPES[dtype].itemsize == last - first and start + last <= size:
            return Entry(dtype, tuple(shape), start + first, start + last)
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"{shown(name)} cannot be {shown(about)} of {size} bytes")


def check_finite(weights: Mapping[str, Tensor], where: object) -> None:
    """Raises NotFiniteError for weights with NaN or infinity; `where` names the file or network."""
    for name, tensor in weights.items():
        values = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor  # not for float8
        if not bool(torch.isfinite(values).all()):
            fault = f"{printable(name, 100)} in {where} holds values that are not finite"
            raise NotFiniteError(f"{fault}: training diverged or the file is damaged, use other weights")


def check_memory(num_bytes: int, what: str) -> None:
    """Raises InputError, before allocation, if `what` cannot fit into this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory:
        raise InputError(
            f"{what} needs {num_bytes / 1e9:,.0f} GB of memory, and this machine has {memory / 1e9:,.0f}: "
            "use a larger machine, or check where it comes from"
        )


def get_device(name: torch.device | str) -> torch.device:
    """Returns the device for auto, cpu, cuda or cuda:N; raises InputError if it is not available."""
    with suppress(RuntimeError):  # not a device name
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        if (device.index or 0) < {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0):
            return device
    raise InputError(f"there is no device {str(name)!r} here: give auto, cpu, cuda or cuda:N")


def check_bf16(device: torch.device) -> None:
    """Raises InputError if computing in bf16 would crash the process."""
    if device.type == "cpu" and not runs_bf16():
        advice = f"use float32, or set {WITHOUT_AMX[0]}={WITHOUT_AMX[1]}"
        raise InputError(f"this machine announces AMX instructions, but crashes on them in bf16: {advice}")


@cache
def runs_bf16() -> bool:
    """Returns whether this CPU can multiply in bf16; some virtual machines announce AMX but crash on it."""
    try:
        announced = "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        announced = False
    if not announced or WITHOUT_AMX[0] in os.environ:
        return True
    code = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode >= 0


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device without waiting, from pinned memory, since the copy is synchronous otherwise."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
