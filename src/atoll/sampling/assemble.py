"""Assembles separately trained parts into one model: a folder laid out like the published Paris model.

MODEL/README.md                  its page on the hub: what it is, who trained what
MODEL/model_index.json           its parts, and the SHA-256 of every file; the hash of all this is the model's hash
MODEL/expert_0/, expert_1/ ...   config.json, model.safetensors, calibration.safetensors; conversion.json if converted
MODEL/router/                    config.json, model.safetensors; not needed for one expert
MODEL/centroids/                 the same for a router from centroids, if there are experts that the router has not seen
MODEL/vae/, text_encoder/        and tokenizer/ if there is one
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from PIL.Image import Image
from tqdm import tqdm

from atoll.cards import (
    AGAIN,
    CONFIG,
    INDEX,
    MAX_OTHER,
    ExpertCard,
    ExpertEntry,
    LatentSpace,
    ModelIndex,
    ObjectiveName,
    RouterCard,
    RouterEntry,
    file_digest,
    require_fit,
)
from atoll.convert import convert, save
from atoll.convert.ledger import Options
from atoll.diffusion.objective import OBJECTIVES
from atoll.encoders.codec import FOLDER as CODEC
from atoll.encoders.codecs import load_codec
from atoll.encoders.pretrained import named
from atoll.encoders.text import FOLDER as TEXT
from atoll.encoders.text import TOKENIZER, load_text_encoder
from atoll.errors import InputError
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.combined_router import CombinedRouter
from atoll.networks.expert import CALIBRATION, REPORT, Expert, read_calibration
from atoll.networks.router import Router
from atoll.networks.stored import WEIGHTS, folder_of, push_folder
from atoll.object_store import model_finders
from atoll.sampling.model_card import (
    CREDITS,
    MAX_README,
    README,
    SAMPLES,
    has_its_credits,
    is_ours,
    write_model_card,
)
from atoll.storage import (
    alone,
    check_size,
    make_readable,
    open_regular,
    read_bytes,
    read_json,
    real_path,
    reason_of,
    resolved,
)

ROUTER, CENTROIDS = "router", "centroids"
IMAGE_SCALE = 0.03  # of a router from cards
MOST_EXPERTS = 65536
KEPT = (CONFIG, WEIGHTS, CALIBRATION, REPORT)  # the files of an expert or router that become part of a model
SUFFIXES = (".json", ".safetensors", ".txt")  # of a codec, a text encoder and a tokenizer; never a pickle
PATTERNS = (INDEX, README, CREDITS, *(f"*/*{suffix}" for suffix in SUFFIXES))


def find_model(folder: str | Path, revision: str | None = None) -> Path:
    """Returns the folder itself, or the local cache of a model from the hub or a federation."""
    found = (find(folder, revision) for find in model_finders)
    return next((path for path in found if path is not None), None) or folder_of(folder, revision, PATTERNS)


# --- assembling a model -------------------------------------------------------------------------------------------


def assemble(
    experts: Sequence[str | Path],
    router: str | Path | None,
    out: str | Path,
    data: str | Path | None = None,
    *,
    allow_missing: bool = False,
    without_router: bool = False,
    from_cards: bool = False,
) -> ModelIndex:
    """Checks that the parts fit together, and assembles them in a model folder.

    A folder with expert_* in it stands for these and its router; `data` provides the codec and the text encoder.
    Without a router, several experts keep the order given and need a routing policy that uses none. Experts of clusters
    that the router does not know are routed to by the statistics that each expert carries; with `from_cards` all
    experts are, and no trained router is needed.
    """
    check_free(resolved(out))  # fail before the work
    given = [Path(folder) for folder in experts]
    folders = [expert for folder in given for expert in _experts_in(folder, allow_missing)]
    if not folders:
        raise InputError("there are no experts: give their folders, or one that `atoll train-all` has made")
    source = _find_data(given, data)
    codec, text = load_codec(source).describe(), load_text_encoder(source).describe()
    objectives = {folder: _check_expert(folder) for folder in folders}
    cards = {folder: ExpertCard.read(folder) for folder in folders}
    space = LatentSpace(shape=cards[folders[0]].latent_space.shape, codec=codec)
    for folder, card in cards.items():
        require_fit(folder, card, space, text, source)
    ordered, router_entry = list[Path | None](cards), None
    place = None if without_router or from_cards else _find_router(given, router, len(folders))
    made: CentroidRouter | None = None
    if place is not None:
        network, router_card = load_router(place), RouterCard.read(place)
        require_fit(place, router_card, space, text, source)
        ordered = _in_order(cards, network.config.num_experts, place, allow_missing)
        made = router_from_cards(ordered) if len(ordered) > network.config.num_experts else None
        router_entry = RouterEntry(
            folder=ROUTER, model=type(network).__name__, reads_text=network.config.text_dim is not None,
            temperature=router_card.temperature, **({} if made is None else {"centroids": CENTROIDS}),
        )  # fmt: skip
    elif from_cards and len(folders) > 1:
        ordered = _in_order(cards, 0, None, allow_missing)
        made = router_from_cards(ordered)
        router_entry = RouterEntry(folder=ROUTER, model=type(made).__name__, reads_text=True)
    entries = [
        None
        if folder is None
        else ExpertEntry(
            folder=f"expert_{k}", cluster=cards[folder].cluster, objective=objectives[folder],
            license=cards[folder].license or "unknown",
        )
        for k, folder in enumerate(ordered)
    ]  # fmt: skip

    sources = {f"expert_{k}/{name}": folder / name for k, folder in enumerate(ordered) if folder for name in KEPT}
    if place is not None:
        sources |= {f"{ROUTER}/{name}": place / name for name in KEPT}
    for part in (CODEC, TEXT, TOKENIZER):
        if (source / part).is_dir():
            paths = sorted(inside(source / part, source).iterdir())
            sources |= {f"{part}/{path.name}": path for path in paths if path.suffix in SUFFIXES}
    with _staged(Path(out)) as staged:
        files = {}
        if made is not None:
            made.save_pretrained(folder := staged / (ROUTER if place is None else CENTROIDS))
            files = {f"{folder.name}/{name}": file_digest(folder / name, staged) for name in (CONFIG, WEIGHTS)}
        for name, path in sources.items():
            if os.path.lexists(path):
                _place(path, staged / name)
                files[name] = file_digest(staged / name, staged)
        index = ModelIndex(
            num_experts=len(ordered), experts=entries, router=router_entry, latent_space=space, text_encoder=text,
            license=_joined_license([entry for entry in entries if entry is not None]), files=files,
        )  # fmt: skip
        index.write(staged)
        write_model_card(staged, index)
    return index


def assemble_paris(folder: str | Path, out: str | Path, options: Options = Options()) -> Sequence[str]:  # noqa: B008
    """Converts the parts of Paris one by one and assembles a model of them; returns lines to print."""
    folder, out = Path(folder), resolved(out)
    for name in ("expert_0", ROUTER, "vae", "text_encoder", "tokenizer"):
        if not (folder / name).is_dir():
            raise InputError(f"{folder} has no {name}: give a folder with all of Paris, or a part of it --to expert")
    sources = [*expert_folders(folder), inside(folder / ROUTER, folder)]
    check_free(out)
    notes: dict[str, list[str]] = {}  # note -> the parts it is about
    codec, text = load_codec(folder), load_text_encoder(folder, hide_padding=False)  # its experts see padding too
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
            parts = Path(place) / resolved(folder).name
            codec.save(parts)
            text.save(parts)
            space = {"text_encoder": text.describe().values()}
            for path in tqdm(sources, unit=" parts", disable=None, leave=False):
                is_router = path.name == ROUTER
                converted = convert(path, replace(options, objective=None) if is_router else options)
                for note in converted.notes:
                    notes.setdefault(note, []).append(path.name)
                config = converted.network.config
                shape = [config.in_channels, config.input_size, config.input_size]
                latents = {"shape": shape, "codec": codec.describe().values()}
                cluster = None if is_router else int(path.name[7:])
                save(converted, parts / path.name, {**space, "latent_space": latents}, {"cluster": cluster})
            index = assemble([parts], None, out, parts)
    except OSError as error:
        raise InputError(f"cannot write {out} ({reason_of(error)}): free the disk or choose another --out") from error
    kinds = ", ".join(f"{k} {kind}" for k, kind in enumerate(index.objectives))
    return [
        f"{out}: Paris, {index.num_experts} experts ({kinds}), licence {index.license}",
        *(f"note: {note} ({', '.join(names)})" for note, names in notes.items()),
        "what of it could not be verified is listed in docs/convert.md",
        f'next: atoll sample {out} "a prompt" --solver euler --steps 50 --routing topk:2 --guidance 7.5',
    ]


def copy_model(folder: Path, index: ModelIndex, out: str | Path) -> None:
    """Writes the same model to another folder."""
    index.verify(folder, again=False)
    credited = os.path.lexists(folder / CREDITS) and file_digest(folder / CREDITS, folder)  # refuses links leaving it
    with _staged(Path(out)) as staged:
        for name in index.files:
            if (folder / name).parent.is_dir():
                _place(folder / name, staged / name)
        if credited:
            (staged / CREDITS).write_bytes(read_bytes(folder / CREDITS, MAX_README, folder))
        index.write(staged)
        write_model_card(staged, index)


def push_model(
    folder: Path, repo_id: str, private: bool | None = None, token: str | None = None, samples: Image | None = None
) -> str:
    """Uploads the files that the index names, the index and the model page; returns the URL.

    Nothing is written to the folder, which may be the hub's cache; `samples` are shown on the page.
    """
    index = ModelIndex.read(folder)
    index.verify(folder)
    with TemporaryDirectory() as place:
        page = Path(place)
        for name in (README, SAMPLES, CREDITS):
            if os.path.lexists(folder / name):
                file_digest(folder / name, folder)  # refuses links that leave the folder, and huge files
                shutil.copyfile(folder / name, page / name)
        if samples is not None:
            samples.save(page / SAMPLES)
        write_model_card(folder, index, page)
        url = push_folder(folder, [INDEX, *index.files], repo_id, private, token)
        push_folder(page, [README, SAMPLES, CREDITS], repo_id, private, token)
    return url


# --- the parts ----------------------------------------------------------------------------------------------------


def expert_folders(folder: Path) -> list[Path]:
    """Returns expert_0, expert_1 ... of a folder, in this order; raises an InputError for links that leave it."""
    folders = [path for path in folder.glob("expert_*") if path.is_dir() and path.name[7:].isdecimal()]
    return [inside(path, folder) for path in sorted(folders, key=lambda path: int(path.name[7:]))]


def _experts_in(folder: Path, allow_missing: bool) -> list[Path]:
    """Returns the folder itself if it is an expert, otherwise the experts in it."""
    if (folder / CONFIG).exists():
        return [folder]
    folders = expert_folders(folder)
    finished = [path for path in folders if (path / CONFIG).exists()]
    if unfinished := [path for path in folders if path not in finished and not allow_missing]:
        raise InputError(f"{unfinished[0]} has no {CONFIG}: train it to its end, or give --allow-missing")
    if not finished:
        raise InputError(f"{folder} holds no trained expert: give the folder of one, or what `atoll train-all` made")
    return finished


def inside(path: Path, root: Path) -> Path:
    """Returns `path`; raises an InputError if it is a link that leaves `root`."""
    try:
        real_path(path, root)
    except OSError as error:
        raise InputError(f"{path} cannot be part of a model ({reason_of(error)}): give its own folder") from error
    return path


def _find_data(given: Sequence[Path], data: str | Path | None) -> Path:
    """Returns the folder with codec and text encoder: a data set, or a model whose parts are reused."""
    for folder in given if data is None else [Path(data)]:
        if all((folder / name).is_dir() for name in (CODEC, TEXT)):
            return folder
    where = "" if data is None else f", and {data} has not both"
    raise InputError(f"the model needs a codec and a text encoder{where}: give --data, the data set of the experts")


def _find_router(given: Sequence[Path], router: str | Path | None, num: int) -> Path | None:
    if router is not None:
        return Path(router)
    for folder in given:
        if (folder / ROUTER / CONFIG).exists():
            return inside(folder / ROUTER, folder)
    if num > 1:
        raise InputError(f"{num} experts need a router: give --router, what `atoll train-router` has made")
    return None


def _check_expert(folder: Path) -> ObjectiveName:
    """Returns an expert's objective, after reading and checking all of its files."""
    trained = Expert.load(folder).objective
    names = [name for name, known in OBJECTIVES.items() if known == trained]
    name = names[0] if names else f"{trained.prediction}, {trained.schedule}"
    return ObjectiveName(name=name, prediction=str(trained.prediction), schedule=trained.schedule)


