"""Cards: typed descriptions of things on disk. Code relies on nothing in these files beyond what a card declares.

Cards are frozen and strict, and reject unknown keys. Errors are one sentence that names the file, the key and what was
expected. A card keeps the values of its file unchanged, so that hashes of old files stay the same.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from tqdm import tqdm

from atoll.errors import InputError, shown
from atoll.storage import check_size, digest_of, known_digest, read_json, reason_of, write_json
from atoll.tensors import TensorFile

INDEX, CONFIG, DATASET, PARTITION = "model_index.json", "config.json", "dataset.json", "partition.json"
FORMAT, CLASS = 1, "AtollPipeline"
NETWORK = ("format", "model", "architecture", "sha256")  # keys of config.json that describe the network alone
AGAIN = "copy it again from its source"
MADE = "give a folder that `atoll assemble` has made"
MAX_SIDE = 8192  # pixels of an image
MAX_OTHER = 64 << 20  # bytes of a file that is not weights
WORDS = {
    "model_type": "a table of keys and values", "dict_type": "a table of keys and values", "list_type": "a list",
    "string_type": "a text", "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)


def is_plain(name: object) -> bool:
    """Returns whether a name from an untrusted file stays within its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _plain(name: str) -> str:
    _require(is_plain(name), f"must be a plain name, but is {shown(name)}")
    return name


def _file(name: str) -> str:
    parts = name.split("/")
    _require(len(parts) == 2 and all(map(is_plain, parts)), f"must be named as FOLDER/NAME, but one is {shown(name)}")
    return name


Name = Annotated[str, AfterValidator(_plain)]
FileName = Annotated[str, AfterValidator(_file)]
Size = Annotated[int, Field(ge=1, le=65536)]
Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Number = int | float  # integers stay integers, so that a card equals its file
Positive = Annotated[Number, Field(gt=0, lt=math.inf)]


class Card(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)

    @classmethod
    def parse(cls, values: object, where: str) -> Self:
        """Returns the card in a file's content; `where` names the file in error messages."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{where} {_fault(error)}: {AGAIN}") from error

    def values(self) -> dict[str, Any]:
        """Returns the content of the card's file, without keys that it leaves out."""
        return self.model_dump(exclude_unset=True, by_alias=True)


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key, kind = shown(".".join(map(str, first["loc"]))) if first["loc"] else "content", first["type"]
    if kind == "missing":
        return f"is damaged, it lacks {key}"
    if kind == "extra_forbidden":
        return f"has the unknown key {key}, a newer atoll may have written it"
    if kind == "value_error":
        return f"is damaged, its {key} {first['ctx']['error']}"
    expected = WORDS.get(kind) or first["msg"].partition("should be ")[2] or first["msg"]
    return f"is damaged, its {key} must be {expected}, but is {shown(first['input'])}"


class CodecCard(Card):
    spec: str
    kind: str | None = Field(None, alias="class")  # of a VAE
    dtype: str
    channels: Size
    factor: Size
    explained_variance: Number | None = None  # of pca
    shift: list[Number] | None = None  # of a VAE, as is the next
    scale: list[Number] | None = None
    decoder: str | None = None  # the fingerprint of decoder-only weights, which do not affect latents: a refiner
    fingerprint: str  # of everything else

    @property
    def images(self) -> str:
        """Returns a key that distinguishes codecs that decode the same latents differently."""
        return self.fingerprint if self.decoder is None else hash_of([self.fingerprint, self.decoder])


class TextEncoderCard(Card):
    spec: str
    dtype: str
    dim: Size
    max_length: Size
    hide_padding: bool | None = None  # of CLIP
    fingerprint: str


class FeaturesCard(Card):
    spec: str
    dtype: str
    dim: Size | None = None  # None: a score, not features
    transform: str
    fingerprint: str


EncoderCard = CodecCard | TextEncoderCard | FeaturesCard  # of the frozen networks around the model


class LatentSpace(Card):
    shape: Annotated[list[Size], Len(3, 3)]  # [C, S, S]
    codec: CodecCard

    @model_validator(mode="after")
    def _is_a_picture(self) -> Self:
        pixels = self.shape[1] * self.codec.factor
        _require(pixels <= MAX_SIDE, f"gives images of {pixels} pixels a side, and the most is {MAX_SIDE}")
        return self


class SourceCard(Card):
    """The source of a data set's images; of a path only the last part is recorded."""

    name: str
    kind: str
    template: str | None = None
    caption_column: str | None = None
    num: Count | None = None
    seed: int | None = None
    follow_links: bool = False
    items: Count
    keys: str  # a digest of the items' names and captions
    captions: Annotated[int, Field(ge=1, le=255)] = 1  # maximum per image


