"""Creates a federation, and prepares a contributor's own images to join one."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from atoll.cards import DATASET, PARTITION, DatasetCard, PartitionCard, require_same
from atoll.data.local_copy import PARTS, local_copy
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import Dataset, cluster_folders
from atoll.data.sources import Source
from atoll.errors import InputError, plural
from atoll.federation.charter import FORMAT, Charter, Files, Slot
from atoll.federation.gate import Gate
from atoll.federation.keys import Identity, Person, seal
from atoll.federation.roles import Federation, change_roles, found, url_of
from atoll.federation.submission import upload
from atoll.partition.kmeans import Centroids, find_nearest
from atoll.partition.partition import CENTROIDS, place_in
from atoll.sampling.assemble import KEPT, load_router
from atoll.storage import exists, read_json, remove_tree, write_json

FITS = (
    2.0  # times the mean distance of a slot's own images to their centroids: farther away, images are of another kind
)
NUM_PROMPTS = 64  # captions over which the share of steps is counted
JOINED = "joined.json"


def create(
    place: str | Path,
    identity: Identity,
    data: str | Path,
    *,
    name: str,
    description: str = "",
    gate: Gate,
    training: dict[str, Any],
    lease: float,
    fresh: float,
    verifiers: Sequence[Person] = (),
    num_verdicts: int = 1,
    router: Path | None = None,
    open_slots: bool = True,
) -> Federation:
    """Uploads the frozen encoders and the shards of each cluster, and signs the charter.

    Rerun after a kill, it skips what is uploaded. The root is written last: until then there is no federation.
    """
    url = url_of(place)
    verifiers = list(verifiers) or [identity.person]
    if not 1 <= num_verdicts <= len(verifiers):
        raise InputError(f"{num_verdicts} verdicts are asked for, but there are {plural(len(verifiers), 'verifier')}")
    local = Federation(url)
    if local.store.exists("metadata/1.root.json"):
        federation = Federation.open(url)
        if identity.key in federation.founders:
            return federation
        raise InputError(f"{url} is a federation of somebody else already: choose another place")
    folder = local_copy(data)
    card, clusters = DatasetCard.read(folder), cluster_folders(folder)
    if not clusters:
        raise InputError(f"{folder} has no clusters: run `atoll partition {folder} --experts K` first")
    partition = PartitionCard.read(folder / "clusters")
    shared = [folder / DATASET, folder / "clusters" / PARTITION, folder / "clusters" / CENTROIDS]
    shared += [path for part in PARTS for path in sorted((folder / part).glob("*"))]
    files = upload(local.store, _named(shared, folder), "upload encoders")
    if router is not None and load_router(router).config.num_experts != len(clusters):
        raise InputError(f"{router} knows another number of experts than {folder} has clusters: give its own router")
    routed = {} if router is None else upload(local.store, _named([router / part for part in KEPT], router), "router")
    slots = []
    for number, cluster in clusters.items():
        paths = [
            path for path in sorted(cluster.iterdir()) if path.suffix == ".safetensors" or path.name == "SHA256SUMS"
        ]
        slots.append(
            Slot(
                number=number, name=f"cluster {number}", images=partition.sizes[number],
                files=upload(local.store, _named(paths, folder), f"upload slot {number}"),
            )
        )  # fmt: skip
    captions = Dataset.open(folder).strings("caption", _spread(card.counts.rows, NUM_PROMPTS))
    people = {person.key: person for person in (*verifiers, identity.person)}
    charter = Charter(
        format=FORMAT, name=name, description=description, created=datetime.now(UTC).date().isoformat(),
        license=card.license, gate=gate, training=training, lease=lease, fresh=fresh, open_slots=open_slots,
        people=list(people.values()), slots=slots, files=files, router=routed, prompts=sorted(set(captions)),
    )  # fmt: skip
    return found(url, identity, charter, verifiers, num_verdicts)


def _named(paths: Sequence[Path], folder: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]


def _spread(num: int, most: int) -> range:
    return range(0, num, max(1, num // most))


def publish_router(federation: Federation, identity: Identity, router: Path) -> list[str]:
    """Publishes another router, such as one trained since; only founders can."""
    known = load_router(router).config.num_experts
    if known > len(federation.charter.slots):
        raise InputError(f"{router} knows {known} experts, but the charter has {len(federation.charter.slots)} slots")
    files = upload(federation.store, _named([router / part for part in KEPT], router), "router")
    return amend(federation, identity, router=files)


def amend(
    federation: Federation,
    identity: Identity,
    *,
    router: Files | None = None,
    add: Sequence[Person] = (),
    remove: Sequence[str] = (),
    num_verdicts: int | None = None,
    add_founders: Sequence[Person] = (),
    remove_founders: Sequence[str] = (),
    num_founders: int | None = None,
) -> list[str]:
    """Changes the charter and the roles; returns lines for the user."""
    charter = federation.charter
    if identity.key not in federation.founders:
        raise InputError(f"the key of {identity.person.name} is no founder of {federation.place}: founders sign this")
    roles = {}
    for what, present, added, removed in (
        ("verifier", federation.verifiers, add, remove),
        ("founder", federation.founders, add_founders, remove_founders),
    ):
        keys = {key: Person(key=key, name=charter.name_of(key)) for key in present} | {who.key: who for who in added}
        for text in removed:
            found_keys = [key for key, person in keys.items() if key.startswith(text) or person.name == text]
            if len(found_keys) != 1:
                raise InputError(f"{text} is not one {what} of {federation.place}: give a key as `status` shows it")
            del keys[found_keys[0]]
        roles[what] = list(keys.values())
    people = {person.key: person for person in (*charter.people, *roles["verifier"], *roles["founder"])}
    changed = charter.model_copy(
        update={"people": list(people.values()), **({} if router is None else {"router": router})}
    )
    present_founders = federation.root.signed.roles["root"].threshold
    return change_roles(
        federation, identity, changed, verifiers=roles["verifier"], founders=roles["founder"],
        num_verdicts=min(federation.num_verdicts, len(roles["verifier"])) if num_verdicts is None else num_verdicts,
        num_founders=min(present_founders, len(roles["founder"])) if num_founders is None else num_founders,
    )  # fmt: skip


# --- data ---------------------------------------------------------------------------------------------------------


def data_folder(federation: Federation, slot: Slot | None) -> Path:
    """Downloads and verifies a data set with the frozen encoders and one slot's images, if any; returns its folder."""
    folder = federation.cache / "data" / ("encoders" if slot is None else f"{slot.number:04d}")
    files = {**federation.charter.files, **({} if slot is None else slot.files)}
    record = folder / ".files.json"
    wanted = {name: blob.sha256 for name, blob in files.items()}
    if exists(record) and read_json(record, f"delete {folder}") != wanted:
        remove_tree(folder)
    federation.fetch_files(files, folder, "download data")
    write_json(record, wanted)
    return folder


