"""The federation on a folder: the whole walk, leases, roles, thresholds, and refusals."""

import asyncio
import errno
import json
import re
import shutil
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.errors import InputError, StoreError
from atoll.federation import verify as verifying
from atoll.federation.charter import Charter
from atoll.federation.create import amend
from atoll.federation.keys import Identity, seal, unseal
from atoll.federation.lease import Lease, Memory, claim
from atoll.federation.registry import CREDITS, build_model
from atoll.federation.roles import Federation, FrozenError, sha256_of
from atoll.federation.status import read_status, render_text
from atoll.federation.submission import Claim, Key, Submission, list_submissions, read_submission
from atoll.object_store import Store, open_store
from atoll.storage import digest_of
from atoll.training.expert import train_expert
from federations import GATE, GOOD, SETTINGS, TRAINING, World, files_below, make_data

pytest.importorskip("tuf")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("federation") / "data")


@pytest.fixture
def world(data, tmp_path):
    return World(f"file://{tmp_path / 'store'}", tmp_path / "people", data)


@pytest.fixture
def trusting(monkeypatch):
    """Lets verifiers accept whatever passes the checks before judging."""
    monkeypatch.setattr(verifying, "judge", lambda *_, **__: GOOD)


@pytest.fixture(scope="session")
def accepted_store(data, tmp_path_factory):
    """Returns a store and its people, with ben's accepted expert of slot 0 and a pending submission for slot 1."""
    folder = tmp_path_factory.mktemp("accepted")
    world = World(f"file://{folder / 'store'}", folder / "people", data)
    world.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "judge", lambda *_, **__: GOOD)
        world.train("ben", slot=0)
        world.verify("anna")
        world.train("ben", slot=1)
    return folder


@pytest.fixture
def accepted(accepted_store, tmp_path, data):
    """Returns a copy of that store and of its people's keys."""
    shutil.copytree(accepted_store / "store", tmp_path / "store")
    shutil.copytree(accepted_store / "people", tmp_path / "people")
    return World(f"file://{tmp_path / 'store'}", tmp_path / "people", data)


def store_of(world):
    return open_store(world.url)


# --- the walk ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_walk(world, tmp_path, capsys, monkeypatch):
    """Creates, joins, trains with two objectives, verifies for real, samples; then replaces, rolls back and removes."""
    place = world.url.removeprefix("file://")
    gate = ["segment_steps=2", "segments=1", "held_out=8", "levels=2", "baseline_margin=100", "present_margin=100"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TRAINING.items()]
    world.run(
        "anna", "create", place, "--data", str(world.data), "--gate", *gate, "copy_distance=0", "samples=0", *flags
    )
    root = re.search("root: ([0-9a-f ]+)", capsys.readouterr().out)[1].strip()
    world.run("ben", "join", place, "--name", "Ben", "--root", root)
    assert "your key: " in capsys.readouterr().out
    world.run("ben", "train", place, "--slot", "0")
    world.run("anna", "verify", place)  # for real; the others are accepted without
    assert "signed by 1 of 1 verifiers and published" in capsys.readouterr().out
    monkeypatch.setattr(verifying, "judge", lambda *_, **__: GOOD)
    world.run("ben", "train", place, "--objective", "ddpm", "--seed", "1")
    out = capsys.readouterr().out
    assert "submitted" in out
    assert "for slot 1" in out
    world.run("anna", "verify", place)
    assert "refused" not in capsys.readouterr().out
    world.run("anna", "status", place, "--html", str(tmp_path / "page.html"))
    assert "2 accepted" in capsys.readouterr().out
    assert "ben" in (tmp_path / "page.html").read_text()
    with world.person("eve"):
        main(["sample", place, "a red square", "--steps", "2", "--out", str(tmp_path / "samples")])
        model = build_model(Federation.open(place))
    assert (tmp_path / "samples" / "grid.png").exists()
    assert ModelIndex.read(model).objectives == ("fm", "ddpm")
    assert "CC0-1.0" in (model / CREDITS).read_text()
    assert "first use" in capsys.readouterr().err

    before = world.open("anna").expert(0).submission
    world.train("carla", slot=0, seed=7)
    world.verify("anna")
    after = world.open("anna").expert(0)
    assert after.previous == (before,)
    assert after.about["name"] == "carla"
    world.run("anna", "rollback", place, "0")
    assert world.open("anna").expert(0).submission == before
    world.run("anna", "rollback", place, "0", "--to", "none")
    with world.person("eve"):
        assert ModelIndex.read(build_model(Federation.open(place))).objectives == ("ddpm",)
    world.run("anna", "rollback", place, "0", "--to", before[:12])
    with world.person("eve"):
        assert build_model(Federation.open(place)) == model


