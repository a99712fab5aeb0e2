"""What codecs, text encoders and features have in common: fingerprints, and published models by hub id or folder."""

import hashlib
import importlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor, nn

from atoll.errors import InputError, printable, shown
from atoll.networks.published import shard_names
from atoll.storage import make_readable, open_regular, read_json, reason_of, resolved
from atoll.tensors import Entry, TensorFile, check_memory, read_header

SAVED = "give a folder in which it was saved, or copy it again"
AGAIN = "copy it again from its source"
WEIGHTS = ("diffusion_pytorch_model", "model")  # of diffusers and of transformers
MAX_NUMBER = 2**24  # in a config: vocabularies have a quarter of a million words, and nothing is larger
MAX_LAYERS, MAX_STAGES = 256, 16  # of equal layers, and of stages that differ
SPARE = 2**20  # numbers that a network may have beside those of its file: weights that are tied, positions


class Frozen(nn.Module):
    """A network that is never trained. It describes itself for `dataset.json`, by which a data set knows its own."""

    spec: str

    @property
    def dtype(self) -> torch.dtype:
        return next((weight.dtype for weight in self.parameters()), torch.float32)

    def sizes(self) -> dict[str, Any]:
        """Returns what `dataset.json` says of it beside its spec, dtype and fingerprint."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns all that alters its output and does not show in its weights."""
        raise NotImplementedError

    def weights(self) -> Mapping[str, Tensor]:
        return self.state_dict()

    def describe(self) -> dict[str, Any]:
        about = {"spec": self.spec, "dtype": dtype_name(self.dtype), **self.sizes()}
        return {**about, "fingerprint": self.fingerprint}

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.weights(), self.settings())


def check_same(stored: Mapping[str, Any], current: Mapping[str, Any], what: str) -> None:
    """Refuse a codec, text encoder or features (`what`) that is not the one a data set was prepared with.

    The fingerprint and the dtype decide: the same weights in another folder are the same thing.
    """
    if all(stored.get(key) == current.get(key) for key in ("fingerprint", "dtype")):
        return
    differ = [key for key in ("spec", "dtype", "fingerprint") if stored.get(key) != current.get(key)]
    listed = ", ".join(f"{key} {_short(stored.get(key))} instead of {_short(current.get(key))}" for key in differ)
    theirs, ours = stored.get("spec"), current.get("spec")
    use = f"use {shown(theirs)}" if theirs != ours else f"use the {what} that was saved with them"
    raise InputError(
        f"the data were prepared with another {what} ({listed}): prepare the data again with {shown(ours)}, or {use}"
    )


def _short(value: object) -> str:
    digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return f"{str(value)[:12]}..." if digest else shown(value)


