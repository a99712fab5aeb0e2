"""Parts that were made apart as one model: a folder in the layout of the published Paris model.

MODEL/model_index.json           what is in it, and the SHA-256 of every file; the model's hash is that of all of it
MODEL/expert_0/, expert_1/ ...   config.json, model.safetensors, calibration.safetensors; conversion.json if it was
MODEL/router/                    config.json, model.safetensors; one expert needs none
MODEL/vae/, text_encoder/        and tokenizer/ where there is one
"""

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from atoll.config import build
from atoll.convert import REPORT
from atoll.diffusion.objective import OBJECTIVES, Objective
from atoll.encoders.codecs import FOLDER as CODEC
from atoll.encoders.codecs import load_codec
from atoll.encoders.pretrained import named
from atoll.encoders.text import FOLDER as TEXT
from atoll.encoders.text import TOKENIZER, load_text_encoder
from atoll.errors import InputError, shown
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import DiT
from atoll.networks.expert import CALIBRATION, Expert
from atoll.networks.router import Router
from atoll.networks.stored import CONFIG, WEIGHTS, folder_of
from atoll.storage import (
    alone,
    check_size,
    digest_of,
    known_digest,
    make_readable,
    open_regular,
    read_json,
    real_path,
    reason_of,
    resolved,
    write_json,
)
from atoll.tensors import TensorFile

INDEX, ROUTER = "model_index.json", "router"
FORMAT, CLASS = 1, "AtollPipeline"
KEPT = (CONFIG, WEIGHTS, CALIBRATION, REPORT)  # of an expert or a router; its training state stays where it is
SUFFIXES = (".json", ".safetensors", ".txt")  # of a codec, a text encoder and a tokenizer; never a pickle
MAX_COPIED = 64 << 20  # bytes of a file that is not weights
MAX_SIDE = 8192  # pixels of a picture
PATTERNS = (INDEX, *(f"*/*{suffix}" for suffix in SUFFIXES))
MADE = "give a folder that `atoll assemble` has made"
AGAIN = "copy it again from its source"
KINDS: dict[Any, str] = {
    Mapping: "a table of keys and values", list: "a list", str: "a text", int: "a whole number",
    int | None: "a whole number or null",
}  # fmt: skip


