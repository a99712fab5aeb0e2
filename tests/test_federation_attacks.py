"""Forged submissions through the whole chain: uploaded, signed, downloaded, judged for real and refused for a reason.

Attacks by the store's operator on signed metadata, and who may accept, are in test_federation.py; more of judging is
in test_judge.py and test_replay.py.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.errors import InputError
from atoll.federation import verify as verifying
from atoll.federation.judge import judge_here
from atoll.federation.roles import Federation
from atoll.federation.submission import Key, list_submissions, submit
from atoll.federation.verify import list_verdicts, read_verdict
from atoll.networks.dit import DiT
from atoll.object_store import open_store
from atoll.storage import digest_of
from federations import World
from submissions import GATE, data, edit_checkpoint, edit_json, edit_weights, evaluated, relabel, seal

pytest.importorskip("tuf")
__all__ = ["data", "evaluated"]  # fixtures
FOUND = GATE.model_copy(update={"baseline_margin": 0.1})


@pytest.fixture(scope="module")
def founded(data, tmp_path_factory):
    """Returns a federation with open slots."""
    folder = tmp_path_factory.mktemp("attacked")
    World(f"file://{folder / 'store'}", folder / "people", data).create(gate=FOUND)
    return folder


@pytest.fixture
def world(founded, data, tmp_path, monkeypatch):
    """Returns a copy of that federation; its verifiers judge for real, within this process."""

    def judge(folder, *, gate, data, present, others, limits, like, private, slot):
        return judge_here(
            str(folder), slot, gate, str(data), None if present is None else str(present), list(map(str, others)), 1,
            private, like,
        )  # fmt: skip

    monkeypatch.setattr(verifying, "judge", judge)
    for part in ("store", "people"):
        shutil.copytree(founded / part, tmp_path / part)
    return World(f"file://{tmp_path / 'store'}", tmp_path / "people", data)


@pytest.fixture
def stolen(data, tmp_path) -> Path:
    """Returns a complete run of slot 0 to tamper with."""
    return Path(shutil.copytree(data.with_name("run_0"), tmp_path / "stolen"))


def offer(world: World, who: str, run: Path, slot: int = 0, private: bool = False) -> Key:
    """Submits a run as a modified client might: nothing is checked on its machine."""
    with world.person(who) as identity:
        federation = Federation.open(world.url)
        return submit(federation, identity, slot, run, license="unknown", held=[], private=private)


def verdict(world: World, key: Key) -> str:
    return next(line for line in world.verify("anna") if key.id[:12] in line)


def refused(world: World, key: Key, reason: str) -> None:
    """Checks that it is refused in one sentence, gets no slot, and is not judged again."""
    line = verdict(world, key)
    assert re.search(f"refused: .*{reason}", line), line
    assert "\n" not in line
    present = world.open("eve").expert(key.slot)
    assert present is None or present.submission != key.id
    assert not any(key.id[:12] in line for line in world.verify("anna"))


def forge(run: Path, data: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """Gives a run other weights, with a matching last checkpoint and figures that are true of them."""
    last = max((run / "state").glob("*.safetensors"))
    averaged = {name: change(tensor) for name, tensor in load_file(last).items() if name.startswith("averaged.")}
    edit_checkpoint(last, averaged)
    trained = {name.removeprefix("averaged."): tensor for name, tensor in averaged.items()}
    save_file({**load_file(run / "model.safetensors"), **trained}, run / "model.safetensors")
    seal(run)
    relabel(run, data, 0)
    return run


@pytest.mark.slow
def test_an_honest_one_is_accepted(world, data):
    key = offer(world, "ben", data.with_name("run_0"))
    assert "accepted: its card, held-out errors and replayed training agree" in verdict(world, key)
    entry = world.open("eve").expert(0)
    assert (entry.submission, entry.about["name"], entry.about["steps"]) == (key.id, "ben", 120)


def test_not_finite_weights(world, stolen):
    edit_weights(stolen, lambda tensor: tensor * torch.nan)
    refused(world, offer(world, "mallory", stolen), "not finite")


def test_a_pickle_in_place_of_safetensors(world, stolen):
    (stolen / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n" + bytes(100))
    seal(stolen)
    refused(world, offer(world, "mallory", stolen), "not a safetensors file")


def test_a_header_that_claims_terabytes(world, stolen):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (stolen / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    seal(stolen)
    refused(world, offer(world, "mallory", stolen), "not a safetensors file")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda card: card["training"].update(steps=9000), "its card claims training.steps 9000, but it is 120"),
        (lambda card: card["data"].update(fingerprint="0" * 64), "its card names other data than those of slot 0"),
    ],
)
def test_a_card_that_lies(world, stolen, change, reason):
    edit_json(stolen / "config.json", change)
    refused(world, offer(world, "mallory", stolen), reason)


def test_a_manifest_that_lies(world, stolen, monkeypatch):
    """The card is right, but the manifest's credits are not."""
    import atoll.federation.submission as module

    honest = module.claims_of
    monkeypatch.setattr(module, "claims_of", lambda folder: {**honest(folder), "steps": 9000})
    refused(world, offer(world, "mallory", stolen), "its manifest claims steps 9000, but its card says 120")