class PrepareCard(Card):
    """How the images of a data set were prepared: `PrepareSettings` without machine-specific paths."""

    size: Annotated[int, Field(ge=1, le=MAX_SIDE)]
    codec: str
    text: str
    features: str
    holdout: Number
    near_duplicates: str
    min_side: int | None
    max_aspect: Number
    license: str
    flip: bool = False
    crop: str = "centre"


class Counts(Card):
    rows: Count
    train: Count
    held_out: Count
    rejected: Count


class BegunDatasetCard(Card):
    """dataset.json while the data set is being prepared: a run may resume only if its own card is equal."""

    format: int = FORMAT
    complete: bool
    license: str
    source: SourceCard
    settings: PrepareCard
    text: TextEncoderCard
    features: FeaturesCard


class DatasetCard(BegunDatasetCard):
    """dataset.json of a finished data set."""

    counts: Counts
    codec: CodecCard
    latent_shape: Annotated[list[Size], Len(3, 3)]  # [C, S, S]

    @model_validator(mode="after")
    def _is_what_the_codec_makes(self) -> Self:
        side = self.settings.size // self.codec.factor
        expected = [self.codec.channels, side, side]
        _require(self.latent_shape == expected, f"has latents {self.latent_shape}, but its codec makes {expected}")
        return self

    @property
    def latent_space(self) -> LatentSpace:
        return LatentSpace(shape=self.latent_shape, codec=self.codec)

    @classmethod
    def read(cls, folder: Path) -> "DatasetCard":
        values = read_json(folder / DATASET, "give a folder that `atoll prepare` has made")
        if values.get("format") != FORMAT:
            has = shown(values.get("format"))
            raise InputError(f"{folder} has format {has}, and this version of atoll reads {FORMAT}")
        if values.get("complete") is not True:
            raise InputError(f"{folder} is not finished: rerun the same `atoll prepare` command to resume")
        return cls.parse(values, str(folder / DATASET))


class PartitionCard(Card):
    """partition.json: how a data set was partitioned, how well, and what it was prepared with."""

    format: int = FORMAT
    method: str
    seed: int
    metric: str | None = None  # of k-means, as are the next two
    fine: int | None = None
    cap: Number | None = None
    num_clusters: Annotated[int, Field(ge=1, le=65536)]
    sizes: list[Count]
    share_of_largest: Number
    balance: Number  # the largest size over the mean size
    mean_distance: list[Number]
    inertia: Number
    silhouette: Number | None
    latent_shape: Annotated[list[Size], Len(3, 3)]  # [C, S, S]
    features: FeaturesCard
    codec: CodecCard
    text: TextEncoderCard

    @classmethod
    def read(cls, folder: Path) -> "PartitionCard":
        path = folder / PARTITION
        return cls.parse(read_json(path, f"run `atoll partition {folder.parent} --experts K`"), str(path))

    def write(self, folder: Path) -> None:
        write_json(folder / PARTITION, {"format": self.format, **self.values()})


class DataCard(Card):
    """The part of a data set that an expert or a router was trained on."""

    name: str | None = None
    fingerprint: str | None = None
    cluster: int | None = None  # None: all of the data
    pictures: int | None = None
    held_out: int | None = None
    variance: Number | None = None
    license: str | None = None


class PartCard(Card):
    """The content of an expert's or router's config.json besides the architecture."""

    latent_space: LatentSpace
    text_encoder: TextEncoderCard | None = None  # None: ignores the text
    data: DataCard | None = None
    training: dict[str, Any] | None = None
    license: str | None = None

    @property
    def cluster(self) -> int | None:
        return None if self.data is None else self.data.cluster

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Returns the card in a part's folder."""
        about = read_json(folder / CONFIG, "give the folder of an expert or a router, trained to its end")
        return cls.parse({key: value for key, value in about.items() if key not in NETWORK}, str(folder / CONFIG))


class ExpertCard(PartCard):
    objective: dict[str, Any]
    init: dict[str, Any] | None = None  # provenance of the initial weights; None: random
    calibration: str | None = None
    guidance: Positive = 1.0  # scale distilled into it, so that sampling needs no guidance; 1: none
    steps: Annotated[int, Field(ge=1, le=1000)] | None = None  # the number it must be sampled in; None: any


class RouterCard(PartCard):
    temperature: Positive = 1.0


class ObjectiveName(Card):
    name: str
    prediction: str | None = None
    schedule: str | None = None


class ExpertEntry(Card):
    folder: Name
    cluster: int | None
    objective: ObjectiveName
    license: str | None = None


class RouterEntry(Card):
    folder: Name
    model: str
    reads_text: bool
    temperature: Positive = 1.0
    centroids: Name | None = None  # folder of a centroid router, for experts that this one does not know