@pytest.mark.slow
def test_training_again_resumes_to_the_same_bits(world, monkeypatch):
    """A contributor vanishes midway; another takes over from the store and ends with the same weights."""
    world.create()
    world.train("ben", slot=0)
    [key] = list_submissions(store_of(world))
    with world.person("anna"):
        whole = read_submission(Federation.open(world.url), key).files["model.safetensors"]
    train_expert(world.data, 0, SETTINGS, world.home / "alone", progress=False)
    assert digest_of(world.home / "alone" / "model.safetensors") == whole.sha256  # the same as from `atoll train`
    other = World(f"{world.url}2", world.home, world.data)
    other.create(lease=0.3)
    from atoll.training import loop

    class Gone(BaseException):
        pass

    def gone(*_, **__):
        raise Gone

    with monkeypatch.context() as patch:
        patch.setattr("atoll.federation.lease.Holding.beat", lambda *_, **__: True)  # no more heartbeats
        original = loop.checkpoint.save
        patch.setattr(loop.checkpoint, "save", lambda *a, **k: gone() if a[2].step == 4 else original(*a, **k))
        with pytest.raises(Gone):
            other.train("carla", slot=0)
    time.sleep(1.5)
    assert "submitted" in " ".join(other.train("dora", slot=0))
    [key] = list_submissions(open_store(other.url))
    with other.person("anna"):
        submission = read_submission(Federation.open(other.url), key)
    assert submission.files["model.safetensors"] == whole
    assert [(held.person.name, held.step) for held in submission.contributors] == [("carla", 0), ("dora", 0)]


def test_own_images_stay_on_the_machine(world, tmp_path, trusting, capsys):
    """They fit a slot or open a new one; the store gets nothing of them but a card."""
    world.create()
    mine = make_data(tmp_path / "mine", num=24, clusters=0, seed=5)
    before = set(files_below(tmp_path / "store"))
    world.run("ben", "join", world.url, "--data", str(mine))
    assert re.search("for slot [01] ", capsys.readouterr().out)
    assert set(files_below(tmp_path / "store")) == before
    other = make_data(tmp_path / "other", num=24, clusters=0, kind="digits", seed=5)
    world.run("carla", "join", world.url, "--data", str(other), "--new-slot")
    assert "a new slot 2" in capsys.readouterr().out
    [card] = set(files_below(tmp_path / "store")) - before
    assert card.name == "0002.json"
    assert card.stat().st_size < 2000