def bring(federation: Federation, identity: Identity, mine: Path, new_slot: bool = False) -> tuple[Slot, Path]:
    """Prepares a contributor's own images with the federation's encoders, and finds or opens a slot for them.

    No image is uploaded. Returns the slot, and the folder of the data set on this machine.
    """
    encoders = data_folder(federation, None)
    theirs = DatasetCard.read(encoders)
    data = mine
    if not (mine / DATASET).exists():
        data = federation.cache / "mine" / mine.resolve().name
        chosen = {"codec": f"saved:{encoders}", "text": theirs.text.spec, "features": theirs.features.spec}
        settings = PrepareSettings(**{**theirs.settings.model_dump(), **chosen, "license": theirs.license})
        prepare(Source(str(mine), None, None, settings.size, 0, None), str(data), settings)
    card = DatasetCard.read(data)
    for part in ("codec", "text", "features"):
        require_same(getattr(card, part), getattr(theirs, part), part, data, federation.place)
    number, ratio = nearest_slot(Dataset.open(data), encoders)
    fits = ratio <= FITS and not new_slot
    slot = federation.slot(number) if fits else open_slot(federation, identity, card)
    if list(cluster_folders(data)) != [slot.number] or not (data / "clusters" / f"{slot.number:02d}").exists():
        place_in(data, slot.number)
    write_json(federation.folder / JOINED, {"data": str(data.resolve()), "slot": slot.number})
    return slot, data


def nearest_slot(data: Dataset, encoders: Path) -> tuple[int, float]:
    """Returns the slot nearest to most images, and their distance relative to that of the slot's own images."""
    path, partition = encoders / "clusters" / CENTROIDS, PartitionCard.read(encoders / "clusters")
    if not path.exists():
        raise InputError("the slots of this federation were not made by k-means, so images cannot be assigned to one")
    centroids = Centroids.load(path)
    labels, distances = find_nearest(data.column("features"), centroids.fine, centroids.metric)
    slots = centroids.coarse_of_fine[labels]
    number = int(torch.bincount(slots).argmax())
    return number, float(distances.mean().sqrt()) / max(partition.mean_distance[number], 1e-12)


def open_slot(federation: Federation, identity: Identity, card: DatasetCard) -> Slot:
    """Opens a slot for images that only this contributor has."""
    if not federation.charter.open_slots:
        raise InputError(f"the images fit no slot of {federation.place}, and its charter lets nobody open another")
    slots = federation.slots()
    for number in range(len(federation.charter.slots), 65536):
        if number in slots:
            if slots[number].author == identity.person and slots[number].name == card.source.name[:80]:
                return slots[number]
            continue
        slot = Slot(number=number, name=card.source.name[:80], images=card.counts.train, author=identity.person)
        content, key = seal(slot, identity), f"slots/{number:04d}.json"
        store = federation.store
        if store.create(key, content) or (store.head(key)[0] == len(content) and store.get(key) == content):
            return slot
    raise InputError(f"{federation.place} has no number left for another slot")
