"""`atoll federation VERB`."""

from collections.abc import Callable
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import tyro

from atoll.cli.help import verbs_for
from atoll.config import build
from atoll.training.settings import ExpertSettings

Url = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]


def create(
    url: Url,
    data: str,
    settings: Annotated[ExpertSettings, tyro.conf.arg(name="")] = ExpertSettings(),  # noqa: B008
    name: str | None = None,
    description: str = "",
    as_: Annotated[str | None, tyro.conf.arg(name="as")] = None,
    verifier: tuple[str, ...] = (),
    verdicts: int = 1,
    router: Path | None = None,
    objectives: tuple[str, ...] = (),
    licenses: tuple[str, ...] = (),
    gate: tuple[str, ...] = (),
    lease_minutes: float = 15.0,
    fresh_days: float = 7.0,
    open_slots: bool = True,
) -> None:
    """Found a federation: sign its charter, and upload the frozen encoders and each slot's images.

    For example:
      atoll federation create s3://bucket/birds --data data --steps 4000
      atoll federation create birds --data data --as Anna --verifier KEY=Ben KEY=Carla --verdicts 2
      atoll federation create birds --data data --router run/router --gate segments=2 tolerance=0.02

    Args:
        url: An empty prefix in an object store, such as s3://bucket/birds, or a folder.
        data: A data set from `atoll prepare` and `atoll partition`: one slot per cluster.
        settings: Contributors' default training settings.
        name: Name of the federation; by default the last part of the URL.
        description: Its purpose, in a sentence or two.
        as_: Your name, as shown to others.
        verifier: Public keys of the verifiers, who accept experts, each as KEY=NAME; by default only you.
        verdicts: How many of them must accept an expert.
        router: A router trained on the data; without it, routing uses the statistics stored with each expert.
        objectives: Objectives that are accepted, such as fm ddpm; all by default.
        licenses: Expert licences that are accepted; any by default.
        gate: Requirements for accepting a submission, as NAME=VALUE: docs/federation.md lists the names.
        lease_minutes: After this long without a heartbeat, another contributor may take over a slot.
        fresh_days: How long a signed timestamp is valid, and so how long a frozen store can go unnoticed.
        open_slots: Whether contributors may open slots for their own images.
    """
    from atoll.federation.contribute import training_defaults
    from atoll.federation.create import create as make
    from atoll.federation.keys import Identity, Person

    identity = Identity.load_or_make(as_)
    values: dict[str, Any] = {"objectives": list(objectives) or None, "licenses": list(licenses) or None}
    federation = make(
        url, identity, data, name=name or url.rstrip("/").rpartition("/")[2], description=description,
        gate=_gate(gate, values), training=training_defaults(settings, ExpertSettings()), lease=lease_minutes * 60,
        fresh=fresh_days * 86400, verifiers=[Person.named(text) for text in verifier], num_verdicts=verdicts,
        router=router, open_slots=open_slots,
    )  # fmt: skip
    charter = federation.charter
    print(f"{federation.place}: {charter.name}, {len(charter.slots)} slots, founded by {identity.person.name}")
    print(f"root: {federation.fingerprint}  (tell contributors, so that they can compare it)")
    print(f"next: atoll federation train {url}, here or, after `atoll federation join {url}`, anywhere")


def join(
    url: Url,
    name: str | None = None,
    root: str | None = None,
    data: Path | None = None,
    new_slot: bool = False,
) -> None:
    """Join a federation: read its charter, trust its root, create a key, and optionally bring your own images.

    For example:
      atoll federation join s3://bucket/birds --name Ben
      atoll federation join s3://bucket/birds --root "3f2a 90b1 ..."
      atoll federation join s3://bucket/birds --data my-birds/

    Args:
        url: URL of the federation.
        name: Your name, as shown to others.
        root: The root fingerprint, as a founder gave it to you; without it, the current root is trusted.
        data: Your own images with captions: a source for `atoll prepare`, or its output. They are assigned to the
            slot they fit, or open a new one; only the slot's card is uploaded, never the images. A prepared data set
            is regrouped into that slot.
        new_slot: Open a new slot even if they fit an existing one.
    """
    from atoll.federation.create import bring
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation

    federation = Federation.open(url, root)
    identity = Identity.load_or_make(name)
    charter = federation.charter
    print(f"{charter.name}: {charter.description or 'no description'}")
    print(f"  data licence {charter.license}, {len(charter.slots)} slots, founded {charter.created}")
    print(f"  {len(federation.verifiers)} verifiers, {federation.num_verdicts} must accept an expert")
    print(f"root: {federation.fingerprint}" + ("  (compare it with what a founder tells you)" if root is None else ""))
    print(f"your key: {identity.key}={identity.person.name}")
    more = ""
    if data is not None:
        slot, folder = bring(federation, identity, data, new_slot)
        is_new = "a new slot" if slot.author is not None else "slot"
        print(f"your images are for {is_new} {slot.number} ({slot.name}); they stay in {folder}")
        more = f" --slot {slot.number}"
    print(f"next: atoll federation train {url}{more}")