def test_random_weights(world, stolen, data):
    torch.manual_seed(0)
    forge(stolen, data, lambda tensor: 0.1 * torch.randn(tensor.shape))
    refused(world, offer(world, "mallory", stolen), "times what captions alone allow")


def test_an_expert_of_another_cluster(world, data, tmp_path):
    run = Path(shutil.copytree(data.with_name("run_1"), tmp_path / "other"))
    refused(world, offer(world, "mallory", run), "it is the expert of cluster 1, not of slot 0")
    relabel(run, data, 0)
    refused(world, offer(world, "mallory", run), "times what captions alone allow|redone, lead elsewhere")


def test_good_on_average_and_bad_at_one_noise_level(world, stolen, data, monkeypatch):
    """A network that answers wrongly for t from 0.35 to 0.45 alone.

    Its card would be true of another network, which recomputing the card reveals. For images that only their owner has,
    the card is not recomputed and nothing is replayed: then the error at each level refuses it.
    """
    honest = DiT.forward

    def spoiled(network, x, t, *text):
        output = honest(network, x, t, *text)
        bad = (t > 0.35) & (t < 0.45)
        return torch.where(bad.view(-1, 1, 1, 1), output.flip(2), output)

    monkeypatch.setattr(DiT, "forward", spoiled)
    refused(world, offer(world, "mallory", stolen), r"its card claims training\.held_out")
    key = offer(world, "mallory", stolen, private=True)
    refused(world, key, r"error on held-out images at noise times 0\.33 to 0\.50 is 1\.[2-9]")
    with world.person("anna"):
        federation = Federation.open(world.url)
        [name] = list_verdicts(federation.store)[key]
        quality = read_verdict(federation, name).figures["quality"]
    assert sum(quality["expert"]) < 1.05 * sum(quality["baseline"])  # a gate on the average would not catch it


class TestBeside:
    """Attacks on a slot that has ben's expert."""

    @pytest.fixture
    def taken(self, world, data):
        key = offer(world, "ben", data.with_name("run_0"))
        assert "accepted" in verdict(world, key)
        return key

    def test_a_copy_under_a_new_name(self, world, taken, stolen, data):
        with pytest.raises(InputError, match="is the expert that ben"):
            offer(world, "mallory", stolen)
        generator = torch.Generator().manual_seed(0)
        forge(
            stolen, data, lambda tensor: tensor + 1e-2 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        )
        refused(world, offer(world, "mallory", stolen), "it is a copy of")
        assert world.open("eve").expert(0).submission == taken.id

    @pytest.mark.slow
    def test_worse_than_the_present_one(self, world, taken, stolen, data):
        forge(stolen, data, lambda tensor: 0.7 * tensor)
        refused(world, offer(world, "mallory", stolen), "times (what captions|that of the present)|it is a copy of")


@pytest.mark.slow
def test_a_submission_that_another_has_overwritten_can_be_uploaded_again(world, data, tmp_path):
    """This goes for manifest and files: no verdict is signed on what the author did not submit."""
    key = offer(world, "ben", data.with_name("run_0"))
    store = open_store(world.url)
    store.put(str(key), b"{}")
    line = verdict(world, key)
    assert "was altered" in line
    assert "no verdict is signed" in line
    offer(world, "ben", data.with_name("run_0"))
    weights = (
        tmp_path / "store" / "blobs" / f"{digest_of(data.with_name('run_0') / 'model.safetensors')}.model.safetensors"
    )
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    line = verdict(world, key)
    assert "altered in the store" in line
    assert "no verdict is signed" in line
    assert not store.list("verdicts")
    assert offer(world, "ben", data.with_name("run_0")) == key
    assert "accepted" in verdict(world, key)
    assert [key.id for key in list_submissions(store)] == [world.open("eve").expert(0).submission]
