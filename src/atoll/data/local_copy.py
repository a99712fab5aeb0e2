"""Copies a data set in an object store, or one cluster of it, to a local folder for training.

Training draws rows at random, which would take one request each; a cluster is a few gigabytes, so it is copied once,
several shards in parallel, each verified against its SHA-256. Copies stay in the cache, and only changed files are
copied again. While the store does not answer, a complete copy is used as it is.
"""

import hashlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from atoll.cards import DATASET, PARTITION, DatasetCard
from atoll.data.shards import AGAIN, SUMS, cluster_folders, clusters_in, read_sums
from atoll.errors import InputError, StoreError, printable
from atoll.object_store import StorePath, locked, place_of
from atoll.storage import cache_folder, known_digest, make_folder, read_json, remove_tree, write_json

NUM_FILES = 4  # copied in parallel
RECORD = ".copied.json"  # the version of each copied file, and which parts are complete
PARTS = ("vae", "text_encoder", "tokenizer")


def local_copy(place: str | Path, cluster: int | None = None, progress: bool = True) -> Path:
    """Returns the folder of a data set; for one in an object store, a local copy of all clusters or only `cluster`."""
    remote = place_of(place)
    if not isinstance(remote, StorePath):
        return remote
    folder = cache_folder() / "data" / hashlib.sha256(str(remote).encode()).hexdigest()[:32]
    make_folder(folder)
    with locked(folder):
        copy = _Copy(remote, folder)
        try:
            copy.update(cluster, progress)
        except StoreError as error:
            if not copy.is_whole(cluster):
                raise
            warnings.warn(f"{error}; the copy in {folder} is used as it is", stacklevel=2)
    return folder


class _Copy:
    def __init__(self, remote: StorePath, folder: Path) -> None:
        self.remote, self.folder = remote, folder
        self.versions: dict[str, object] = {}
        if (folder / RECORD).exists():
            self.versions = read_json(folder / RECORD, f"delete {folder}")

    def is_whole(self, cluster: int | None) -> bool:
        return any(self.versions.get(f"whole {part}") for part in ("None", str(cluster)))

    def update(self, cluster: int | None, progress: bool) -> None:
        DatasetCard.read(self.remote)  # raises InputError if there is no data set
        clusters, parent = cluster_folders(self.remote), clusters_in(self.remote)
        if cluster is not None and cluster not in clusters:
            names = ", ".join(path.name for path in clusters.values())
            raise InputError(f"{self.remote} has no cluster {cluster}: there are {names or 'none yet'}")
        wanted = list(clusters.values()) if cluster is None else [clusters[cluster]]
        places = [self.remote / "shards"] if parent is None else wanted
        others = [self.remote / DATASET, *([] if parent is None else [parent / PARTITION])]
        others += [path for part in PARTS for path in (self.remote / part).rglob("*")]
        shards = [(place / name, digest) for place in places for name, digest in self._sums(place).items()]
        for stale in ("clusters",) if parent is None else ("shards",):
            remove_tree(self.folder / stale)
        self.versions = {name: value for name, value in self.versions.items() if not name.startswith("whole ")}
        with (
            ThreadPoolExecutor(NUM_FILES) as pool,
            tqdm(desc="copy data", unit="B", unit_scale=True, disable=not progress, leave=False, delay=1) as bar,
        ):
            list(pool.map(lambda path: self._copy_file(path, bar), others))
            list(pool.map(lambda shard: self._copy_shard(shard[0], shard[1], bar), shards))
        for place in places:
            (self.folder / place.relative_to(self.remote) / SUMS).parent.mkdir(parents=True, exist_ok=True)
            self._copy_file(place / SUMS, bar)
        write_json(self.folder / RECORD, {**self.versions, f"whole {cluster}": True})

    def _sums(self, place: Path) -> dict[str, str]:
        """Returns the SHA-256 of each shard of a folder, and removes local shards that are no longer listed."""
        sums = read_sums(place, self.remote)
        if sums is None:
            raise InputError(f"{place / SUMS} is missing: {AGAIN}")
        for path in self._local(place).glob("*.safetensors"):
            if path.name not in sums:
                path.unlink()
        return sums

    def _local(self, path: Path) -> Path:
        return self.folder.joinpath(*path.relative_to(self.remote).parts)

    def _copy_file(self, path: Path, bar: "tqdm[None]") -> None:
        """Copies a file unless this version has been copied before."""
        assert isinstance(path, StorePath)
        with path.open_reader() as file:
            version = list(file.raw.version)  # type: ignore[attr-defined]
        name = path.relative_to(self.remote).as_posix()
        if self.versions.get(name) != version or not self._local(path).exists():
            path.download(self._local(path), bar.update)
            self.versions[name] = version

    def _copy_shard(self, path: Path, digest: str, bar: "tqdm[None]") -> None:
        assert isinstance(path, StorePath)
        local = self._local(path)
        if local.exists() and known_digest(local) == digest:
            return
        try:
            path.download(local, bar.update)
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing: {AGAIN}") from error
        if known_digest(local) != digest:
            local.unlink()
            where = printable(str(path.parent / SUMS))
            raise InputError(f"{path} is damaged, since its SHA-256 is not the one in {where}: {AGAIN}")