# --- the index ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelIndex:
    """What model_index.json says."""

    num_experts: int
    experts: tuple[Mapping[str, Any] | None, ...]  # folder, cluster, objective, license; None: it is missing
    router: Mapping[str, Any] | None  # folder, model, reads_text, temperature
    latent_space: Mapping[str, Any]  # as on the experts' cards
    text_encoder: Mapping[str, Any]
    license: str
    files: Mapping[str, str]  # SHA-256 of each, by its path in the folder

    def __post_init__(self) -> None:
        for name in ("latent_space", "text_encoder", "files"):
            value_of(vars(self), name, Mapping, INDEX)
        object.__setattr__(self, "experts", tuple(self.experts))
        for part in (*self.experts, self.router):
            if part is not None and not _is_plain(folder := value_of(part, "folder", str, f"a part in {INDEX}")):
                raise InputError(f"the folder of a part must be a plain name, but is {shown(folder)}")
        if self.num_experts < 1 or len(self.experts) != self.num_experts:
            raise InputError(f"num_experts is {shown(self.num_experts)}, but {len(self.experts)} experts are listed")
        for path in self.files:
            if len(Path(path).parts) != 2 or not all(map(_is_plain, Path(path).parts)):
                raise InputError(f"a file must be named as FOLDER/NAME, but one is {shown(path)}")
            value_of(self.files, path, str, f"the list of files in {INDEX}")
        for k, part in enumerate(self.experts):
            if part is not None:
                about = f"{shown(part['folder'])} in {INDEX}"
                cluster = value_of(part, "cluster", int | None, about)
                if self.router is not None and cluster not in (k, None if self.num_experts == 1 else k):
                    raise InputError(
                        f"{INDEX} has the expert of cluster {cluster} in the place of {k}, so the router would mistake "
                        "them: assemble the model again"
                    )
                value_of(value_of(part, "objective", Mapping, about), "name", str, about)
        folders = [part["folder"] for part in (*self.experts, self.router) if part is not None]
        for name, count in Counter(folders).items():
            if count > 1:
                raise InputError(f"{INDEX} names {shown(name)} for {count} parts: assemble the model again")
        value_of(self.latent_space, "codec", Mapping, f"latent_space in {INDEX}")
        _, size, _ = shape_of(self.latent_space, f"latent_space in {INDEX}")
        factor = self.latent_space["codec"].get("factor", 1)
        if type(factor) not in (int, float) or not 0 < factor * size <= MAX_SIDE:
            raise InputError(
                f"the latents in {INDEX} are {shown(size)} wide and the codec's factor is {shown(factor)}, but images "
                f"have at most {MAX_SIDE} pixels a side: {AGAIN}"
            )

    @property
    def hash(self) -> str:
        """Of the whole model: two models with the same hash have the same files, in the same places."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def objectives(self) -> tuple[str | None, ...]:
        """Each expert's by name; None where one is missing."""
        return tuple(None if part is None else str(part["objective"]["name"]) for part in self.experts)

    def write(self, folder: Path) -> None:
        values = {"_class_name": CLASS, "format": FORMAT, **asdict(self), "hash": self.hash}
        write_json(folder / INDEX, values)

    @classmethod
    def read(cls, folder: Path) -> "ModelIndex":
        path = folder / INDEX
        if not path.exists() and (folder / CONFIG).exists():
            raise InputError(f"{folder} is a part, not a model: run `atoll assemble {folder} --data DATA --out MODEL`")
        values = read_json(path, MADE, folder)
        if values.pop("_class_name", None) != CLASS:
            raise InputError(f"{path} does not describe an {CLASS}: {MADE}")
        if (found := values.pop("format", None)) != FORMAT:
            raise InputError(f"{path} has format {shown(found)}, and this version of atoll reads {FORMAT}")
        promised = values.pop("hash", None)
        value_of(values, "experts", list, str(path))
        index = build(cls, values, str(path))
        if index.hash != promised:
            raise InputError(f"{path} was altered, its hash is not that of what it says: assemble the model again")
        return index

    def check_card(self, folder: Path, part: str) -> None:
        """Refuse a part whose config.json is not the one that was assembled, before any of its weights are read."""
        if _digest(folder / part / CONFIG, folder) != self.files.get(f"{part}/{CONFIG}"):
            raise InputError(f"{folder / part} is not the one the model was assembled with: assemble the model again")

    def check_files(self, folder: Path, *parts: str) -> None:
        """Refuse a part of which any file is not the one that was assembled; each is hashed once and remembered."""
        for name, expected in self.files.items():
            if name.partition("/")[0] not in parts:
                continue
            if name.endswith(".safetensors"):  # one that claims more than there is memory for is not hashed
                TensorFile(folder / name, AGAIN, folder).close()
            if _digest(folder / name, folder, known_digest) != expected:
                raise InputError(f"{folder / name} is not the file that the model was made of: {AGAIN}")

    def verify(self, folder: str | Path) -> None:
        """Read every file, and name the first that is not what it was; parts that are missing altogether may be."""
        folder = Path(folder)
        for name, expected in self.files.items():
            path = folder / name
            if path.parent.is_dir() and (not path.is_file() or _digest(path, folder) != expected):
                raise InputError(f"{path} is not the file that the model was made of: {AGAIN}")