@pytest.mark.slow
def test_a_server_takes_a_new_expert_without_a_dropped_request(accepted, trusting):
    """A federation's URL is served; a newly accepted expert is served from the next reload on."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from serving import eventually, in_process

    answers, ends = [], threading.Event()

    def ask(url):
        while not ends.is_set():
            answers.append(httpx.post(f"{url}/v1/images/generations", json={"prompt": "a red square", "steps": 2},
                                      timeout=120))  # fmt: skip

    with accepted.person("eve"), in_process(f"birds={accepted.url}") as (url, state):
        old = state.models.get("birds")
        assert [part["place"] for part in old.about["atoll"]["experts"]] == ["here"]
        assert re.search(r"\| ben \|.*\| anna \([0-9a-f]{8}\) \|", old.about["atoll"]["credits"])  # and its verifier
        asyncio.run(state.reload())
        assert state.models.get("birds") is old  # nothing has changed
        askers = [threading.Thread(target=ask, args=(url,)) for _ in range(2)]
        for asker in askers:
            asker.start()
        eventually(lambda: len(answers) > 3)
        accepted.verify("anna")  # the expert of slot 1
        asyncio.run(state.reload())
        after, new = len(answers), state.models.get("birds")
        assert [part["place"] for part in new.about["atoll"]["experts"]] == ["here", "here"]
        eventually(lambda: len(answers) > after + 3)
        ends.set()
        for asker in askers:
            asker.join()
    assert {answer.status_code for answer in answers} == {200}


# --- leases -----------------------------------------------------------------------------------------------------------


def people(world, names):
    found = []
    for name in names:
        with world.person(name) as identity:
            found.append(identity)
    return found


def test_of_many_who_claim_at_once_exactly_one_has_each_slot(world, tmp_path):
    identities = people(world, [f"p{i}" for i in range(12)])
    for round_ in range(3):
        store = open_store(f"file://{tmp_path / f'round{round_}'}")
        holdings = []
        start = threading.Barrier(len(identities))

        def contend(i, identity, store=store, start=start, holdings=holdings):
            start.wait()
            for slot in range(4):
                if held := claim(store, [slot], identity, lambda _: "run", 10, 60, tmp_path / f"memory{i}"):
                    holdings.append((slot, held))

        threads = [threading.Thread(target=contend, args=(i, identity)) for i, identity in enumerate(identities)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(slot for slot, _ in holdings) == [0, 1, 2, 3]
        for slot, held in holdings:
            assert Lease.read(store, slot)[0].nonce == held.lease.nonce
            held.release(0)


def test_a_lease_lives_by_its_heartbeat_and_by_the_stores_clock_alone(world, tmp_path, monkeypatch):
    ben, carla = people(world, ["ben", "carla"])
    store = open_store(f"file://{tmp_path / 'leases'}")

    def take(identity, seconds):
        return claim(store, [0], identity, lambda _: "run", 10, seconds, tmp_path / identity.person.name)

    held = take(ben, 600)
    for hours in (-3, 3):  # clocks of contributors are wrong
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, hours=hours: now + hours * 3600)
        assert take(carla, 600) is None
    monkeypatch.undo()
    time.sleep(0.4)
    assert take(carla, 0.6) is None
    assert held.beat(3)
    time.sleep(0.4)
    assert take(carla, 0.6) is None  # the heartbeat counts
    time.sleep(0.5)
    taken = take(carla, 0.6)
    assert [(by.person.name, by.step) for by in taken.lease.held] == [("ben", 0), ("carla", 3)]
    assert not held.beat(4)
    with pytest.raises(InputError, match="taken over by carla"):
        held.check()
    taken.release(5)
    held._memory.close()
    assert take(ben, 600).lease.step == 5


def test_a_killed_process_is_followed_by_another_of_the_machine_at_once(world, tmp_path):
    [ben] = people(world, ["ben"])
    store = open_store(f"file://{tmp_path / 'leases'}")

    def take():
        return claim(store, [0], ben, lambda _: "run", 10, 600, tmp_path / "memory")

    held = take()
    assert take() is None  # the first one lives
    held._memory.close()  # as when a process ends
    assert take() is not None


def test_the_heartbeat_ends_training_when_the_lease_is_lost(world, tmp_path):
    ben, carla = people(world, ["ben", "carla"])
    store = open_store(f"file://{tmp_path / 'leases'}")
    held = claim(store, [0], ben, lambda _: "run", 10, 0.2, tmp_path / "ben")
    lost = threading.Event()
    lease, etag = Lease.read(store, 0)
    stolen = lease.model_copy(update={"nonce": "0" * 32, "holder": carla.person})
    assert store.replace("leases/0000.json", stolen.model_dump_json().encode(), etag)
    with held.beating(lambda: 0, lost.set):
        assert lost.wait(30)
    assert Memory.open(tmp_path / "ben", 0) is None


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_are_for_their_owner_alone(world, tmp_path, capsys, monkeypatch):
    world.create()
    world.run("ben", "join", world.url, "--name", "Ben")
    path = world.home / "ben" / "key.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().split("\n")[1]
    assert secret not in "".join(capsys.readouterr())
    assert all(secret.encode() not in file.read_bytes() for file in files_below(tmp_path / "store"))
    path.chmod(0o644)
    with world.person("carla"):
        pass
    monkeypatch.setenv("ATOLL_HOME", str(world.home / "ben"))
    with pytest.raises(InputError, match="can be read by others"):
        Identity.load()
    path.chmod(0o600)
    path.write_text("nothing")
    with pytest.raises(InputError, match="no key that can be used"):
        Identity.load()


def test_a_statement_is_its_authors_or_nobodys(world):
    ben, carla = people(world, ["ben", "carla"])
    claimed = Claim(author=ben.person, weights="0" * 64)
    assert unseal(seal(claimed, ben), Claim, "it") == claimed
    assert seal(claimed, ben) == seal(claimed, ben)
    with pytest.raises(InputError, match="forged"):
        unseal(seal(claimed, carla), Claim, "it")
    envelope = json.loads(seal(claimed, ben))
    with pytest.raises(InputError, match="not application"):
        unseal(json.dumps(envelope).encode(), Submission, "it")
    envelope["payload"] = envelope["payload"][:-8] + "AAAAAAA="
    with pytest.raises(InputError):
        unseal(json.dumps(envelope).encode(), Claim, "it")
    for wrong in (b"", b"{}", b"[]", b"\xff", b'{"payload": 1, "payloadType": 2, "signatures": 3}'):
        with pytest.raises(InputError, match="no signed statement"):
            unseal(wrong, Claim, "it")


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_verifier_below_the_threshold_cannot_accept_alone(world, trusting):
    world.create(verifiers=("vera", "walt"), verdicts=2)
    world.train("ben", slot=0)
    assert "signed by 1 of the 2 verifiers that are needed" in " ".join(world.verify("vera"))
    assert world.open("eve").expert(0) is None
    vera = world.open("vera")
    with world.person("vera") as identity:  # she publishes it all the same
        [key] = [key for key, _ in vera.store.list("proposals")]
        role, version = key.split("/")[1].split(".")[:2]
        vera.store.copy(key, f"metadata/{version}.{role}.json")
        vera.sign_snapshot(identity, {role: int(version)})
    eve = world.open("eve")
    assert eve.expert(0) is None
    assert "not signed by enough" in eve.revoked[0]
    world.verify("walt")
    assert "published" in " ".join(world.verify("vera"))  # what she alone had signed does not count
    assert world.open("eve").expert(0).about["name"] == "ben"
    with pytest.raises(InputError, match="is no verifier"):
        world.verify("ben")


@pytest.mark.slow
def test_two_verifiers_accept_experts_of_several_slots(world, trusting):
    """Each runs once, and both sign the same bytes."""
    world.create(verifiers=("vera", "walt"), verdicts=2)
    world.train("ben", slot=0)
    world.train("ben", slot=1)
    world.verify("vera")
    world.verify("walt")
    assert set(world.open("eve").experts([0, 1])) == {0, 1}


def test_a_revoked_verifier_counts_no_more_and_another_verifies_again(accepted, trusting):
    assert accepted.open("eve").expert(0) is not None
    with accepted.person("vera") as vera:
        pass
    anna = accepted.open("anna").verifiers[0][:8]
    accepted.run("anna", "verifiers", accepted.url, "--remove", anna, "--add", f"{vera.key}=vera")
    eve = accepted.open("eve")
    assert eve.verifiers == [vera.key]
    assert eve.expert(0) is None
    assert "revoked" in eve.revoked[0]
    assert "revoked" in {slot.state for slot in read_status(eve).slots}
    with pytest.raises(InputError, match="is no verifier"):
        accepted.verify("anna")
    accepted.verify("vera")
    assert set(accepted.open("eve").experts([0, 1])) == {0, 1}
    for wrong, message in ((["--remove", "nobody"], "not one verifier"), (["--verdicts", "3"], "3 verdicts"),
                           (["--add", "key"], "no public key")):  # fmt: skip
        with pytest.raises(SystemExit):
            accepted.run("anna", "verifiers", accepted.url, *wrong)
        del message


def test_metadata_of_founders_needs_as_many_as_the_root_says(world):
    federation = world.create()
    with world.person("ben") as ben:
        pass
    with world.person("anna") as anna:
        lines = amend(federation, anna, add_founders=[ben.person], num_founders=2)
    assert any("waits for more founders" in line for line in lines)
    assert len(world.open("eve").founders) == 1
    world.run("ben", "sign", world.url)
    assert len(world.open("eve").founders) == 2
    with world.person("anna") as anna:
        lines = amend(world.open("anna"), anna, add=[ben.person])
    assert any("waits" in line for line in lines)
    assert len(world.open("eve").verifiers) == 1
    world.run("ben", "sign", world.url)
    assert len(world.open("eve").verifiers) == 2
    with pytest.raises(InputError, match="no founder"), world.person("eve") as eve:
        amend(world.open("eve"), eve, add=[eve.person])


def test_a_frozen_store_is_noticed_and_a_verifier_thaws_it(world, monkeypatch):
    world.create(fresh=86400)
    world.open("eve")

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(days=2)

    clock = SimpleNamespace(datetime=Later, timezone=timezone)
    monkeypatch.setattr("tuf.ngclient._internal.trusted_metadata_set.datetime", clock)
    monkeypatch.setattr("atoll.federation.roles.datetime", Later)
    with pytest.raises(FrozenError, match="has expired"):
        world.open("eve")
    world.verify("anna")
    world.open("eve")


def test_a_root_is_trusted_on_first_use_and_no_other_afterwards(world, tmp_path):
    root = world.create().fingerprint
    with pytest.raises(InputError, match="not the federation you mean"), world.person("ben"):
        Federation.open(world.url, "0000 " * 8)
    with world.person("ben"):
        Federation.open(world.url, root)
    shutil.rmtree(tmp_path / "store")
    World(world.url, tmp_path / "impostors", world.data).create()
    with pytest.raises(InputError, match="not signed by enough"):
        world.open("ben")


# --- what the store's operator, or a stranger with write access, can do -----------------------------------------------


def metadata_file(world, name):
    return Path(world.url.removeprefix("file://")) / "metadata" / name


def test_old_metadata_is_refused(accepted, trusting, tmp_path):
    shutil.copytree(tmp_path / "store", tmp_path / "old")
    accepted.verify("anna")
    accepted.open("eve")
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "old", tmp_path / "store")
    with pytest.raises(InputError, match="old or mixed metadata"):
        accepted.open("eve")


def test_mixed_snapshots_are_refused(accepted, trusting):
    """An old version of a slot's metadata under the name of the new one."""
    accepted.train("carla", slot=0, seed=3)
    accepted.verify("anna")
    [role] = {path.name.split(".")[1] for path in metadata_file(accepted, "").glob("2.experts-*.json")}
    shutil.copy(metadata_file(accepted, f"1.{role}.json"), metadata_file(accepted, f"2.{role}.json"))
    with pytest.raises(InputError, match="old or mixed metadata"):
        accepted.open("eve").expert(0)


