"""What codecs, text encoders and features have in common: fingerprints, and published models by hub id or folder."""

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.files import read_json

SAVED = "give a folder in which it was saved, or copy it again"


def check_same(stored: Mapping[str, Any], current: Mapping[str, Any], what: str) -> None:
    """Refuse a codec, text encoder or features (`what`) that is not the one a data set was prepared with.

    The fingerprint and the dtype decide: the same weights in another folder are the same thing.
    """
    if all(stored.get(key) == current.get(key) for key in ("fingerprint", "dtype")):
        return
    differ = [key for key in ("spec", "dtype", "fingerprint") if stored.get(key) != current.get(key)]
    listed = ", ".join(f"{key} {_short(stored.get(key))} instead of {_short(current.get(key))}" for key in differ)
    theirs, ours = stored.get("spec"), current.get("spec")
    use = f"use {theirs!r}" if theirs != ours else f"use the {what} that was saved with them"
    raise InputError(
        f"the data were prepared with another {what} ({listed}): prepare the data again with {ours!r}, or {use}"
    )


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else repr(value)


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
    found = re.fullmatch(r"\w+(?::(\d{1,6})x(\d{1,6}))?", spec)
    if not found:
        raise InputError(f"cannot read {spec!r}: write it like {example}")
    return (int(found[1]), int(found[2])) if found[1] else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def public_spec(spec: str) -> str:
    """A spec without the path of a folder or file on this machine: `vae:sd-vae` for `vae:/home/me/sd-vae`."""
    kind, _, where = spec.partition(":")
    return f"{kind}:{Path(where).resolve().name}" if where and Path(where).exists() else spec


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
                return Place(str(path), "", read_json(path / "config.json", SAVED))
        raise InputError(f"{where} has no config.json: give the folder of a model, or a hub id")
    for subfolder in subfolders:
        try:
            found = hf_hub_download(where, "config.json", subfolder=subfolder or None)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
        else:
            return Place(where, subfolder, read_json(Path(found), SAVED))
    raise InputError(f"there is no folder {where}, and the hub did not give it either ({reason})")


def load_model(cls: Any, place: Place, dtype: torch.dtype, spare: str = "") -> nn.Module:
    """A frozen diffusers or transformers model, if its weights are whole; keys that match `spare` may be left over."""
    options = {"subfolder": place.subfolder} if place.subfolder else {}
    try:
        with _quiet():
            model, info = cls.from_pretrained(place.path, use_safetensors=True, output_loading_info=True, **options)
            model = model.to(dtype).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"{place.path} has no whole {cls.__name__} in safetensors ({reason}): copy it again from its source"
        ) from error
    unknown_keys = [key for key in info["unexpected_keys"] if not (spare and re.match(spare, key))]
    for fault, keys in (("lacks", info["missing_keys"]), ("has the unknown tensor", unknown_keys)):
        for key in sorted(keys):
            raise InputError(f"{place.path} {fault} {key}: its weights are not those of the {cls.__name__} it names")
    for name, weight in model.state_dict().items():
        if not bool(weight.isfinite().all()):
            raise InputError(f"{name} in {place.path} holds values that are not finite: copy it again from its source")
    assert isinstance(model, nn.Module)
    return model


def save_model(model: Any, folder: Path) -> None:
    """Write what has a `save_pretrained` as safetensors."""
    try:
        with _quiet():
            model.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {folder} ({error}): free the disk or choose another") from error


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype in which the folder's weights were saved."""
    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as weights:
                kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} is truncated or not a safetensors file ({error}): copy it again") from error
        for kind in sorted(kinds & names.keys()):
            return names[kind]
    raise InputError(f"{folder} has no weights in safetensors: copy it again from its source")


def named(classes: Mapping[str, type], about: Mapping[str, Any], path: Path) -> Any:
    """The class that a config of ours names."""
    name = str(about.get("model"))
    if name not in classes:
        raise InputError(
            f"{path}/config.json describes a {name!r}, not one of {', '.join(classes)}: give the right folder"
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
    levels, shown = [logger.level for logger in loggers], bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()