def find_model(folder: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or where the hub's files are kept on this machine."""
    if not isinstance(folder, str | Path):
        raise InputError(f"a model is a folder or a hub id, not {shown(folder)}: {MADE}")
    if Path(folder).is_dir():
        return Path(folder)
    if isinstance(folder, Path) or str(folder).count("/") != 1 or str(folder)[0] in "./~" or Path(folder).exists():
        raise InputError(f"{folder} is not a folder: {MADE}, or a hub id")
    return folder_of(folder, revision, PATTERNS)


def check_part(
    path: Path,
    card: Mapping[str, Any],
    latent_space: Mapping[str, Any],
    text_encoder: Mapping[str, Any],
    model: str | Path,
) -> None:
    """Refuse an expert or a router that was made for other latents or other texts than those of `model`."""
    about = str(path / CONFIG)
    space = value_of(card, "latent_space", Mapping, about)
    check_frozen(path, value_of(space, "codec", Mapping, about), latent_space["codec"], "codec", model)
    if (shape := shape_of(space, about)) != list(latent_space["shape"]):
        raise InputError(
            f"{path} does not fit: it takes latents {shape}, not {latent_space['shape']} as the others, "
            "so give parts that were made from one data set"
        )
    if card.get("text_encoder") is not None:  # a router may be blind to the text
        check_frozen(path, value_of(card, "text_encoder", Mapping, about), text_encoder, "text encoder", model)


def check_frozen(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str, model: str | Path) -> None:
    """Refuse a part whose codec or text encoder is not that of `model`."""
    if any(theirs.get(key) != ours.get(key) for key in ("fingerprint", "dtype")):
        one, other = (
            f"{shown(about.get('spec'))[1:-1]}, {str(about.get('fingerprint'))[:8]}" for about in (theirs, ours)
        )
        raise InputError(
            f"{path} does not fit: its {what} ({one}) is not that of {model} ({other}), "
            "so give parts that were made from one data set"
        )


def value_of(table: object, key: str, kind: Any, where: str) -> Any:
    """A value of a table that anyone may have written, if it is of this kind."""
    if not isinstance(table, Mapping):
        raise InputError(f"{where} is damaged, there is {shown(table)} in place of a table with {key!r}: {AGAIN}")
    if key not in table:
        raise InputError(f"{where} is damaged, it lacks {key!r}: {AGAIN}")
    value = table[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{where} is damaged, its {key!r} must be {KINDS[kind]}, but is {shown(value)}: {AGAIN}")
    return value


def shape_of(space: Mapping[str, Any], where: str) -> list[int]:
    """[C, S, S] of a latent space."""
    shape: list[int] = value_of(space, "shape", list, where)
    if len(shape) != 3 or any(type(size) is not int or size < 1 for size in shape):
        raise InputError(f"{where} is damaged, its 'shape' must be three whole numbers, but is {shown(shape)}: {AGAIN}")
    return shape


def cluster_of(card: Mapping[str, Any], where: str) -> int | None:
    """Of an expert; None: it was trained on all of the data."""
    data = {} if card.get("data") is None else value_of(card, "data", Mapping, where)
    cluster: int | None = value_of({"cluster": None, **data}, "cluster", int | None, where)
    return cluster


def _is_plain(name: object) -> bool:
    """Whether a name from a file that anyone may have written stays within its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _digest(path: Path, root: Path, digest: Callable[[Path, Path], str] = digest_of) -> str:
    try:
        if path.suffix != ".safetensors":
            check_size(path, MAX_COPIED, root)
        return digest(path, root)
    except OSError as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): {AGAIN}") from error


# --- putting one together -----------------------------------------------------------------------------------------


def assemble(
    experts: Sequence[str | Path],
    router: str | Path | None,
    out: str | Path,
    data: str | Path | None = None,
    *,
    allow_missing: bool = False,
    without_router: bool = False,
) -> ModelIndex:
    """Check that the parts fit, and make a model folder of them.

    A folder with expert_* in it stands for these, and for the router in it; `data` has the codec and the text encoder.
    Without a router several experts stay in the order given, for routing that asks none.
    """
    check_free(resolved(out))  # before the work, not after it
    given = [Path(folder) for folder in experts]
    folders = [expert for folder in given for expert in _experts_in(folder, allow_missing)]
    if not folders:
        raise InputError("there are no experts: give their folders, or one that `atoll train-all` has made")
    source = _find_data(given, data)
    latents, texts = load_codec(source).describe(), load_text_encoder(source).describe()
    cards = {folder: _about_expert(folder) for folder in folders}
    space: Mapping[str, Any] = {"shape": next(iter(cards.values()))["latent_space"]["shape"], "codec": latents}
    for folder, card in cards.items():
        check_part(folder, card, space, texts, source)
    place = None if without_router else _find_router(given, router, len(folders))
    about_router = None if place is None else _about_router(place)
    if place is not None and about_router is not None:
        check_part(place, about_router, space, texts, source)
    ordered = _in_order(cards, about_router, place, allow_missing)

    parts: dict[str, tuple[Path, Sequence[str]]] = {}
    for k, expert in enumerate(ordered):
        if expert is not None:
            parts[f"expert_{k}"] = expert, KEPT
    if place is not None:
        parts[ROUTER] = place, KEPT
    for name in (CODEC, TEXT, TOKENIZER):
        if (source / name).is_dir():
            parts[name] = _inside(source / name, source), _kept_of(source / name)
    licenses = {name: cards[folder]["license"] for name, (folder, _) in parts.items() if folder in cards}
    with _staged(Path(out)) as staged:
        files = {f"{part}/{name}": _digest(path, staged) for part, name, path in _place_all(parts, staged)}
        index = ModelIndex(
            num_experts=len(ordered),
            experts=tuple(
                None if folder is None else _entry(f"expert_{k}", cards[folder]) for k, folder in enumerate(ordered)
            ),
            router=about_router and {"folder": ROUTER, **about_router["entry"]},
            latent_space=space,
            text_encoder=texts,
            license=_joined(licenses),
            files=files,
        )
        index.write(staged)
    return index


def copy_model(folder: Path, index: ModelIndex, out: str | Path) -> None:
    """The same model in another folder."""
    parts: dict[str, tuple[Path, list[str]]] = {}
    for name in index.files:
        part, file = Path(name).parts
        if (folder / part).is_dir():
            if not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing: {AGAIN}")
            parts.setdefault(part, (folder / part, []))[1].append(file)
    with _staged(Path(out)) as staged:
        for _ in _place_all(parts, staged):
            pass
        index.write(staged)


def push_model(folder: Path, repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Upload to the Hugging Face hub; where it can be seen. Only files that the index names, as it names them."""
    index = ModelIndex.read(folder)
    index.verify(folder)
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[INDEX, *index.files]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(f"the hub did not take {repo_id} ({reason_of(error)})") from error


def objective_name(objective: Objective) -> str:
    """The name it has on the command line, or what it predicts on which schedule."""
    names = [name for name, known in OBJECTIVES.items() if known == objective]
    return names[0] if names else f"{objective.prediction}, {objective.schedule}"


# --- the parts ----------------------------------------------------------------------------------------------------


def _experts_in(folder: Path, allow_missing: bool) -> list[Path]:
    """The folder, if it is an expert, or those in it."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give that of an expert, or one that `atoll train-all` has made")
    if (folder / CONFIG).exists():
        return [folder]
    inside = [_inside(path, folder) for path in folder.glob("expert_*") if path.is_dir() and path.name[7:].isdecimal()]
    inside.sort(key=lambda path: int(path.name[7:]))
    done = [path for path in inside if (path / CONFIG).exists()]
    unfinished = [path for path in inside if path not in done]
    if unfinished and not allow_missing:
        raise InputError(f"{unfinished[0]} has no {CONFIG}: train it to its end, or give --allow-missing")
    if not done:
        raise InputError(f"{folder} has neither {CONFIG} nor expert_0: give the folder of an expert that is trained")
    return done


def _inside(path: Path, root: Path) -> Path:
    """A part's folder, if it is not a link that leaves `root`."""
    try:
        real_path(path, root)
    except OSError as error:
        raise InputError(f"{path} cannot be part of a model ({reason_of(error)}): give its own folder") from error
    return path


def _find_data(given: Sequence[Path], data: str | Path | None) -> Path:
    """Where codec and text encoder are: in a data set, or in a model that is taken apart."""
    if data is not None:
        for name in (CODEC, TEXT):
            if not (Path(data) / name).is_dir():
                raise InputError(f"{data} has no {name}: give the data set that the experts were trained on")
        return Path(data)
    for folder in given:
        if all((folder / name).is_dir() for name in (CODEC, TEXT)):
            return folder
    raise InputError("the model needs a codec and a text encoder: give --data, the data set of the experts")


def _find_router(given: Sequence[Path], router: str | Path | None, num: int) -> Path | None:
    if router is not None:
        return Path(router)
    for folder in given:
        if (folder / ROUTER / CONFIG).exists():
            return _inside(folder / ROUTER, folder)
    if num > 1:
        raise InputError(f"{num} experts need a router: give --router, what `atoll train-router` has made")
    return None


def _about_expert(folder: Path) -> dict[str, Any]:
    """Its card, after all of it was read and found whole."""
    kind = read_json(folder / CONFIG, "give the folder of an expert").get("model")
    if kind != DiT.__name__:
        raise InputError(f"{folder} is a {shown(kind)[1:-1]}, not an expert: give it as --router, if it is one")
    expert = Expert.load(folder)
    trained, about = expert.objective, str(folder / CONFIG)
    objective = {
        "name": objective_name(trained), "prediction": str(trained.prediction), "schedule": trained.schedule
    }  # fmt: skip
    return {
        "latent_space": expert.latent_space,
        "text_encoder": expert.text_encoder,
        "cluster": cluster_of({"data": expert.data}, about),
        "objective": objective,
        "license": "unknown" if expert.license is None else value_of(vars(expert), "license", str, about),
    }


def _about_router(folder: Path) -> dict[str, Any]:
    router = load_router(folder)
    temperature = router.card.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not 0 < temperature < math.inf:
        raise InputError(f"{folder / CONFIG} is damaged, its 'temperature' is {shown(temperature)}: {AGAIN}")
    entry = {
        "model": type(router).__name__,
        "reads_text": router.config.text_dim is not None,
        "temperature": temperature,
    }
    return {**router.card, "num_experts": router.config.num_experts, "entry": entry}


def load_router(folder: Path) -> Router | CentroidRouter:
    classes = {"Router": Router, "CentroidRouter": CentroidRouter}
    about = read_json(folder / CONFIG, "give what `atoll train-router` has made, trained to its end")
    router: Router | CentroidRouter = named(classes, about, folder).from_pretrained(folder)
    return router


def _in_order(
    cards: Mapping[Path, Mapping[str, Any]], router: Mapping[str, Any] | None, place: Path | None, allow_missing: bool
) -> list[Path | None]:
    """The experts by their clusters, None where one is missing."""
    clusters = {folder: card["cluster"] for folder, card in cards.items()}
    if router is None:
        return list(cards)
    num = int(router["num_experts"])
    for folder, cluster in clusters.items():
        if cluster is None and num > 1:
            raise InputError(
                f"{folder} was trained on all of the data, and the router {place} is for {num} clusters: leave it out"
            )
        if cluster is not None and not (type(cluster) is int and 0 <= cluster < num):
            raise InputError(
                f"{folder} is of cluster {cluster}, but the router {place} knows 0 to {num - 1}: leave it out, or give "
                "the router of its partition"
            )
    for cluster, count in Counter(clusters.values()).items():
        if count > 1:
            both = " and ".join(str(folder) for folder, found in clusters.items() if found == cluster)
            raise InputError(f"{both} are experts of the same cluster, {cluster}: give one of them")
    by_cluster = {cluster or 0: folder for folder, cluster in clusters.items()}
    missing = [str(k) for k in range(num) if k not in by_cluster]
    if missing and not allow_missing:
        what = f"cluster {missing[0]}" if len(missing) == 1 else f"clusters {', '.join(missing)}"
        raise InputError(f"there is no expert of {what}: give one, or --allow-missing to do without")
    return [by_cluster.get(k) for k in range(num)]


def _entry(name: str, card: Mapping[str, Any]) -> dict[str, Any]:
    return {"folder": name, **{key: card[key] for key in ("cluster", "objective", "license")}}


def _joined(licenses: Mapping[str, str]) -> str:
    """One licence for all, or each with what is under it."""
    distinct = sorted(set(licenses.values()))
    if len(distinct) == 1:
        return distinct[0]
    return "; ".join(f"{one} ({', '.join(name for name in licenses if licenses[name] == one)})" for one in distinct)


# --- files --------------------------------------------------------------------------------------------------------


def _kept_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def _place_all(parts: Mapping[str, tuple[Path, Sequence[str]]], staged: Path) -> Iterator[tuple[str, str, Path]]:
    """Put the parts' files there, those that each has: (part, name, where it is now)."""
    for part, (folder, names) in parts.items():
        (staged / part).mkdir()
        for name in names:
            if os.path.lexists(folder / name):
                _place(folder / name, staged / part / name)
                yield part, name, staged / part / name


def _place(source: Path, target: Path) -> None:
    """Weights are linked where the disk allows it, for nothing writes into them; what people may edit is copied."""
    try:
        with open_regular(source) as file:
            if source.suffix != ".safetensors":
                check_size(source, MAX_COPIED)
            elif _linked(source, target):
                return
            with target.open("wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
    except OSError as error:
        if error.filename == str(source):
            raise InputError(f"{source} cannot be part of a model ({reason_of(error)}): {AGAIN}") from error
        raise
    make_readable(target)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(real_path(source), target)  # the hub keeps links in its folders: to the file itself
    except OSError:  # another disk, or one without links
        return False
    return True


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place when all is done; one that a killed process left is cleared."""
    out = resolved(out)
    staged, old = out.with_name(f".{out.name}.tmp"), out.with_name(f".{out.name}.old")
    try:
        staged.mkdir(parents=True, exist_ok=True)
        with alone(staged):
            try:
                if old.exists() and not out.exists():
                    old.rename(out)  # killed between the two renames below
                check_free(out)
                _clear(staged)
                yield staged
                if out.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    out.rename(old)
                try:
                    staged.rename(out)
                except BaseException:
                    if old.exists():
                        old.rename(out)
                    raise
                shutil.rmtree(old, ignore_errors=True)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
    except OSError as error:
        raise InputError(f"cannot write {out} ({reason_of(error)}): free the disk or choose another --out") from error


def check_free(out: Path) -> None:
    """`out` may be replaced if it is an older model, and only that: what else lies in it is not ours to remove."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out} is a file: choose another folder for the model")
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    if not found:
        return
    if INDEX not in found:
        raise InputError(f"{out} is not empty and not a model: choose another folder, it is left as it is")
    try:
        files = ModelIndex.read(out).files
    except InputError as error:
        raise InputError(
            f"{out} holds a model that is damaged or too old: move it, or choose another folder"
        ) from error
    ours = {INDEX, *files, *(Path(name).parts[0] for name in files)}
    for name in found:
        if name not in ours:
            raise InputError(f"{out} holds {name}, which is not of the model in it: move it, or choose another folder")


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