@pytest.mark.parametrize("name", ["timestamp.json", "1.targets.json", "1.experts", "2.snapshot.json"])
def test_forged_signatures_are_refused(accepted, name):
    [path] = metadata_file(accepted, "").glob(f"{name}*")
    values = json.loads(path.read_text())
    values["signed"]["x-forged"] = True
    path.write_text(json.dumps(values))
    try:
        federation = accepted.open("eve")
        assert federation.expert(0) is None
        reason = federation.revoked[0]
    except InputError as error:
        reason = str(error)
    assert "not signed by enough" in reason


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"signed": {}, "signatures": []}', b"\x80\x04N."])
def test_damaged_metadata_is_one_sentence(accepted, content):
    metadata_file(accepted, "timestamp.json").write_bytes(content)
    with pytest.raises(InputError, match="damaged or forged"):
        accepted.open("eve")


def blob_of(world, slot, name):
    store = store_of(world)
    with world.person("anna"):
        federation = Federation.open(world.url)
        [key] = [key for key in list_submissions(store) if key.slot == slot]
        blob = read_submission(federation, key).files[name]
    return Path(world.url.removeprefix("file://")) / "blobs" / f"{blob.sha256}.{name.rpartition('/')[2]}"


@pytest.mark.parametrize("how", ["flipped", "longer", "pickle", "terabytes", "gone"])
def test_tampered_weights_are_refused(accepted, trusting, how):
    """By anyone who samples an accepted expert, and by anyone who verifies a pending one."""
    for slot in (0, 1):
        path = blob_of(accepted, slot, "model.safetensors")
        content = bytearray(path.read_bytes())
        if how == "flipped":
            content[-1] ^= 1
        elif how == "longer":
            content += bytes(1 << 16)
        elif how == "pickle":
            content = bytearray(b"\x80\x04c__builtin__\neval\n" + bytes(len(content) - 20))
        elif how == "terabytes":
            content[:8] = (1 << 42).to_bytes(8, "little")
        path.write_bytes(content)
        if how == "gone":
            path.unlink()
    reason = "missing" if how == "gone" else "altered in the store"
    with pytest.raises(InputError, match=reason), accepted.person("eve"):
        build_model(Federation.open(accepted.url))
    assert re.search(f"slot 1: .* refused: .*{reason}", " ".join(accepted.verify("anna")))


