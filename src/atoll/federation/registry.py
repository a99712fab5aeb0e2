"""Assembles a model of accepted experts: verified downloads, cached on this machine, with credits."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.cards import INDEX, ModelIndex, hash_of
from atoll.errors import InputError, printable
from atoll.federation.create import data_folder
from atoll.federation.roles import Accepted, Federation, is_federation
from atoll.federation.verify import fetch_expert
from atoll.sampling.assemble import assemble
from atoll.sampling.model_card import CREDITS, cell
from atoll.storage import write_text


def find_model(place: str | Path, revision: str | None = None) -> Path | None:
    """Returns the folder of a federation's present model; None if the place is no federation."""
    if not is_federation(place):
        return None
    if revision is not None:
        raise InputError("a federation has no revisions: `atoll federation rollback` goes back to an expert before")
    federation = Federation.open(place)
    if federation.is_new:
        root = federation.fingerprint
        print(f"atoll: first use of {federation.place}: its root {root} is trusted from now on", file=sys.stderr)
    return build_model(federation)


def build_model(federation: Federation) -> Path:
    """Downloads and assembles what has been accepted, unless it is cached; returns the folder."""
    accepted = federation.experts(federation.slots())
    for slot, reason in federation.revoked.items():
        print(printable(f"atoll: slot {slot} is left out: {reason}"), file=sys.stderr)
    if not accepted:
        raise InputError(
            f"{federation.place} has no accepted expert yet: see `atoll federation status {federation.place}`"
        )
    charter = federation.charter
    parts = {"experts": {slot: entry.submission for slot, entry in accepted.items()}, "charter": charter.model_dump()}
    out = federation.cache / "models" / hash_of(parts)[:24]
    if (out / INDEX).exists() and (out / CREDITS).exists():
        return out
    folders = [fetch_expert(federation, entry) for entry in accepted.values()]
    encoders, router = data_folder(federation, None), None
    if charter.router:
        router = (
            federation.cache / "router" / hash_of({name: blob.sha256 for name, blob in charter.router.items()})[:16]
        )
        federation.fetch_files(charter.router, router, "download router")
    index = assemble(folders, router, out, encoders, allow_missing=True, from_cards=router is None)
    write_text(out / CREDITS, credits_page(federation, accepted, index))
    return out


def credits_page(
    federation: Federation, accepted: Mapping[int, Accepted], index: ModelIndex, shares: Any = None
) -> str:
    """Returns CREDITS.md: who trained what, on how much, under which licence, and who has verified it."""
    charter = federation.charter
    rows = [
        "| expert | author | key | objective | steps | samples | FLOPs | led | licence | submission | verified by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for slot, entry in sorted(accepted.items()):
        about = entry.about
        flops, share = about.get("flops"), (shares or {}).get(slot)
        cells = [
            slot, about.get("name"), str(about.get("author"))[:8], about.get("objective"), about.get("steps"),
            about.get("samples"), f"{flops:.3g}" if isinstance(flops, int) else None,
            None if share is None else f"{share:.1%}",
            about.get("license"), entry.submission[:12],
            ", ".join(f"{charter.name_of(key)} ({key[:8]})" for key in federation.signers(slot)),
        ]  # fmt: skip
        rows.append("| " + " | ".join("" if value is None else cell(value) for value in cells) + " |")
    licenses = sorted({str(entry.about.get("license")) for entry in accepted.values()})
    return "\n".join(
        [
            f"# Credits of {cell(charter.name)}",
            "",
            *rows,
            "",
            f"Licences: data {cell(charter.license)}; experts {cell(', '.join(licenses))}.",
            f"Hash of the model: `{index.hash}`.",
            "",
        ]
    )


def with_shares(federation: Federation, model: Path) -> dict[int, float]:
    """Counts the share of steps that each expert leads over the charter's prompts, and writes it into the credits."""
    from atoll.federation.credits import lead_shares

    shares = lead_shares(model, federation.charter.prompts)
    accepted = federation.experts(federation.slots())
    page = credits_page(federation, accepted, ModelIndex.read(model), shares)
    write_text(model / CREDITS, page)
    return shares
