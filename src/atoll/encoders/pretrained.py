"""The base of codecs, text encoders and features: fingerprints, and loading published models by hub id or folder."""

import hashlib
import importlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from atoll.cards import AGAIN, EncoderCard, FeaturesCard
from atoll.errors import InputError, printable, shown
from atoll.networks.published import shard_names
from atoll.networks.stored import Stored, folder_of
from atoll.storage import make_readable, open_regular, read_json, reason_of, resolved
from atoll.tensors import DTYPES, TensorFile, check_finite, check_memory, read_header

SAVED = "give a folder in which it was saved, or copy it again"
WEIGHTS = ("diffusion_pytorch_model", "model")  # file names in diffusers and in transformers
ENDS = (".safetensors", ".safetensors.index.json", "-*-of-*.safetensors")
MAX_NUMBER = 2**24  # in a config, where the largest are vocabularies of a quarter of a million words
MAX_LAYERS, MAX_STAGES = 256, 16  # equal layers, and differing stages
SPARE = 2**20  # parameters that a network may have beyond those in its file: tied weights, positions


class Frozen(nn.Module):
    """A network with frozen weights. A data set identifies it by its card in `dataset.json`."""

    spec: str
    card_class: ClassVar[type[EncoderCard]] = FeaturesCard
    place: ClassVar[str]  # its folder in a data set or a model, as in the published Paris model

    @property
    def dtype(self) -> torch.dtype:
        return next((weight.dtype for weight in self.parameters()), torch.float32)

    def sizes(self) -> dict[str, Any]:
        """Returns the card's fields besides spec, dtype and fingerprint."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns everything besides the weights that its output depends on."""
        raise NotImplementedError

    def weights(self) -> Mapping[str, Tensor]:
        return self.state_dict()

    def describe(self) -> Any:
        """Returns its card."""
        about = {"spec": self.spec, "dtype": dtype_name(self.dtype), **self.sizes()}
        return self.card_class(**about, fingerprint=self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.weights(), self.settings())

    def save(self, folder: str | Path) -> None:
        """Writes it to its own folder in `folder`; loading it from there is bit-exact."""
        assert isinstance(self, Stored)
        self.save_pretrained(Path(folder) / self.place)


class Foreign(Frozen):
    """A network from diffusers or transformers, saved in their format."""

    def __init__(self, model: nn.Module, spec: str) -> None:
        super().__init__()
        self.model: Any = model
        self.spec = public_spec(spec)

    def weights(self) -> Mapping[str, Tensor]:
        # transformers 5 dropped this prefix from the names of CLIP's text weights, and the fingerprint must not change
        return {name.removeprefix("text_model."): tensor for name, tensor in self.model.state_dict().items()}

    def save(self, folder: str | Path) -> None:
        save_model(self.model, Path(folder) / self.place)


