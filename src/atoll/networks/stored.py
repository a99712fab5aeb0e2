"""Saves and loads a network as a folder: `config.json` describes it, `model.safetensors` holds the weights.

The interface is that of the Hugging Face hub's mixin, built on the hub's own functions. The mixin itself is not used:
it ignores unknown keys, falls back to pickles and removes the old config before the new weights are written. Nothing
in a folder is executed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import nn

from atoll.cards import CONFIG, FORMAT, NETWORK, file_digest, is_plain
from atoll.config import build
from atoll.errors import InputError, printable, shown
from atoll.storage import digest_of, known_digest, read_json, reason_of, write_json, write_whole
from atoll.tensors import DTYPES as TYPES
from atoll.tensors import TensorFile, check_finite

WEIGHTS = "model.safetensors"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ADVICE = f"a model is a folder with {CONFIG} and {WEIGHTS}, copy it again from its source"


class Stored(nn.Module):
    """A network with `save_pretrained`, `from_pretrained` and `push_to_hub`; subclasses name their config.

    `card` is the content of config.json besides the architecture, under keys defined by the class. config.json also has
    the SHA-256 of the files beside it, so that neither a flipped bit nor another network's weights go unnoticed.
    """

    config_class: ClassVar[type]
    card_keys: ClassVar[frozenset[str]] = frozenset()
    config: Any
    card: Mapping[str, Any] = MappingProxyType({})

    def save_pretrained(self, folder: str | Path, beside: Sequence[str] = ()) -> None:
        """Writes the folder. Each file is replaced atomically, and a full disk leaves the old ones intact.

        `beside` names existing files that belong to it.
        """
        folder = Path(folder)
        assert self.card.keys() <= self.card_keys
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        check_finite(weights, "the network to save")
        write_whole(folder / WEIGHTS, lambda staged: save_file(weights, staged))
        about = {"format": FORMAT, "model": type(self).__name__, "architecture": asdict(self.config), **self.card}
        about["sha256"] = {name: digest_of(folder / name) for name in (WEIGHTS, *beside)}
        write_json(folder / CONFIG, about)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Loads from a folder or hub id, in evaluation mode; every key and value is checked."""
        path = folder_of(folder, revision)
        about = read_json(path / CONFIG, ADVICE)
        model = cls._from_config(about, path / CONFIG)
        model._load_weights(path / WEIGHTS)
        for name, expected in about.get("sha256", {}).items():
            if file_digest(path / name, path, known_digest) != expected:
                raise InputError(f"{path / name} is not the file that its {CONFIG} belongs to: copy both again")
        return model.to(dtype=dtype).eval()

    @classmethod
    def _from_config(cls, about: Mapping[str, Any], path: Path) -> Self:
        """Returns the network that a config describes, on the meta device."""
        if about.get("format") != FORMAT:
            raise InputError(
                f"{path} has format {shown(about.get('format'))}, and this version of atoll reads {FORMAT}"
            )
        if about.get("model") != cls.__name__:
            raise InputError(
                f"{path} describes a {shown(about.get('model'))}, not a {cls.__name__}: give the right folder"
            )
        for key in sorted(about.keys() - cls.card_keys - set(NETWORK)):
            raise InputError(f"{path} has the unknown key {shown(key)}: a newer atoll may have written it")
        digests = about.get("sha256", {})
        if not isinstance(digests, dict) or not all(map(is_plain, digests)):
            raise InputError(f"{path} is damaged, its 'sha256' is {shown(digests)}: {ADVICE}")
        config: Any = build(cls.config_class, about.get("architecture"), f"the architecture in {path}")
        try:
            with torch.device("meta"):
                model = cls(config)
        except (RuntimeError, OverflowError, MemoryError) as error:  # more elements than torch can count
            raise InputError(f"the architecture in {path} is larger than any machine: copy it again") from error
        model.card = {key: about[key] for key in about if key in cls.card_keys}
        return model

    def _load_weights(self, path: Path) -> None:
        """Loads weights that match the network exactly: the same keys and shapes, and finite values.

        torch compares names and shapes with the header, so that no data is read before they are known to match.
        """
        own = {name: tensor.dtype for name, tensor in self.state_dict().items()}
        with TensorFile(path, ADVICE) as file:
            header = {
                name: torch.empty(entry.shape, dtype=TYPES[entry.dtype], device="meta")
                for name, entry in file.entries.items()
            }
            try:
                self.load_state_dict(header, assign=True)
            except RuntimeError as error:
                reason = printable(reason_of(error), 300)
                raise InputError(f"the weights in {path} are not those of its {CONFIG} ({reason}): {ADVICE}") from error
            kinds = {tensor.dtype for name, tensor in header.items() if own[name].is_floating_point}
            counts = all(own[name] == tensor.dtype or own[name].is_floating_point for name, tensor in header.items())
            if len(kinds) > 1 or not kinds <= set(DTYPES) or not counts:
                names = ", ".join(sorted(map(str, kinds)))
                raise InputError(f"the weights in {path} are of types {names}: they must all be of one kind of float")
            weights = file.read()
        check_finite(weights, path)
        self.load_state_dict(weights, assign=True)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Uploads to the Hugging Face hub; returns the URL."""
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), (CONFIG, WEIGHTS), repo_id, private, token)


def folder_of(folder: str | Path, revision: str | None = None, files: Sequence[str] = (CONFIG, WEIGHTS)) -> Path:
    """Returns a local folder: the given one, or for a hub id the folder of downloaded files."""
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists() or isinstance(folder, Path) or str(folder).count("/") != 1 or str(folder)[0] in "./~":
        raise InputError(f"{folder} is not a folder: give one that is there, or a hub id")
    try:
        return Path(snapshot_download(str(folder), revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = reason_of(error)
        raise InputError(f"there is no folder {folder}, and the hub did not give it either ({reason})") from error


def push_folder(
    folder: Path, files: Sequence[str], repo_id: str, private: bool | None = None, token: str | None = None
) -> str:
    """Uploads only these files of a folder to the Hugging Face hub; returns the URL."""
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(f"the hub did not take {repo_id} ({reason_of(error)})") from error
