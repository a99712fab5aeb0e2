"""The charter: what a federation builds, of which parts, and by which rules. Founders sign it."""

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from atoll.cards import Card, Count, Positive
from atoll.errors import InputError, shown
from atoll.federation.gate import Gate
from atoll.federation.keys import Digest, Person
from atoll.object_store import check_key

FORMAT = 1
CHARTER = "charter/charter.json"  # the name of the TUF target
MAX_CHARTER = 32 << 20  # bytes
MAX_SLOTS = 65536


def _path(name: str) -> str:
    try:
        check_key(name)
    except InputError as error:
        raise ValueError(str(error)) from error
    if not re.fullmatch(r"[\w.+-]+(/[\w.+-]+){0,3}", name) or name.startswith("."):
        raise ValueError(f"must be the name of a file within its folder, but is {shown(name)}")
    return name


FilePath = Annotated[str, AfterValidator(_path)]


class Blob(Card):
    """A file by its content hash; the store has it as blobs/SHA256.NAME."""

    sha256: Digest
    size: Count


Files = dict[FilePath, Blob]


class Slot(Card):
    """A cluster that wants an expert."""

    number: Annotated[int, Field(ge=0, lt=MAX_SLOTS)]
    name: Annotated[str, Field(max_length=80)]
    images: Count
    license: str | None = None  # required of its expert; None: any that the gate accepts
    files: Files = Field(
        default_factory=dict
    )  # of the cluster, by path in the data set; none if the images are private
    author: Person | None = None  # who opened it with images of their own

    @property
    def is_private(self) -> bool:
        return not self.files


class Charter(Card):
    """What founders sign. Contributors may add slots if it allows that; verifiers accept experts."""

    format: int
    name: Annotated[str, Field(max_length=80)]
    description: Annotated[str, Field(max_length=2000)] = ""
    created: str  # a date
    license: str  # of the data
    gate: Gate
    training: dict[str, Any] = Field(default_factory=dict)  # the contributors' default settings
    lease: Positive = 900  # seconds without a heartbeat after which a slot may be taken over
    fresh: Positive = 7 * 86400  # seconds for which a signed timestamp is valid
    open_slots: bool = True  # whether contributors may open slots for images of their own
    people: list[Person]  # names of founders and verifiers; who has which role is in the signed metadata
    slots: list[Slot]
    files: Files  # dataset.json, the frozen encoders, the partition and its centroids
    router: Files  # config.json, model.safetensors
    prompts: list[str] = Field(default_factory=list)  # over which each expert's share of led steps is counted

    @model_validator(mode="after")
    def _is_numbered(self) -> Self:
        if [slot.number for slot in self.slots] != list(range(len(self.slots))):
            raise ValueError("must number its slots from 0 on")
        return self

    @classmethod
    def read(cls, values: object, where: str) -> "Charter":
        if isinstance(values, dict) and (found := values.get("format")) != FORMAT:
            raise InputError(
                f"the charter of {where} has format {shown(found)}, and this version of atoll reads {FORMAT}: "
                "install a newer atoll"
            )
        return cls.parse(values, f"the charter of {where}")

    def name_of(self, key: str) -> str:
        return next((person.name for person in self.people if person.key == key), key[:8])
