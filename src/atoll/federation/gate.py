"""What a submission must satisfy to be accepted, which a charter states, and what judging it may cost."""

from typing import Annotated

from pydantic import Field

from atoll.cards import Card, Count, Number, Positive

Margin = Annotated[Number, Field(ge=0, le=100)]
Num = Annotated[int, Field(ge=0, le=1_000_000)]


class Gate(Card):
    """The rules by which all verifiers judge, with the defaults for what a charter does not state."""

    objectives: list[str] | None = None  # names as in `atoll train --objective`; None: all
    licenses: list[str] | None = None  # None: any
    init: str | None = None  # the fingerprint of the weights that all must start from; None: random weights

    max_weights: Count = 4 << 30  # bytes of model.safetensors
    max_other: Count = 64 << 20  # bytes of any other file but checkpoints
    max_checkpoint: Count = 16 << 30
    max_checkpoints: Num = 256

    held_out: Annotated[int, Field(ge=1, le=1_000_000)] = 1536  # images, some repeated if there are fewer
    levels: Annotated[int, Field(ge=1, le=1000)] = 12  # equal intervals of the noise times
    baseline_margin: Margin = 0.0  # by how much the error may exceed the baseline's, at any level
    present_margin: Margin = 0.1  # by how much it may exceed that of the present expert, at any level
    samples: Annotated[int, Field(ge=0, le=10_000)] = 32  # captions, with two generated images each; 0: none
    sample_margin: Margin = 0.02  # by how much the ensemble's score with it may exceed that without it
    copy_distance: Margin = 0.2  # an expert nearer to another's weights, in lengths of its own update, is a copy

    segments: Num = 3  # to replay; 0: none
    segment_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50  # checkpoints are at most this many steps apart
    tolerance: Positive = 0.01  # of the replayed update, relative to the published one


class Limits(Card):
    """Resource limits of the process that reads a submission."""

    memory: Count = 8 << 30  # bytes of address space
    seconds: Positive = 3600  # of CPU time, and four times as many of wall-clock time
    files: Annotated[int, Field(ge=32, le=65536)] = 256  # open at once
    written: Count = 1 << 30  # bytes of any one file
