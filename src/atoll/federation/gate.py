"""What a submission must be to be accepted, and what judging it may cost: numbers that a charter states."""

from typing import Annotated

from pydantic import Field

from atoll.cards import Card, Count, Number, Positive

Margin = Annotated[Number, Field(ge=0, le=100)]
Num = Annotated[int, Field(ge=0, le=1_000_000)]


class Gate(Card):
    """The rules by which all verifiers judge; without a value of its own, a charter takes the one here."""

    objectives: list[str] | None = None  # names as `atoll train --objective` has them; None: all
    licenses: list[str] | None = None  # None: any
    init: str | None = None  # the fingerprint of the first weights that all must start from; None: random ones

    max_weights: Count = 4 << 30  # bytes of model.safetensors
    max_other: Count = 64 << 20  # bytes of any other file but checkpoints
    max_checkpoint: Count = 16 << 30
    max_checkpoints: Num = 256

    held_out: Annotated[int, Field(ge=1, le=1_000_000)] = 1536  # images, some of them again if there are fewer
    levels: Annotated[int, Field(ge=1, le=1000)] = 12  # equal parts of the noise times
    baseline_margin: Margin = 0.0  # by how much the error may exceed the baseline's, at any level
    present_margin: Margin = 0.1  # by how much it may exceed that of the present expert, at any level
    samples: Annotated[int, Field(ge=0, le=10_000)] = 32  # captions of which two images each are made; 0: none
    sample_margin: Margin = 0.02  # by how much the ensemble's score with it may exceed that without it
    copy_distance: Margin = 0.2  # nearer to another's weights, in lengths of its own update, it is a copy

    segments: Num = 3  # that are redone; 0: none
    segment_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50  # checkpoints are at most so many steps apart
    tolerance: Positive = 0.01  # of the redone update, relative to the published one


class Limits(Card):
    """What the process that reads a submission may use."""

    memory: Count = 8 << 30  # bytes of addresses
    seconds: Positive = 3600  # of CPU time, and four times as many by the clock
    files: Annotated[int, Field(ge=32, le=65536)] = 256  # open at a time
    written: Count = 1 << 30  # bytes of any one file