class ModelIndex(Card):
    """model_index.json: the parts of a model, and the SHA-256 of every file."""

    num_experts: Annotated[int, Field(ge=1, le=65536)]
    experts: list[ExpertEntry | None]  # None: missing
    router: RouterEntry | None
    latent_space: LatentSpace
    text_encoder: TextEncoderCard
    license: str
    files: dict[FileName, str]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        num, listed = self.num_experts, len(self.experts)
        _require(num == listed, f"says that num_experts is {num}, but {listed} experts are listed")
        parts = [part.folder for part in (*self.experts, self.router) if part is not None]
        parts += [self.router.centroids] if self.router is not None and self.router.centroids is not None else []
        for name, count in Counter(parts).items():
            _require(count == 1, f"names {shown(name)} for {count} parts")
        for k, part in enumerate(self.experts):
            cluster = k if part is None or self.router is None else part.cluster
            alone = num == 1 and cluster is None
            _require(cluster == k or alone, f"has the expert of cluster {cluster} in the place of {k}")
        return self

    @property
    def hash(self) -> str:
        """Returns the model's hash: models with the same hash have the same files, in the same places."""
        return hash_of(self.values())

    @property
    def objectives(self) -> tuple[str | None, ...]:
        """Returns each expert's objective by name; None for a missing expert."""
        return tuple(None if part is None else part.objective.name for part in self.experts)

    def write(self, folder: Path) -> None:
        write_json(folder / INDEX, {"_class_name": CLASS, "format": FORMAT, **self.values(), "hash": self.hash})

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
        index = cls.parse(values, str(path))
        if hash_of(values) != promised:
            raise InputError(f"{path} was altered, its hash is not that of what it says: assemble the model again")
        return index

    # --- the files ------------------------------------------------------------------------------------------------

    def verify(self, folder: Path, again: bool = True, experts: bool = True) -> None:
        """Raises InputError if a file differs from the assembled one; parts may be missing altogether.

        With `again` every file is rehashed; otherwise hashes are cached until a file changes. Without `experts`, their
        weights are only opened: `verify_part` hashes them before they are first loaded.
        """
        folders = {part.folder for part in self.experts if part is not None}
        for name in tqdm(self.files, "verify", unit=" files", disable=None, leave=False, delay=1):
            is_later = not experts and name.split("/")[0] in folders and name.endswith(".safetensors")
            self._verify_file(folder, name, None if is_later else digest_of if again else known_digest)

    def verify_part(self, folder: Path, part: str) -> None:
        """Raises InputError if a file of the part differs from the assembled one."""
        for name in self.files:
            if name.split("/")[0] == part:
                self._verify_file(folder, name, known_digest)

    def _verify_file(self, folder: Path, name: str, digest: Callable[[Path, Path], str] | None) -> None:
        path = folder / name
        if not path.parent.exists():
            return
        if path.suffix == ".safetensors":  # checks the header first, so that a file with bogus sizes is not hashed
            TensorFile(path, AGAIN, folder).close()
        if digest is not None and file_digest(path, folder, digest) != self.files[name]:
            raise InputError(f"{path} is not the file that the model was made of: {AGAIN}")


def hash_of(value: Any) -> str:
    """Returns the SHA-256 of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path, root: Path, digest: Callable[[Path, Path], str] = digest_of) -> str:
    """Returns the SHA-256 of a file of a model."""
    try:
        if path.suffix != ".safetensors":
            check_size(path, MAX_OTHER, root)
        return digest(path, root)
    except OSError as error:
        raise InputError(f"cannot read {path} ({reason_of(error)}): {AGAIN}") from error


def require_same(theirs: EncoderCard, ours: EncoderCard, what: str, path: str | Path, model: str | Path) -> None:
    """Raises InputError for a part or data whose codec, text encoder or features (`what`) differ from those of `model`.

    Only fingerprint and dtype matter: the same weights in another folder are the same. A codec's `decoder` does not,
    since latents do not depend on it.
    """
    if (theirs.fingerprint, theirs.dtype) != (ours.fingerprint, ours.dtype):
        one, other = (f"{shown(card.spec)[1:-1]}, {card.dtype}, {card.fingerprint[:8]}" for card in (theirs, ours))
        raise InputError(
            f"{path} does not fit: its {what} ({one}) is not that of {model} ({other}), "
            f"so prepare the data with the same {what}, or give parts that were made from one data set"
        )


def require_fit(
    path: str | Path, card: PartCard, latents: LatentSpace, text: TextEncoderCard, model: str | Path
) -> None:
    """Raises InputError for an expert or router whose latents or text encoder differ from those of `model`."""
    require_same(card.latent_space.codec, latents.codec, "codec", path, model)
    if card.latent_space.shape != latents.shape:
        raise InputError(
            f"{path} does not fit: it takes latents {card.latent_space.shape}, not {latents.shape} as the others, "
            "so give parts that were made from one data set"
        )
    if card.text_encoder is not None:  # a router may ignore the text
        require_same(card.text_encoder, text, "text encoder", path, model)
