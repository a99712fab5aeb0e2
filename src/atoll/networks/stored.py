"""A network as a folder: `config.json` says what it is, `model.safetensors` holds the weights. Nothing is executed.

This is the interface of the Hugging Face hub's mixin, on the hub's own functions. The mixin itself is not used:
it ignores unknown keys, falls back to pickles and removes the old config before the new weights are written.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.config import build
from atoll.errors import InputError, NotFiniteError, shown
from atoll.storage import digest_of, known_digest, make_readable, read_json, reason_of
from atoll.tensors import DTYPES as TYPES
from atoll.tensors import TensorFile

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Stored(nn.Module):
    """A network with `save_pretrained`, `from_pretrained` and `push_to_hub`; subclasses name their config.

    `card` is what its config.json says beside the architecture, under the keys that its class knows. It also holds the
    SHA-256 of the files beside it, so that neither a flipped bit nor the weights of another network go unnoticed.
    """

    config_class: ClassVar[type]
    card_keys: ClassVar[frozenset[str]] = frozenset()
    config: Any
    card: Mapping[str, Any] = MappingProxyType({})
    digests: Mapping[str, Any] = MappingProxyType({})  # of the files beside config.json, as it has them

    def save_pretrained(self, folder: str | Path, beside: Sequence[str] = ()) -> None:
        """Write the folder. Each file is replaced in one go, so a full disk leaves the old ones as they were.

        `beside` names files that are there already and belong to it.
        """
        folder = Path(folder)
        assert self.card.keys() <= self.card_keys
        about = {"format": FORMAT, "model": type(self).__name__, "architecture": asdict(self.config), **self.card}
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        for name, tensor in weights.items():
            if not bool(torch.isfinite(tensor).all()):
                raise InputError(
                    f"{name} holds values that are not finite: go back to weights from before, none are saved"
                )
        staged = {name: folder / f".{name}.{os.getpid()}.tmp" for name in (WEIGHTS, CONFIG)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, staged[WEIGHTS])
            make_readable(staged[WEIGHTS])
            about["sha256"] = {name: digest_of(staged.get(name, folder / name)) for name in (WEIGHTS, *beside)}
            staged[CONFIG].write_text(json.dumps(about, indent=2, allow_nan=False) + "\n")
            for name, path in staged.items():
                os.replace(path, folder / name)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"cannot write the model to {folder} ({error}): free the disk or choose another"
            ) from error
        finally:
            for path in staged.values():
                with suppress(OSError):
                    path.unlink()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Load from a folder or a hub id, in evaluation mode; every key and every value is checked."""
        path = folder_of(folder, revision)
        model = cls._from_config(path / CONFIG)
        model.load_state_dict(_read_weights(path / WEIGHTS, model), assign=True)
        for name in model.digests:
            check_digest(path / name, model.digests[name])
        return model.to(dtype=dtype).eval()

    @classmethod
    def _from_config(cls, path: Path) -> Self:
        """The network that a config describes, without memory for its weights."""
        about = read_json(path, f"a model is a folder with {CONFIG} and {WEIGHTS}, copy it again from its source")
        if about.get("format") != FORMAT:
            raise InputError(
                f"{path} has format {shown(about.get('format'))}, and this version of atoll reads {FORMAT}"
            )
        if about.get("model") != cls.__name__:
            raise InputError(
                f"{path} describes a {shown(about.get('model'))}, not a {cls.__name__}: give the right folder"
            )
        unexpected = sorted(set(about) - {"format", "model", "architecture", "sha256"} - cls.card_keys)
        if unexpected:
            raise InputError(f"{path} has the unknown key {shown(unexpected[0])}: a newer atoll may have written it")
        config: Any = build(cls.config_class, about.get("architecture"), f"the architecture in {path}")
        try:
            with torch.device("meta"):
                model = cls(config)
        except (RuntimeError, OverflowError, MemoryError) as error:  # more numbers than torch can count
            raise InputError(f"the architecture in {path} is larger than any machine: copy it again") from error
        model.digests = _digests_in(about.get("sha256", {}), path)
        model.card = {key: about[key] for key in about if key in cls.card_keys}
        return model

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload to the Hugging Face hub; returns where it can be seen."""
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), (CONFIG, WEIGHTS), repo_id, private, token)


def check_digest(path: Path, expected: object) -> None:
    """Refuse a file that is not the one that was saved with its config.json."""
    try:
        found = known_digest(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({reason_of(error)}): copy the folder again from its source"
        ) from error
    if found != expected:
        raise InputError(f"{path} is not the file that its {CONFIG} belongs to: copy both again from its source")


def _digests_in(table: object, path: Path) -> dict[str, Any]:
    if not isinstance(table, dict) or not all(name == Path(name).name for name in table):
        raise InputError(f"{path} is damaged, its 'sha256' is {shown(table)}: copy the folder again from its source")
    return table


def folder_of(folder: str | Path, revision: str | None = None, files: Sequence[str] = (CONFIG, WEIGHTS)) -> Path:
    """The folder itself, or where the hub's files are kept on this machine."""
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists() or isinstance(folder, Path) or str(folder).count("/") != 1 or str(folder)[0] in "./~":
        raise InputError(f"{folder} is not a folder: give the folder that holds {CONFIG} and {WEIGHTS}, or a hub id")
    try:
        return Path(snapshot_download(str(folder), revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = reason_of(error)
        raise InputError(f"there is no folder {folder}, and the hub did not give it either ({reason})") from error


def push_folder(
    folder: Path, files: Sequence[str], repo_id: str, private: bool | None = None, token: str | None = None
) -> str:
    """Upload these files of a folder to the Hugging Face hub, and no others; returns where they can be seen."""
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(f"the hub did not take {repo_id} ({reason_of(error)})") from error


def _read_weights(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights, if they are exactly the model's: no key more or less, every shape right, every value finite.

    Names, shapes and types are those of the header: nothing is read before they are found to be right.
    """
    expected = model.state_dict()
    with TensorFile(path, f"a model is a folder with {CONFIG} and {WEIGHTS}, copy it again from its source") as file:
        for name in sorted(expected.keys() ^ file.entries.keys()):
            fault = "lacks" if name in expected else "has the unknown tensor"
            raise InputError(
                f"{path} {fault} {shown(name)}: its weights belong to another architecture than its {CONFIG}"
            )
        kinds: set[str] = set()
        for name, entry in file.entries.items():
            wanted, dtype = expected[name], TYPES[entry.dtype]
            if entry.shape != wanted.shape:
                raise InputError(
                    f"{name} in {path} has shape {list(entry.shape)}, but its {CONFIG} makes it {list(wanted.shape)}"
                )
            counts = not wanted.is_floating_point()
            if dtype != wanted.dtype if counts else dtype not in DTYPES:
                raise InputError(f"{name} in {path} has dtype {dtype}, which no weights have: copy the file again")
            kinds |= set() if counts else {str(dtype)}
        if len(kinds) > 1:
            raise InputError(f"the weights in {path} are of types {', '.join(sorted(kinds))}: they must all be of one")
        weights = file.read()
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NotFiniteError(
                f"{name} in {path} holds values that are not finite: the file is damaged or training diverged"
            )
    return weights
