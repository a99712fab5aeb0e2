"""The federation on a real S3 server, by processes that share nothing but the store: faults, races and kills."""

import json
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.errors import InputError
from atoll.federation.keys import Identity
from atoll.federation.lease import Lease, claim
from atoll.federation.registry import build_model
from atoll.federation.roles import Federation
from atoll.federation.submission import Key, read_submission
from atoll.federation.verify import roll_back
from atoll.object_store import open_store
from atoll.partition.partition import partition
from atoll.sampling.pipeline import AtollPipeline
from atoll.training.router import train_router
from atoll.training.settings import RouterSettings
from federations import TRAINING, World, environment, make_data
from object_stores import BUCKET, SECRET, FaultyProxy, seaweedfs

pytest.importorskip("tuf")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
GATE = ["segment_steps=2", "segments=1", "held_out=8", "levels=2", "baseline_margin=100", "present_margin=100",
        "copy_distance=0", "samples=0"]  # fmt: skip
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TRAINING.items()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("federation") / "data")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


def atoll(home: Path, name: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    run = subprocess.run(
        [sys.executable, "-m", "atoll", *arguments], env=environment(home, name), capture_output=True, text=True,
        check=False, timeout=600, **options,
    )  # fmt: skip
    assert run.returncode == 0, f"{arguments}: {run.stderr}"
    return run


def start(home: Path, name: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "atoll", *arguments], env=environment(home, name), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_the_walk_by_separate_processes_through_a_faulty_proxy(server, tmp_path, monkeypatch, report):
    """Runs the quick benchmarks/federation_walk.py while one request in five fails: everything completes intact.

    Four slots, four contributors, of whom one trains by DDPM and one on images of their own, and two verifiers.
    """
    data = tmp_path / "data"
    settings = PrepareSettings(size=32, codec="pca:8x12", near_duplicates="keep", license="CC0-1.0")
    prepare(Source("avatars", num=160, size=32), data, settings, 0, progress=False)
    partition(data, 4, cap=1.3, progress=False)
    script = Path(__file__).parents[1] / "benchmarks" / "federation_walk.py"
    with FaultyProxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        walk = subprocess.run(
            [sys.executable, script, data, "--out", tmp_path / "walk", "--url", f"s3://{BUCKET}/faulty", "--quick"],
            capture_output=True, text=True, check=False, timeout=1100,
        )  # fmt: skip
    assert walk.returncode == 0, walk.stdout + walk.stderr
    assert "4 slots, 4 submissions; 4 accepted" in walk.stdout
    assert re.search("accepted .* emil .* ddpm, 10 steps", walk.stdout)
    assert re.search("accepted .* dora .* fm, 10 steps", walk.stdout)
    assert walk.stdout.count("signed by 2 of 2 verifiers and published") == 4
    assert walk.stdout.count("its card and held-out errors pass with the gate") == 2  # two experts of private images
    assert (tmp_path / "walk" / "samples" / "grid.png").exists()
    figures = json.loads((tmp_path / "walk" / "results.json").read_text())["federation"]
    assert 0 <= figures["prompt_accuracy"] <= 1
    assert sum(proxy.faults.values()) - proxy.faults["none"] > 20
    report(f"federation walk through a faulty proxy: {dict(proxy.faults)}")


def test_an_expert_of_images_that_nobody_else_has_joins_and_leaves(data, tmp_path):
    """Only files and card can be judged; the card adds it to the trained router; once it has left, all is as before."""
    router = tmp_path / "router"
    train_router(data, RouterSettings("8x1/4", steps=4, batch=8, sample_every=0, warmup=1), router, progress=False)
    world = World(f"file://{tmp_path / 'store'}", tmp_path / "people", data)
    world.create(router=router)
    world.train("ben", slot=0)
    world.train("ben", slot=1)
    world.verify("anna")

    def look():
        with world.person("eve"):
            pipe = AtollPipeline(build_model(Federation.open(world.url)))
        prompts = ["a red square", "a blue circle"]
        return pipe.index, pipe(prompts, seed=0, num_inference_steps=2, output_type="latent", progress=False).images

    before, images = look()
    assert before.router.centroids is None
    mine = make_data(tmp_path / "mine", num=24, clusters=0, kind="digits", seed=5)
    world.run("carla", "join", world.url, "--data", str(mine), "--new-slot")
    world.train("carla")
    with pytest.raises(InputError, match="carla's own images"):
        world.train("dora", slot=2)
    lines = " ".join(world.verify("anna"))
    assert "its files and card, and nothing else, agree" in lines
    index, _ = look()
    assert index.objectives == ("fm", "fm", "fm")
    assert index.router.model == before.router.model
    assert index.router.centroids == "centroids"  # the trained router, and the new expert's card statistics
    with world.person("anna") as anna:
        roll_back(Federation.open(world.url, refresh=False), anna, 2, "none")
    after, again = look()
    assert after == before
    assert torch.equal(images, again)


def contend(url, folder, i, num_rounds, num_slots, barrier, results):
    """Runs in one of the processes that claim slots."""
    import os

    os.environ["ATOLL_HOME"] = f"{folder}/{i}"
    identity = Identity.load_or_make(f"p{i}")
    for round_ in range(num_rounds):
        store = open_store(f"{url}/round{round_}")
        barrier.wait()
        won = []
        for slot in range(num_slots):
            if held := claim(store, [slot], identity, lambda _: "run", 10, 600, Path(folder, str(i), str(round_))):
                won.append((round_, slot, held.lease.nonce))
        results.put(won)


@pytest.mark.long
@pytest.mark.parametrize("where", ["s3", "folder"])
def test_fifty_processes_claim_eight_slots_twenty_times(server, tmp_path, where):
    num, rounds, slots = 50, 20, 8
    url = f"s3://{BUCKET}/races" if where == "s3" else f"file://{tmp_path / 'races'}"
    context = multiprocessing.get_context("forkserver")  # imports once, before any process uses a store
    context.set_forkserver_preload(["atoll.federation.lease"])
    barrier, results = context.Barrier(num), context.Queue()
    processes = [
        context.Process(target=contend, args=(url, str(tmp_path), i, rounds, slots, barrier, results))
        for i in range(num)
    ]
    for process in processes:
        process.start()
    won = [holding for _ in range(num * rounds) for holding in results.get(timeout=300)]
    for process in processes:
        process.join()
    assert sorted((round_, slot) for round_, slot, _ in won) == [(r, s) for r in range(rounds) for s in range(slots)]
    for round_, slot, nonce in won[:: len(won) // 20]:
        assert Lease.read(open_store(f"{url}/round{round_}"), slot)[0].nonce == nonce


@pytest.mark.long
def test_killed_at_any_moment_the_same_bits_are_accepted(server, data, tmp_path, report):
    """Founder, contributor and verifier are killed ten times each at random moments, and rerun until done."""
    chance, accepted, durations = random.Random(1), {}, {}
    for name, num_kills in (("undisturbed", 0), ("killed", 10)):
        url, home, kills = f"s3://{BUCKET}/{name}", tmp_path / name, 0
        commands = {
            "create": ("anna", ["--data", str(data), "--gate", *GATE, "--lease-minutes", "0.1", *FLAGS]),
            "train": ("ben", ["--slot", "0"]),
            "verify": ("anna", []),
        }
        for who in ("anna", "ben"):
            with World(url, home, data).person(who):
                pass
        for verb, (who, flags) in commands.items():
            for _ in range(num_kills):
                process = start(home, who, "federation", verb, url, *flags)
                try:  # not during imports, which take most of the time
                    process.wait(durations[verb] * chance.uniform(0.4, 1.1))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                process.communicate()
            begun = time.monotonic()
            atoll(home, who, "federation", verb, url, *flags)
            durations.setdefault(verb, time.monotonic() - begun)
        world = World(url, home, data)
        federation = world.open("eve")
        entry = federation.expert(0)
        with world.person("eve"):
            files = read_submission(federation, Key(entry.submission, 0)).files
        accepted[name] = files["model.safetensors"].sha256, files["calibration.safetensors"].sha256
        assert not federation.revoked
    assert accepted["killed"] == accepted["undisturbed"]
    report(f"federation: {kills} processes killed, the same bits accepted")


def test_a_lease_is_not_stuck_longer_than_its_time(server, data, tmp_path):
    url = f"s3://{BUCKET}/stuck"
    world = World(url, tmp_path, data)
    world.create(lease=6)
    with world.person("ben"):
        pass
    process = start(tmp_path, "ben", "federation", "train", url, "--slot", "0", "--steps", "100000")
    store = open_store(url)
    deadline = time.monotonic() + 240
    while Lease.read(store, 0)[0] is None and time.monotonic() < deadline:
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with world.person("carla") as carla:
        Federation.open(url)
        assert claim(store, [0], carla, lambda _: "run", 1, 6, tmp_path / "memory") is None
        time.sleep(8)
        assert claim(store, [0], carla, lambda _: "run", 1, 6, tmp_path / "memory") is not None


def test_credentials_that_do_not_suffice_or_expire_on_the_way(data, tmp_path, monkeypatch):
    """A reader cannot train; one who loses access midway gets one sentence, and resumes once it is restored."""
    url = f"s3://{BUCKET}/locked"
    with seaweedfs(tmp_path / "weed") as server:
        world = World(url, tmp_path, data)
        world.create()
        for name in ("ben", "carla"):
            with world.person(name):
                pass
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "reader")
            assert "2 wanted" in atoll(tmp_path, "carla", "federation", "status", url).stdout
            process = start(tmp_path, "carla", "federation", "train", url)
            assert_one_sentence(process, "refuses access: check the credentials in the environment")
        process = start(tmp_path, "carla", "federation", "status", f"{url}/elsewhere")
        assert_one_sentence(process, "is no federation: check the URL")
        process = start(tmp_path, "carla", "federation", "status", "s3://nobodys-bucket/x")
        assert_one_sentence(process, "nobodys-bucket")
        words = ["federation", "train", url, "--slot", "0", "--steps", "300", "--log-every", "10"]
        process = start(tmp_path, "ben", *words)
        store, deadline = open_store(url), time.monotonic() + 240
        while not store.list("runs/0000") and time.monotonic() < deadline:
            time.sleep(0.2)
        for secret in ("another secret", SECRET):
            server.kill()
            server.let_in(secret)
            server.start()
            if secret != SECRET:
                assert_one_sentence(process, "refuses access: check the credentials in the environment")
        assert "submitted" in atoll(tmp_path, "ben", *words).stdout


def assert_one_sentence(process: subprocess.Popen, sentence: str) -> None:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2, output
    assert sentence in output.splitlines()[-1]
    assert "Traceback" not in output
