"""Parts that were made apart as one model: a folder in the layout of the published Paris model.

MODEL/README.md                  its page on the hub: what it is, who trained what
MODEL/model_index.json           what is in it, and the SHA-256 of every file; the model's hash is that of all of it
MODEL/expert_0/, expert_1/ ...   config.json, model.safetensors, calibration.safetensors; conversion.json if it was
MODEL/router/                    config.json, model.safetensors; one expert needs none
MODEL/vae/, text_encoder/        and tokenizer/ where there is one
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.cards import (
    AGAIN,
    INDEX,
    MADE,
    MAX_OTHER,
    CodecCard,
    ExpertCard,
    ExpertEntry,
    LatentSpace,
    ModelIndex,
    ObjectiveName,
    RouterCard,
    RouterEntry,
    TextEncoderCard,
    file_digest,
    require_fit,
)
from atoll.diffusion.objective import OBJECTIVES, Objective
from atoll.encoders.codecs import FOLDER as CODEC
from atoll.encoders.codecs import load_codec
from atoll.encoders.pretrained import named
from atoll.encoders.text import FOLDER as TEXT
from atoll.encoders.text import TOKENIZER, load_text_encoder
from atoll.errors import InputError, shown
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import DiT
from atoll.networks.expert import CALIBRATION, REPORT, Expert
from atoll.networks.router import Router
from atoll.networks.stored import CONFIG, WEIGHTS, folder_of, push_folder
from atoll.sampling.model_card import README, is_ours, write_model_card
from atoll.storage import alone, check_size, make_readable, open_regular, read_json, real_path, reason_of, resolved

ROUTER = "router"
KEPT = (CONFIG, WEIGHTS, CALIBRATION, REPORT)  # of an expert or a router; its training state stays where it is
SUFFIXES = (".json", ".safetensors", ".txt")  # of a codec, a text encoder and a tokenizer; never a pickle
PATTERNS = (INDEX, README, *(f"*/*{suffix}" for suffix in SUFFIXES))


def find_model(folder: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or where the hub's files are kept on this machine."""
    if not isinstance(folder, str | Path):
        raise InputError(f"a model is a folder or a hub id, not {shown(folder)}: {MADE}")
    if Path(folder).is_dir():
        return Path(folder)
    if isinstance(folder, Path) or str(folder).count("/") != 1 or str(folder)[0] in "./~" or Path(folder).exists():
        raise InputError(f"{folder} is not a folder: {MADE}, or a hub id")
    return folder_of(folder, revision, PATTERNS)


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
    codec = CodecCard.parse(load_codec(source).describe(), str(source / CODEC))
    texts = TextEncoderCard.parse(load_text_encoder(source).describe(), str(source / TEXT))
    cards = {folder: _read_expert(folder) for folder in folders}
    space = LatentSpace(shape=next(iter(cards.values()))[0].latent_space.shape, codec=codec)
    for folder, (card, _) in cards.items():
        require_fit(folder, card, space, texts, source)
    clusters = {folder: card.cluster for folder, (card, _) in cards.items()}
    place = None if without_router else _find_router(given, router, len(folders))
    ordered, entry = list[Path | None](cards), None
    if place is not None:
        network = load_router(place)
        about = RouterCard.read(place)
        require_fit(place, about, space, texts, source)
        entry = RouterEntry(
            folder=ROUTER, model=type(network).__name__, reads_text=network.config.text_dim is not None,
            temperature=about.temperature,
        )  # fmt: skip
        ordered = _in_order(clusters, network.config.num_experts, place, allow_missing)

    parts: dict[str, tuple[Path, Sequence[str]]] = {}
    for k, expert in enumerate(ordered):
        if expert is not None:
            parts[f"expert_{k}"] = expert, KEPT
    if place is not None:
        parts[ROUTER] = place, KEPT
    for name in (CODEC, TEXT, TOKENIZER):
        if (source / name).is_dir():
            parts[name] = _inside(source / name, source), _kept_of(source / name)
    licenses = {name: _license(cards[folder][0]) for name, (folder, _) in parts.items() if folder in cards}
    with _staged(Path(out)) as staged:
        files = {f"{part}/{name}": file_digest(path, staged) for part, name, path in _place_all(parts, staged)}
        entries: list[ExpertEntry | None] = [
            None
            if folder is None
            else ExpertEntry(
                folder=f"expert_{k}", cluster=clusters[folder], objective=cards[folder][1],
                license=_license(cards[folder][0]),
            )
            for k, folder in enumerate(ordered)
        ]  # fmt: skip
        index = ModelIndex(
            num_experts=len(ordered), experts=entries, router=entry, latent_space=space, text_encoder=texts,
            license=_joined(licenses), files=files,
        )  # fmt: skip
        index.write(staged)
        write_model_card(staged, index)
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
        write_model_card(staged, index)


def push_model(folder: Path, repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Upload to the Hugging Face hub; returns where it can be seen. Only files that the index names, as it does."""
    index = ModelIndex.read(folder)
    index.verify(folder)
    if not os.path.lexists(folder / README):
        write_model_card(folder, index)
    file_digest(folder / README, folder)  # no link out of the folder, nothing huge
    return push_folder(folder, [INDEX, README, *index.files], repo_id, private, token)


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


def _read_expert(folder: Path) -> tuple[ExpertCard, ObjectiveName]:
    """Returns its card and its objective, after all of it was read and found whole."""
    kind = read_json(folder / CONFIG, "give the folder of an expert").get("model")
    if kind != DiT.__name__:
        raise InputError(f"{folder} is a {shown(kind)[1:-1]}, not an expert: give it as --router, if it is one")
    card = ExpertCard.read(folder)
    trained = Expert.load(folder).objective
    name = ObjectiveName(name=objective_name(trained), prediction=str(trained.prediction), schedule=trained.schedule)
    return card, name


def _license(card: ExpertCard) -> str:
    return card.license or "unknown"


def load_router(folder: Path) -> Router | CentroidRouter:
    classes = {"Router": Router, "CentroidRouter": CentroidRouter}
    about = read_json(folder / CONFIG, "give what `atoll train-router` has made, trained to its end")
    router: Router | CentroidRouter = named(classes, about, folder).from_pretrained(folder)
    return router


def _in_order(clusters: Mapping[Path, int | None], num: int, place: Path, allow_missing: bool) -> list[Path | None]:
    """Returns the experts by their clusters, None where one is missing; the router at `place` knows `num`."""
    for folder, cluster in clusters.items():
        if cluster is None and num > 1:
            raise InputError(
                f"{folder} was trained on all of the data, and the router {place} is for {num} clusters: leave it out"
            )
        if cluster is not None and not 0 <= cluster < num:
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
                check_size(source, MAX_OTHER)
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
        index = ModelIndex.read(out)
    except InputError as error:
        raise InputError(
            f"{out} holds a model that is damaged or too old: move it, or choose another folder"
        ) from error
    ours = {INDEX, *index.files, *(Path(name).parts[0] for name in index.files)}
    ours |= {README} if README in found and is_ours(out, index) else set()
    for name in found:
        if name not in ours:
            raise InputError(f"{out} holds {name}, which is not of the model in it: move it, or choose another folder")


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