def train(
    url: Url,
    settings: Annotated[ExpertSettings, tyro.conf.arg(name="")],
    slot: int | None = None,
    data: Path | None = None,
    license: str | None = None,
) -> None:
    """Train an expert for a slot that needs one, and submit it. Rerun the command to resume.

    Leases the slot while it runs, downloads its images, and uploads checkpoints regularly: if this machine is gone for
    longer than the lease, another one can resume the run.

    For example:
      atoll federation train s3://bucket/birds
      atoll federation train s3://bucket/birds --slot 3 --objective ddpm
      atoll federation train s3://bucket/birds --data my-birds/

    Args:
        url: URL of the federation.
        settings: How to train; the charter's settings are the defaults.
        slot: The number of a slot; by default any that has neither an expert nor a submission.
        data: Your own images, as for `atoll federation join`.
        license: Licence of your expert; by default that of the data.
    """
    from atoll.federation.contribute import contribute
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation

    lines = contribute(Federation.open(url), Identity.load(), settings, slot=slot, data=data, license=license)
    print(*lines, sep="\n")


def verify(url: Url, slot: int | None = None, memory_gb: float = 8.0, minutes: float = 60.0) -> None:
    """Judge pending submissions, sign a verdict on each, and accept an expert when enough verifiers agree.

    Each submission is read in a process with resource limits. Rerun the command to resume. It also renews the signed
    timestamp once half of its validity is over, so run it every few days.

    For example:
      atoll federation verify s3://bucket/birds
      atoll federation verify s3://bucket/birds --slot 3

    Args:
        url: URL of the federation.
        slot: Judge only submissions for this slot.
        memory_gb: Memory limit for judging one submission.
        minutes: CPU time limit for judging one submission.
    """
    from atoll.federation.gate import Limits
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation
    from atoll.federation.verify import verify as judge_pending

    federation, identity = Federation.open(url, refresh=False), Identity.load()
    limits = Limits(memory=int(memory_gb * (1 << 30)), seconds=minutes * 60)
    print(*judge_pending(federation, identity, limits=limits, only=slot), sep="\n")


def status(url: Url, html: Path | None = None, shares: bool = False) -> None:
    """Show slots, leases, progress, verdicts and credits.

    For example:
      atoll federation status s3://bucket/birds
      atoll federation status s3://bucket/birds --html page.html --shares

    Args:
        url: URL of the federation.
        html: Also write an HTML page to this file.
        shares: Measure each expert's share of the sampling steps on the charter's prompts; downloads the model.
    """
    from atoll.federation.page import render_page
    from atoll.federation.registry import build_model, with_shares
    from atoll.federation.roles import Federation
    from atoll.federation.status import read_status, render_text
    from atoll.storage import write_text

    federation = Federation.open(url)
    now = read_status(federation)
    if shares:
        from dataclasses import replace as changed

        now = changed(now, shares=with_shares(federation, build_model(federation)))
    print(*render_text(now), sep="\n")
    if html is not None:
        write_text(html, render_page(now))
        print(f"page: {html}")


def rollback(
    url: Url, slot: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="SLOT")], to: str | None = None
) -> None:
    """Restore a slot's previous expert. As many verifiers must run this as must accept an expert.

    For example:
      atoll federation rollback s3://bucket/birds 3
      atoll federation rollback s3://bucket/birds 3 --to 9f86d081
      atoll federation rollback s3://bucket/birds 3 --to none

    Args:
        url: URL of the federation.
        slot: The number of the slot.
        to: The submission to restore, or none to remove the expert; by default the previous one.
    """
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation
    from atoll.federation.verify import roll_back

    print(roll_back(Federation.open(url, refresh=False), Identity.load(), slot, to))
    print(f"next: atoll federation status {url}")