def load_router(folder: Path) -> Router | CentroidRouter:
    about = read_json(folder / CONFIG, "give what `atoll train-router` has made, trained to its end")
    classes = {"Router": Router, "CentroidRouter": CentroidRouter}
    router: Router | CentroidRouter = named(classes, about, folder).from_pretrained(folder)
    return router


def open_router(folder: Path, entry: RouterEntry) -> Router | CentroidRouter | CombinedRouter:
    """Returns a model's router, combined with its router from centroids if it has one."""
    router = load_router(folder / entry.folder)
    if entry.centroids is None:
        return router
    centroids = CentroidRouter.from_pretrained(folder / entry.centroids)
    if router.config.num_experts > centroids.config.num_experts:
        raise InputError(
            f"{folder / entry.centroids} knows fewer experts than {entry.folder}: assemble the model again"
        )
    return CombinedRouter(router, centroids)


class _Statistics(NamedTuple):
    """The statistics of an expert's cluster that a router from centroids uses."""

    num: int  # of images
    mean: torch.Tensor
    variance: float
    text_mean: torch.Tensor
    text_covariance: torch.Tensor


def _statistics_of(folder: Path) -> _Statistics:
    card = ExpertCard.read(folder)
    prior = None if card.calibration is None else read_calibration(folder / CALIBRATION)[1]
    num, variance = (0, None) if card.data is None else (card.data.pictures or 0, card.data.variance)
    if prior is None or prior.covariance is None or num <= 0 or variance is None or variance < 0:
        raise InputError(
            f"{folder} does not carry the statistics of its cluster that a router needs: train it with this version of "
            "atoll, or give a router that knows its cluster"
        )
    return _Statistics(num, prior.mean, variance, prior.centre, prior.covariance)