def fingerprint(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """SHA-256 of every tensor, its name, dtype and shape, and of the settings that alter outputs."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"\n{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def one_by_one(compute: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """The batch as a whole on a GPU; on a CPU each alone, so that none depends on the batch it came in.

    That costs nothing there: EfficientNet is twice as fast on one image at a time as on 32, which leave the cache.
    """
    if batch.device.type != "cpu":
        return compute(batch)
    return torch.cat([compute(one) for one in batch.split(1)])


def two_numbers(spec: str, example: str) -> tuple[int, int] | None:
    """The numbers of a spec like `pca:8x40`, None where there are none."""
    numbers = re.fullmatch(r"\w+(?::(\d{1,6})x(\d{1,6}))?", spec)
    if not numbers:
        raise InputError(f"cannot read {spec!r}: write it like {example}")
    return (int(numbers[1]), int(numbers[2])) if numbers[1] else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def public_spec(spec: str) -> str:
    """A spec without the path of a folder or file on this machine: `vae:sd-vae` for `vae:/home/me/sd-vae`."""
    kind, _, where = spec.partition(":")
    return f"{kind}:{resolved(where).name}" if where and Path(where).exists() else spec


class Place(NamedTuple):
    """Where a published model lies."""

    path: str  # a folder or a hub id
    subfolder: str  # within a hub id
    config: dict[str, Any]


def locate(where: str, subfolders: Sequence[str]) -> Place:
    """The first of the subfolders of a folder or a hub id that has a config.json."""
    if Path(where).is_dir():
        for path in (Path(where) / subfolder for subfolder in subfolders):
            if (path / "config.json").exists():
                return Place(str(path), "", read_json(path / "config.json", SAVED, Path(where)))
        raise InputError(f"{where} has no config.json: give the folder of a model, or a hub id")
    if Path(where).exists():
        raise InputError(f"{where} is a file: give the folder of a model, with config.json beside its weights")
    for subfolder in subfolders:
        try:
            config = hf_hub_download(where, "config.json", subfolder=subfolder or None)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = printable(reason_of(error), 300)
        else:
            return Place(where, subfolder, read_json(Path(config), SAVED))
    raise InputError(f"there is no folder {where}, and the hub did not give it either ({reason})")


def load_model(cls: Any, place: Place, dtype: torch.dtype, spare: str = "") -> nn.Module:
    """A frozen diffusers or transformers model, if its weights are whole; keys that match `spare` may be left over."""
    check_config(place.config, place.path)
    try:
        folder = _local_folder(place)
        entries = _entries(folder)
        with _quiet():
            _check_fit(cls, place, folder, entries)
            model, info = cls.from_pretrained(str(folder), use_safetensors=True, output_loading_info=True)
            model = model.to(dtype).eval().requires_grad_(False)
        if hasattr(model, "register_to_config"):  # diffusers would write the path of this machine into every copy
            model.register_to_config(_name_or_path=public_spec(f"vae:{place.path}").removeprefix("vae:"))
    except InputError:
        raise
    except Exception as error:  # what a damaged config makes these libraries raise is anything
        raise InputError(
            f"{place.path} has no whole {cls.__name__} in safetensors ({printable(reason_of(error), 300)}): {AGAIN}"
        ) from error
    unknown_keys = [key for key in info["unexpected_keys"] if not (spare and re.match(spare, key))]
    for fault, keys in (("lacks", info["missing_keys"]), ("has the unknown tensor", unknown_keys)):
        for key in sorted(keys):
            raise InputError(
                f"{place.path} {fault} {printable(key, 100)}: its weights are not those of the {cls.__name__} it names"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        # They may be mapped: then a file that is cut short kills the process, and sums round by where a tensor lies.
        tensor.data = tensor.data.clone()
    for name, weight in model.state_dict().items():
        if not bool(weight.isfinite().all()):
            raise InputError(f"{name} in {place.path} holds values that are not finite: {AGAIN}")
    assert isinstance(model, nn.Module)
    return model


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuses numbers that no published model has, before a network of such sizes is built."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_config(value, where)
            continue
        numbers = value if isinstance(value, list) else [value]
        parts = "layers" in key or "block" in key
        most = MAX_LAYERS if parts and "channels" not in key else MAX_NUMBER
        sizes = [number for number in numbers if isinstance(number, int | float)]
        if any(abs(number) > most for number in sizes) or (parts and len(numbers) > MAX_STAGES):
            raise InputError(
                f"{printable(key, 60)} in the config of {where} is {shown(value)}, more than any known model has: "
                "give another"
            )


def _local_folder(place: Place) -> Path:
    """Returns the model's folder; of one on the hub, where its files are kept on this machine."""
    if Path(place.path).is_dir():
        return Path(place.path)

    def download(name: str) -> Path:
        return Path(hf_hub_download(place.path, name, subfolder=place.subfolder or None))

    folder = download("config.json").parent
    for name in WEIGHTS:
        try:
            download(f"{name}.safetensors")
        except (HfHubHTTPError, LocalEntryNotFoundError):
            try:
                index = download(f"{name}.safetensors.index.json")
            except (HfHubHTTPError, LocalEntryNotFoundError):
                continue
            for shard in shard_names(index):
                download(shard)
        return folder
    raise OSError("it has no file of weights")


def _entries(folder: Path) -> dict[str, Entry]:
    """Returns what the headers of the weights say, all of which the files can hold."""
    entries: dict[str, Entry] = {}
    for name in WEIGHTS:
        index = folder / f"{name}.safetensors.index.json"
        files = shard_names(index) if index.exists() else []
        files += [f"{name}.safetensors"] if (folder / f"{name}.safetensors").exists() else []
        for file in files:
            with open_regular(folder / file) as opened:
                entries |= read_header(opened)[0]
    if not entries:
        raise OSError("it has no file of weights")
    return entries


def _check_fit(cls: Any, place: Place, folder: Path, entries: Mapping[str, Entry]) -> None:
    """Refuses a config that asks for a larger network than there are weights for, before memory is taken for it."""
    with torch.device("meta"):
        if hasattr(cls, "from_config"):  # diffusers
            model = cls.from_config(place.config)
        else:
            model = cls(cls.config_class.from_pretrained(str(folder)))
    num_needed = sum(weight.numel() for weight in model.state_dict().values())
    num_stored = sum(math.prod(entry.shape) for entry in entries.values())
    if num_needed > 2 * num_stored + SPARE:
        raise InputError(
            f"the config of {place.path} asks for {num_needed:,} weights, and its files have {num_stored:,}: {AGAIN}"
        )
    check_memory(4 * num_needed, place.path)


def save_model(model: Any, folder: Path) -> None:
    """Write what has a `save_pretrained` as safetensors."""
    try:
        with _quiet():
            model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            make_readable(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {folder} ({reason_of(error)}): free the disk or choose another") from error


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype in which the folder's weights were saved."""
    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile(path, AGAIN) as file:
            kinds = {entry.dtype for entry in file.entries.values()}
        for kind in sorted(kinds & names.keys()):
            return names[kind]
    raise InputError(f"{folder} has no weights in safetensors: {AGAIN}")


def named(classes: Mapping[str, type], about: Mapping[str, Any], path: Path) -> Any:
    """The class that a config of ours names."""
    name = about.get("model")
    if not isinstance(name, str) or name not in classes:
        raise InputError(
            f"{path}/config.json describes a {shown(name)}, not one of {', '.join(classes)}: give the right folder"
        )
    return classes[name]


def require(module: str, extra: str) -> Any:
    """An optional library, or the sentence that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this needs {module}: pip install 'atoll[{extra}]'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and key tables of transformers and diffusers: what they warn of, we check."""
    bars = require("transformers", "hf").utils.logging
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    levels, bars_shown = [logger.level for logger in loggers], bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars_shown:
            bars.enable_progress_bar()