def test_swapped_experts_are_refused(accepted, trusting):
    """The submission for one slot in the place of the other's."""
    store = store_of(accepted)
    keys = {key.slot: key for key in list_submissions(store)}
    moved = Key(keys[0].id, 1)
    store.copy(str(keys[0]), str(moved))
    out = " ".join(accepted.verify("anna"))
    assert re.search(f"{moved.id[:12]} .*refused: .* is for slot 0, and lies in the place of one for slot 1", out)
    store.copy(str(keys[0]), str(Key(keys[1].id, 0)))  # overwritten: its name is no longer that of its content
    assert "it is not what its name says" in " ".join(accepted.verify("anna"))


def resealed(world, who, **changes):
    """Makes a submission like the pending one, changed and signed by somebody."""
    [key] = [key for key in list_submissions(store_of(world)) if key.slot == 1]
    with world.person(who) as identity:
        federation = Federation.open(world.url)
        before = read_submission(federation, key)
        card = before.model_copy(update={"author": identity.person, **changes})
        content = seal(card, identity)
        new = Key(sha256_of(content), card.slot)
        federation.store.put(str(new), content)
    return new


def judged(world, key):
    [line] = [line for line in world.verify("anna") if key.id[:12] in line]
    return line


def test_a_copy_under_a_new_name_is_refused(accepted, trusting):
    assert "the weights are a copy: ben" in judged(accepted, resealed(accepted, "mallory"))
    with pytest.raises(InputError, match="train with another --seed"):
        accepted.train("mallory", slot=1)