def router_from_cards(experts: Sequence[Path | None]) -> CentroidRouter:
    """Returns the router from centroids made from the experts' statistics; None is a missing expert, of weight 0.

    It equals the one that `make_centroid_router` fits to all of the data, except for its image scale, which cannot be
    chosen without held-out data.
    """
    known = {folder: _statistics_of(folder) for folder in experts if folder is not None}
    first, shown = next(iter(known)), next(iter(known.values()))
    missing = _Statistics(
        0, torch.zeros_like(shown.mean), 1.0, torch.zeros_like(shown.text_mean), shown.text_covariance
    )
    rows = [missing if folder is None else known[folder] for folder in experts]
    counts = torch.tensor([row.num for row in rows], dtype=torch.float64)
    covariances = torch.stack([row.text_covariance for row in rows]).double()
    router = CentroidRouter.fit(
        torch.stack([row.mean for row in rows]).double(),
        torch.tensor([row.variance for row in rows], dtype=torch.float64),
        counts,
        torch.stack([row.text_mean for row in rows]).double(),
        torch.einsum("k,kde->de", counts / counts.sum(), covariances),
        image_scale=IMAGE_SCALE,
    ).float()
    card = ExpertCard.read(first)
    router.card = {
        "latent_space": card.latent_space.values(),
        "text_encoder": card.text_encoder and card.text_encoder.values(),
        "training": {"method": "the experts' cards"},
    }
    return router