def fingerprint(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """Returns the SHA-256 over every tensor with its name, dtype and shape, and over the settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"\n{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def one_by_one(compute: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Computes the whole batch at once on a GPU; on a CPU one sample at a time, so that no result depends on its batch.

    This costs nothing: on a CPU, EfficientNet is twice as fast per image on single images as on batches of 32, which
    do not fit into the cache.
    """
    if batch.device.type != "cpu":
        return compute(batch)
    return torch.cat([compute(one) for one in batch.split(1)])


def two_numbers(spec: str, example: str) -> tuple[int, int] | None:
    """Returns the two numbers of a spec like `pca:8x40`, or None for a spec without numbers."""
    numbers = re.fullmatch(r"\w+(?::(\d{1,6})x(\d{1,6}))?", spec)
    if not numbers:
        raise InputError(f"cannot read {spec!r}: write it like {example}")
    return (int(numbers[1]), int(numbers[2])) if numbers[1] else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def public_spec(spec: str) -> str:
    """Returns a spec without local directories: `vae:sd-vae` for `vae:/home/me/sd-vae`."""
    kind, _, where = spec.partition(":")
    return f"{kind}:{resolved(where).name}" if where and Path(where).exists() else spec


class Place(NamedTuple):
    """The location of a published model on this machine; for a hub id, in the hub's cache."""

    where: str  # as the user gave it
    root: Path
    folder: Path  # in the root, or the root itself
    config: dict[str, Any]


def locate(where: str, subfolders: Sequence[str], accepted: Sequence[str], beside: Sequence[str] = ()) -> Place:
    """Returns the first of the subfolders that has a config.json, if it is of an accepted kind.

    For a hub id, the files `beside` it are downloaded too.
    """
    names = ["config.json", *(name + end for name in WEIGHTS for end in ENDS)]
    files = [f"{subfolder}/{name}".lstrip("/") for subfolder in subfolders for name in names]
    root = folder_of(where, files=[*files, *beside])
    folder = next((root / name for name in subfolders if (root / name / "config.json").exists()), None)
    if folder is None:
        raise InputError(f"{where} has no config.json: give the folder of a model, or a hub id")
    config = read_json(folder / "config.json", SAVED, root)
    kind = config.get("_class_name", config.get("model_type"))
    if kind not in accepted:
        raise InputError(f"{where} holds a {shown(kind)}: give a model of the kind {' or '.join(accepted)}")
    return Place(where, root, folder, config)


def load_model(library: str, name: str, place: Place, dtype: torch.dtype, spare: str = "") -> nn.Module:
    """Loads a frozen model; missing weights are an error, and so are unused keys that do not match `spare`."""
    cls = getattr(require(library, "hf"), name)
    check_config(place.config, place.where)
    try:
        with _quiet():
            _check_fit(cls, place)
            model, info = cls.from_pretrained(str(place.folder), use_safetensors=True, output_loading_info=True)
            model = model.to(dtype).eval().requires_grad_(False)
        if hasattr(model, "register_to_config"):  # else diffusers would save a local path with every copy
            model.register_to_config(_name_or_path=public_spec(f"vae:{place.where}").removeprefix("vae:"))
    except InputError:
        raise
    except Exception as error:  # a damaged config can make these libraries raise anything
        raise InputError(
            f"{place.where} has no whole {name} in safetensors ({printable(reason_of(error), 300)}): {AGAIN}"
        ) from error
    unknown_keys = [key for key in info["unexpected_keys"] if not (spare and re.match(spare, key))]
    for fault, keys in (("lacks", info["missing_keys"]), ("has the unknown tensor", unknown_keys)):
        for key in sorted(keys):
            raise InputError(f"{place.where} {fault} {printable(key, 100)}: its weights are not those of a {name}")
    for tensor in (*model.parameters(), *model.buffers()):
        # Copies memory-mapped tensors: truncating a mapped file kills the process, and rounding depends on alignment.
        tensor.data = tensor.data.clone()
    check_finite(model.state_dict(), place.where)
    assert isinstance(model, nn.Module)
    return model


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raises InputError for sizes that no published model has, before a network of such sizes is built."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_config(value, where)
            continue
        numbers = value if isinstance(value, list) else [value]
        parts = "layers" in key or "block" in key
        most = MAX_LAYERS if parts and "channels" not in key else MAX_NUMBER
        large = any(isinstance(number, int | float) and abs(number) > most for number in numbers)
        if large or (parts and len(numbers) > MAX_STAGES):
            raise InputError(
                f"{printable(key, 60)} in the config of {where} is {shown(value)}, more than any known model has: "
                "give another"
            )


def _check_fit(cls: Any, place: Place) -> None:
    """Raises InputError, before allocating memory, if a config describes a larger network than its weights fill."""
    paths = [place.folder / f"{name}.safetensors" for name in WEIGHTS]
    files = [path for path in paths if path.exists()]
    indices = [path.with_name(f"{path.name}.index.json") for path in paths]
    files += [index.with_name(name) for index in indices if index.exists() for name in shard_names(index)]
    num_stored = 0
    for path in files:
        with open_regular(path) as file:
            num_stored += sum(math.prod(entry.shape) for entry in read_header(file)[0].values())
    if not files:
        raise OSError("it has no file of weights")
    with torch.device("meta"):
        if hasattr(cls, "from_config"):  # diffusers
            model = cls.from_config(place.config)
        else:
            model = cls(cls.config_class.from_pretrained(str(place.folder)))
    num_needed = sum(weight.numel() for weight in model.state_dict().values())
    if num_needed > 2 * num_stored + SPARE:
        raise InputError(
            f"the config of {place.where} asks for {num_needed:,} weights, and its files have {num_stored:,}: {AGAIN}"
        )
    check_memory(4 * num_needed, place.where)


def fill(model: nn.Module, weights: Mapping[str, Tensor], fault: str) -> nn.Module:
    """Returns the model with exactly these weights, frozen; `fault` begins the error message if they do not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{fault} ({printable(' '.join(str(error).split()), 160)}): {AGAIN}") from error
    return model.eval().requires_grad_(False)


def save_model(model: Any, folder: Path) -> None:
    """Saves a model that has `save_pretrained`, as safetensors."""
    try:
        with _quiet():
            model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            make_readable(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {folder} ({reason_of(error)}): free the disk or choose another") from error


def load_saved(folder: Path, ours: Sequence[type[Stored]], theirs: Callable[[torch.dtype], Frozen]) -> Any:
    """Loads the output of `save`: one of Atoll's classes, or a foreign network in the dtype of its weights."""
    about = read_json(folder / "config.json", SAVED, folder.parent)
    if not about.keys() & {"_class_name", "model_type"}:
        return named({cls.__name__: cls for cls in ours}, about, folder).from_pretrained(folder)
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile(path, AGAIN) as file:
            kinds = {entry.dtype for entry in file.entries.values() if DTYPES[entry.dtype].is_floating_point}
        if kinds:
            return theirs(DTYPES[min(kinds)])
    raise InputError(f"{folder} has no weights in safetensors: {AGAIN}")


def named(classes: Mapping[str, type], about: Mapping[str, Any], path: Path) -> Any:
    """Returns the class named in one of Atoll's configs."""
    name = about.get("model")
    if not isinstance(name, str) or name not in classes:
        raise InputError(
            f"{path}/config.json describes a {shown(name)}, not one of {', '.join(classes)}: give the right folder"
        )
    return classes[name]


def require(module: str, extra: str) -> Any:
    """Imports an optional library; if it is missing, the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this needs {module}: pip install 'atoll[{extra}]'") from error


def installed_files(package: str, extra: str, names: Sequence[str]) -> list[Path]:
    """Returns the paths of files in a PyPI package, from its metadata, without importing it."""
    with suppress(PackageNotFoundError):
        found = {file.name: Path(str(file.locate())) for file in files(package) or ()}
        if found.keys() >= set(names):
            return [found[name] for name in names]
    raise InputError(f"this needs the files of {package}: pip install 'atoll[{extra}]'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars and key reports of transformers and diffusers, since the caller checks the keys."""
    bars, level = require("transformers", "hf").utils.logging, logging.root.manager.disable
    bars_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        if bars_shown:
            bars.enable_progress_bar()
