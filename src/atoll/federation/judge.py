"""Judging a submission: static checks, quality on held-out data, and replayed training, in a process with limits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.cards import Card
from atoll.federation.gate import Gate, Limits


class Judgement(Card):
    accepted: bool
    reason: str  # one sentence
    figures: dict[str, Any]  # static, quality, replay: as far as it came


def judge(
    submission: Path,
    *,
    slot: int,
    gate: Gate,
    data: Path,
    present: Path | None = None,
    others: Sequence[Path] = (),
    limits: Limits | None = None,
    seed: int | None = None,
    private: bool = False,
) -> Judgement:
    """Returns what a verifier thinks of the folder `submission`, an expert of `slot`; it never raises for its content.

    `data` is a data set with the slot's cluster; `present` the folder of the expert that has the slot now; `others` are
    folders of experts that it must not be a copy of. `seed` chooses what is replayed: by default nobody can know it
    before. An expert of `private` data is judged without a replay, and by the slot's held-out data alone.
    """
    return Judgement(accepted=False, reason="it was not judged: this version of atoll cannot yet", figures={})