def _in_order(cards: Mapping[Path, ExpertCard], num: int, place: Path | None, allow_missing: bool) -> list[Path | None]:
    """Returns the experts by cluster, None if one is missing; the router at `place`, if any, knows `num` clusters.

    Further clusters are allowed for experts that carry the statistics they need to be routed to.
    """
    by_cluster: dict[int, Path] = {}
    for folder, card in cards.items():
        cluster = 0 if card.cluster is None and num == 1 else card.cluster
        known = cluster is not None and 0 <= cluster < (num if card.calibration is None else MOST_EXPERTS)
        if cluster is None or not known:
            what = "all of the data" if cluster is None else f"cluster {cluster}"
            why = (
                "cards tell of one cluster each"
                if place is None
                else f"the router {place} knows the clusters 0 to {num - 1}"
            )
            raise InputError(f"{folder} is of {what}, but {why}: leave it out, or give the router of its partition")
        if cluster in by_cluster:
            raise InputError(
                f"{by_cluster[cluster]} and {folder} are experts of the same cluster, {cluster}: give one of them"
            )
        by_cluster[cluster] = folder
    num = max(num, *(cluster + 1 for cluster in by_cluster))
    missing = [str(k) for k in range(num) if k not in by_cluster]
    if missing and not allow_missing:
        raise InputError(f"there is no expert of cluster {', '.join(missing)}: give one, or --allow-missing")
    return [by_cluster.get(k) for k in range(num)]