def verifiers(url: Url, add: tuple[str, ...] = (), remove: tuple[str, ...] = (), verdicts: int | None = None) -> None:
    """Add, revoke or replace verifiers, or change how many must accept an expert. For founders.

    To rotate a verifier's key, remove the old one and add the new one in one command. Experts signed by too few of the
    remaining verifiers are left out of the model until `atoll federation verify` has judged them again.

    For example:
      atoll federation verifiers s3://bucket/birds --add KEY=Carla --verdicts 2
      atoll federation verifiers s3://bucket/birds --remove 3f2a90b1
      atoll federation verifiers s3://bucket/birds --remove 3f2a90b1 --add KEY=Carla

    Args:
        url: URL of the federation.
        add: Public keys as KEY=NAME, as printed by `atoll federation join`.
        remove: Names, or prefixes of keys.
        verdicts: How many verifiers must accept an expert.
    """
    from atoll.federation.keys import Person

    _amend(url, add=[Person.named(text) for text in add], remove=remove, num_verdicts=verdicts)


def founders(url: Url, add: tuple[str, ...] = (), remove: tuple[str, ...] = (), needed: int | None = None) -> None:
    """Add or remove founders, or change how many of them must sign the charter and the roles.

    For example:
      atoll federation founders s3://bucket/birds --add KEY=Ben --needed 2

    Args:
        url: URL of the federation.
        add: Public keys as KEY=NAME, as printed by `atoll federation join`.
        remove: Names, or prefixes of keys.
        needed: How many founders must sign.
    """
    from atoll.federation.keys import Person

    _amend(url, add_founders=[Person.named(text) for text in add], remove_founders=remove, num_founders=needed)


def router(url: Url, folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROUTER")]) -> None:
    """Sign and publish a router that was trained on the charter's data. For founders.

    For example:
      atoll federation router s3://bucket/birds run/router

    Args:
        url: URL of the federation.
        folder: Output of `atoll train-router`.
    """
    from atoll.federation.create import publish_router
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation

    print(*publish_router(Federation.open(url), Identity.load(), folder), sep="\n")


def sign(url: Url) -> None:
    """Sign changes proposed by other founders. Review them with `atoll federation status` first.

    For example:
      atoll federation sign s3://bucket/birds

    Args:
        url: URL of the federation.
    """
    from atoll.errors import InputError
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation, sign_roles

    lines = sign_roles(Federation.open(url), Identity.load())
    if not lines:
        raise InputError(f"nothing in {url} waits for a founder's signature")
    print(*lines, sep="\n")


def _amend(url: str, **changes: Any) -> None:
    from atoll.federation.create import amend
    from atoll.federation.keys import Identity
    from atoll.federation.roles import Federation

    print(*(amend(Federation.open(url), Identity.load(), **changes) or ["nothing has changed"]), sep="\n")
    print(f"next: atoll federation status {url}")


def _gate(texts: tuple[str, ...], values: dict[str, Any]) -> Any:
    from atoll.errors import InputError
    from atoll.federation.gate import Gate
    from atoll.storage import parse_json

    for text in texts:
        name, _, value = text.partition("=")
        try:
            values[name] = parse_json(value.encode())
        except ValueError as error:
            raise InputError(f"--gate {text} must be NAME=NUMBER") from error
    return Gate.parse(values, "--gate")


VERBS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (create, join, train, verify, status, rollback, verifiers, founders, router, sign)
}


def federation() -> None:
    """Build one model with strangers, through an object store.

    `atoll federation VERB --help` lists all flags of a verb, with examples:
      atoll federation create s3://bucket/birds --data data
      atoll federation train s3://bucket/birds
      atoll federation verify s3://bucket/birds
    """


def run(arguments: list[str]) -> None:
    """Runs one of the verbs; the charter's training settings are the defaults of `train`."""
    verbs = dict(VERBS)
    settings = ExpertSettings()
    if arguments[:1] == ["train"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        from atoll.federation.roles import Federation

        chosen = Federation.open(arguments[1]).charter.training
        settings = build(ExpertSettings, chosen, "the charter's training")
    verbs["train"] = partial(train, settings=settings)
    tyro.extras.subcommand_cli_from_dict(
        verbs_for(arguments, verbs), prog="atoll federation", description=getdoc(federation), args=arguments,
        sort_subcommands=False,
    )  # fmt: skip