def test_a_submission_that_was_not_signed_by_its_author_is_refused(accepted, trusting):
    [key] = [key for key in list_submissions(store_of(accepted)) if key.slot == 1]
    with accepted.person("anna"):
        ben = read_submission(Federation.open(accepted.url), key).author
    with accepted.person("mallory") as mallory:
        federation = Federation.open(accepted.url)
        content = seal(read_submission(federation, key).model_copy(update={"author": ben, "steps": 9}), mallory)
        forged = Key(sha256_of(content), 1)
        federation.store.put(str(forged), content)
    assert "is not that of ben" in judged(accepted, forged)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slot": 9}, "there is no slot 9"),
        ({"federation": "0" * 64}, "for another federation"),
        ({"license": "secret"}, None),
        ({"files": {}}, "lacks config.json"),
        ({"size": 1 << 40}, "1,099,511,627,776 bytes, and the charter allows"),
        ({"extra": "weights.pkl"}, "only safetensors and JSON"),
        ({"extra": "checkpoints/a.pickle"}, "only safetensors and JSON"),
    ],
)
def test_submissions_that_do_not_fit_the_charter_are_refused(accepted, trusting, changes, reason):
    [key] = [key for key in list_submissions(store_of(accepted)) if key.slot == 1]
    with accepted.person("ben"):
        files = dict(read_submission(Federation.open(accepted.url), key).files)
    if "size" in changes:
        files["model.safetensors"] = files["model.safetensors"].model_copy(update=changes)
        changes = {"files": files}
    if "extra" in changes:
        changes = {"files": {**files, changes["extra"]: files["config.json"]}}
    line = judged(accepted, resealed(accepted, "ben", **changes))
    assert ("refused" in line and reason in line) if reason else "accepted" in line


@pytest.mark.slow
def test_a_licence_that_is_not_accepted_is_refused(world, trusting):
    world.create(gate=GATE.model_copy(update={"licenses": ["CC0-1.0"]}))
    with pytest.raises(InputError, match="the licence mine is not accepted here: CC0-1.0 is"):
        world.train("ben", slot=0, license="mine")
    world.train("ben", slot=0)
    world.train("ben", slot=1)
    key = resealed(world, "ben", license="mine")
    assert "the licence mine is not accepted" in judged(world, key)


def test_strangers_who_write_nonsense_everywhere_stop_nobody(accepted, trusting):
    store = store_of(accepted)
    for key in ("slots/0005.json", "slots/x", "leases/0001.json", "leases/x.json", "verdicts/x", "proposals/x.json",
                f"submissions/{'0' * 64}.0001.json", "submissions/x.json", f"authors/{'0' * 64}.json",
                "proposals/experts-0000.1.abc.json", f"verdicts/{'0' * 64}.x.y.accept.json"):  # fmt: skip
        store.put(key, b"\x80nonsense")
    lines = accepted.verify("anna")
    assert any("refused: submission 000000000000 was altered" in line for line in lines)
    assert set(accepted.open("eve").experts([0, 1])) == {0, 1}
    assert render_text(read_status(accepted.open("eve")))