def _joined_license(experts: Sequence[ExpertEntry]) -> str:
    """Returns the licence if all experts share it, otherwise each licence with its experts."""
    names: dict[str, list[str]] = defaultdict(list)
    for expert in experts:
        names[expert.license or "unknown"].append(expert.folder)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{license} ({', '.join(names[license])})" for license in sorted(names))


# --- files --------------------------------------------------------------------------------------------------------


def _place(source: Path, target: Path) -> None:
    """Hard-links weights if the disk allows it, since nothing modifies them; copies files that people may edit."""
    target.parent.mkdir(exist_ok=True)
    try:
        with open_regular(source) as file:
            if source.suffix == ".safetensors":
                with suppress(OSError):  # another disk, or one without links
                    os.link(real_path(source), target)  # the hub's cache holds links: link to the file itself
                    return
            else:
                check_size(source, MAX_OTHER)
            with target.open("wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
    except OSError as error:
        if error.filename == str(source):
            raise InputError(f"{source} cannot be part of a model ({reason_of(error)}): {AGAIN}") from error
        raise
    make_readable(target)


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `out` at the end; first removes the remains of a killed process."""
    out = resolved(out)
    place = out.with_name(f".{out.name}.tmp")
    staged, old = place / "model", place / "old"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with alone(place):
            try:
                check_free(out)
                for left in (staged, old):
                    shutil.rmtree(left, ignore_errors=True)
                staged.mkdir()
                yield staged
                if out.exists():
                    out.rename(old)
                staged.rename(out)
            finally:
                if old.exists() and not out.exists():
                    old.rename(out)
                shutil.rmtree(place, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write {out} ({reason_of(error)}): free the disk or choose another --out") from error


def check_free(out: Path) -> None:
    """Raises an InputError if `out` holds anything but an older model, which may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        index = ModelIndex.read(out)
    except InputError as error:
        raise InputError(
            f"{out} is not a model that can be read: choose another folder, it is left as it is"
        ) from error
    ours = {INDEX, SAMPLES, *index.files, *(Path(name).parts[0] for name in index.files)}
    ours |= {README} if is_ours(out, index) else set()
    ours |= {CREDITS} if has_its_credits(out, index) else set()
    for path in sorted(out.rglob("*")):
        if (name := path.relative_to(out).as_posix()) not in ours:
            raise InputError(f"{out} holds {name}, which is not of the model in it: move it, or choose another folder")
