"""What codecs, text encoders and features have in common: fingerprints, and published models by hub id or folder."""

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
WEIGHTS = ("diffusion_pytorch_model", "model")  # of diffusers and of transformers
ENDS = (".safetensors", ".safetensors.index.json", "-*-of-*.safetensors")
MAX_NUMBER = 2**24  # in a config: vocabularies have a quarter of a million words, and nothing is larger
MAX_LAYERS, MAX_STAGES = 256, 16  # of equal layers, and of stages that differ
SPARE = 2**20  # numbers that a network may have beside those of its file: weights that are tied, positions


class Frozen(nn.Module):
    """A network that is never trained. Its card is in `dataset.json`, by which a data set knows its own."""

    spec: str
    card_class: ClassVar[type[EncoderCard]] = FeaturesCard
    place: ClassVar[str]  # its folder in a data set or a model, as the published Paris model has it

    @property
    def dtype(self) -> torch.dtype:
        return next((weight.dtype for weight in self.parameters()), torch.float32)

    def sizes(self) -> dict[str, Any]:
        """Returns what its card says beside its spec, dtype and fingerprint."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns all that alters its output and does not show in its weights."""
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
        """Writes it to its place in `folder`, from where it is loaded bit for bit."""
        assert isinstance(self, Stored)
        self.save_pretrained(Path(folder) / self.place)


class Foreign(Frozen):
    """A network of diffusers or transformers, saved as these do."""

    def __init__(self, model: nn.Module, spec: str) -> None:
        super().__init__()
        self.model: Any = model
        self.spec = public_spec(spec)

    def weights(self) -> Mapping[str, Tensor]:
        # transformers 5 dropped a prefix from the names of CLIP's text side; the weights are the same
        return {name.removeprefix("text_model."): tensor for name, tensor in self.model.state_dict().items()}

    def save(self, folder: str | Path) -> None:
        save_model(self.model, Path(folder) / self.place)


def fingerprint(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of every tensor, its name, dtype and shape, and of the settings that alter outputs."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"\n{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def one_by_one(compute: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Computes the batch as a whole on a GPU; on a CPU each alone, so that none depends on the batch it came in.

    That costs nothing there: EfficientNet is twice as fast on one image at a time as on 32, which leave the cache.
    """
    if batch.device.type != "cpu":
        return compute(batch)
    return torch.cat([compute(one) for one in batch.split(1)])


def two_numbers(spec: str, example: str) -> tuple[int, int] | None:
    """Returns the numbers of a spec like `pca:8x40`, None where there are none."""
    numbers = re.fullmatch(r"\w+(?::(\d{1,6})x(\d{1,6}))?", spec)
    if not numbers:
        raise InputError(f"cannot read {spec!r}: write it like {example}")
    return (int(numbers[1]), int(numbers[2])) if numbers[1] else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def public_spec(spec: str) -> str:
    """Returns a spec without the path of this machine: `vae:sd-vae` for `vae:/home/me/sd-vae`."""
    kind, _, where = spec.partition(":")
    return f"{kind}:{resolved(where).name}" if where and Path(where).exists() else spec


class Place(NamedTuple):
    """Where a published model lies; one of the hub, where its files are kept on this machine."""

    where: str  # as the user gave it
    root: Path
    folder: Path  # in the root, or the root itself
    config: dict[str, Any]


def locate(where: str, subfolders: Sequence[str], accepted: Sequence[str], beside: Sequence[str] = ()) -> Place:
    """Returns the first of the subfolders that has a config.json, if it is of an accepted kind.

    Of a hub id, the files `beside` it are downloaded too.
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
    """Loads a frozen model whose weights are whole; keys that match `spare` may be left over."""
    cls = getattr(require(library, "hf"), name)
    check_config(place.config, place.where)
    try:
        with _quiet():
            _check_fit(cls, place)
            model, info = cls.from_pretrained(str(place.folder), use_safetensors=True, output_loading_info=True)
            model = model.to(dtype).eval().requires_grad_(False)
        if hasattr(model, "register_to_config"):  # diffusers would write the path of this machine into every copy
            model.register_to_config(_name_or_path=public_spec(f"vae:{place.where}").removeprefix("vae:"))
    except InputError:
        raise
    except Exception as error:  # what a damaged config makes these libraries raise is anything
        raise InputError(
            f"{place.where} has no whole {name} in safetensors ({printable(reason_of(error), 300)}): {AGAIN}"
        ) from error
    unknown_keys = [key for key in info["unexpected_keys"] if not (spare and re.match(spare, key))]
    for fault, keys in (("lacks", info["missing_keys"]), ("has the unknown tensor", unknown_keys)):
        for key in sorted(keys):
            raise InputError(f"{place.where} {fault} {printable(key, 100)}: its weights are not those of a {name}")
    for tensor in (*model.parameters(), *model.buffers()):
        # They may be mapped: then a file that is cut short kills the process, and sums round by where a tensor lies.
        tensor.data = tensor.data.clone()
    check_finite(model.state_dict(), place.where)
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
        large = any(isinstance(number, int | float) and abs(number) > most for number in numbers)
        if large or (parts and len(numbers) > MAX_STAGES):
            raise InputError(
                f"{printable(key, 60)} in the config of {where} is {shown(value)}, more than any known model has: "
                "give another"
            )


def _check_fit(cls: Any, place: Place) -> None:
    """Refuses a config that asks for a larger network than there are weights for, before memory is taken for it."""
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
    """Returns the model with exactly these weights, frozen; `fault` is what to say of others."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{fault} ({printable(' '.join(str(error).split()), 160)}): {AGAIN}") from error
    return model.eval().requires_grad_(False)


def save_model(model: Any, folder: Path) -> None:
    """Writes what has a `save_pretrained` as safetensors."""
    try:
        with _quiet():
            model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            make_readable(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {folder} ({reason_of(error)}): free the disk or choose another") from error


def load_saved(folder: Path, ours: Sequence[type[Stored]], theirs: Callable[[torch.dtype], Frozen]) -> Any:
    """Loads what a `save` wrote: one of our classes, or a foreign network in the dtype of its weights."""
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
    """Returns the class that a config of ours names."""
    name = about.get("model")
    if not isinstance(name, str) or name not in classes:
        raise InputError(
            f"{path}/config.json describes a {shown(name)}, not one of {', '.join(classes)}: give the right folder"
        )
    return classes[name]


def require(module: str, extra: str) -> Any:
    """Returns an optional library, or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this needs {module}: pip install 'atoll[{extra}]'") from error


def installed_files(package: str, extra: str, names: Sequence[str]) -> list[Path]:
    """Returns where files of a PyPI package are, from its list of files: it is not imported."""
    with suppress(PackageNotFoundError):
        found = {file.name: Path(str(file.locate())) for file in files(package) or ()}
        if found.keys() >= set(names):
            return [found[name] for name in names]
    raise InputError(f"this needs the files of {package}: pip install 'atoll[{extra}]'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Turns off the progress bars and key tables of transformers and diffusers: what they warn of, we check."""
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