# --- bad input --------------------------------------------------------------------------------------------------------


def fails(capsys, world, *arguments):
    with pytest.raises(SystemExit) as end:
        world.run("ben", *arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_bad_input_is_one_sentence(accepted, tmp_path, capsys, data):
    (tmp_path / "empty").mkdir()
    url = accepted.url
    for arguments, reason in {
        ("status", str(tmp_path / "nowhere")): "there is no folder",
        ("status", str(tmp_path / "empty")): "is no federation",
        ("status", "http://example.org"): "accepted are s3://",
        ("status", "s3://user:password@bucket"): "no user, password",
        ("train", url, "--slot", "9"): "there is no slot 9",
        ("train", url, "--data", str(tmp_path / "empty")): "",
        ("rollback", url, "0"): "is no verifier",
        ("create", str(tmp_path / "new"), "--data", str(tmp_path / "empty")): "dataset.json",
        ("create", url, "--data", str(data)): "somebody else",
        ("create", str(tmp_path / "new"), "--data", str(data), "--verdicts", "2"): "there are 1 verifier",
        ("create", str(tmp_path / "new"), "--data", str(data), "--gate", "nothing=1"): "unknown key",
        ("verifiers", url, "--verdicts", "3"): "is no founder",
    }.items():
        assert reason in fails(capsys, accepted, *arguments)
    accepted.train("ben", slot=1, seed=9)
    assert "every slot" in " ".join(accepted.train("ben"))


def test_a_charter_of_a_newer_version_is_one_sentence(world, capsys, monkeypatch):
    """Founders have signed it with a newer atoll; the rest of it is not read."""
    dump = Charter.model_dump_json
    with monkeypatch.context() as patch:
        patch.setattr(
            Charter, "model_dump_json", lambda self: json.dumps({**json.loads(dump(self)), "format": 2, "news": True})
        )
        with pytest.raises(InputError):
            world.create()
    for verb in ("status", "join", "train"):
        assert "format 2, and this version of atoll reads 1: install a newer atoll" in fails(
            capsys, world, verb, world.url
        )


@pytest.mark.slow
def test_a_store_that_may_only_be_read(accepted, trusting, capsys, monkeypatch):
    def refuse(*_, **__):
        raise StoreError("it refuses access: check the credentials in the environment")

    with accepted.person("ben"):
        main(["federation", "join", accepted.url])
    monkeypatch.setattr(Store, "put", refuse)
    monkeypatch.setattr(Store, "create", refuse)
    accepted.run("eve", "status", accepted.url)
    assert "refuses access" in fails(capsys, accepted, "train", accepted.url, "--slot", "0", "--seed", "5")
    with pytest.raises(StoreError):  # which is no verdict
        accepted.verify("anna")


def test_a_full_disk_is_one_sentence(accepted, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tuf.ngclient.updater.Updater._persist_file", full)
        assert "No space left on device" in fails(capsys, accepted, "status", accepted.url)
    monkeypatch.setattr("tuf.ngclient.updater.Updater.download_target", full)
    with pytest.raises(InputError, match=r"No space left on device\): free the disk"), accepted.person("eve"):
        build_model(Federation.open(accepted.url))


def test_status_asks_for_a_bounded_number_of_objects(accepted, monkeypatch):
    """However much was submitted and judged, object names come from listings."""
    store = store_of(accepted)
    for i in range(300):
        key = Key(f"{i:064d}", i % 2)
        store.put(str(key), b"{}")
        store.put(str(verifying.VerdictKey(key.id, key.slot, "0" * 16, "0" * 16, True)), b"{}")
    accepted.open("eve")
    calls = []
    for name in ("get", "read", "head", "get_range", "modified"):
        original = getattr(Store, name)
        monkeypatch.setattr(
            Store, name, lambda self, *a, _original=original, **k: (calls.append(a), _original(self, *a, **k))[1]
        )
    status = read_status(accepted.open("eve"))
    assert status.submissions == 302
    assert len(calls) < 30
