"""The Ray engine on clusters of several nodes on this machine: the bits of the local engine, whatever dies."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.engines.engine import Job, Resources
from atoll.engines.ray import Actor
from atoll.engines.settings import EngineSettings
from atoll.errors import InputError
from atoll.partition.partition import partition
from atoll.training.metrics_log import read_metrics
from clusters import ray_cluster
from test_engines import is_alive

ray = pytest.importorskip("ray")
SCRIPT = "import json, sys; json.dump(dict(complete=True, steps_done=5), open(sys.argv[1], 'w'))"


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """Three nodes of two logical CPUs each, with token authentication as Ray has it by default."""
    assert os.environ.get("RAY_AUTH_MODE") != "disabled"
    with ray_cluster(3) as nodes:
        yield nodes


class TestShort:
    def test_jobs_and_functions(self, tmp_path):
        """All that a small cluster of one node does, in one test: it takes longer to start than to use."""

        def negative(number: int) -> int:
            if number == 0:
                raise InputError("zero has no sign: give another number")
            return -number

        with ray_cluster(1) as cluster:
            engine = EngineSettings("ray", cluster.address).open("cpu")
            assert list(engine.map(negative, range(1, 9))) == [-1, -2, -3, -4, -5, -6, -7, -8]
            with pytest.raises(InputError, match="zero has no sign"):
                list(engine.map(negative, [1, 0]))
            folder = tmp_path / "a"
            (run,) = engine.run([Job("a", [sys.executable, "-c", SCRIPT, str(folder / "run.json")], folder, 5)], False)
            assert run.status == "done"
            for resources, what in ((Resources(9), "9 CPUs and 0 GPUs"), (Resources(1, 1), "1 CPUs and 1 GPUs")):
                with pytest.raises(InputError) as error:
                    engine.run([Job("a", [], tmp_path / "b", 5, resources)])
                assert f"asks for {what}, and no node of the cluster has them" in str(error.value)
                assert "(there are nodes with 2 CPUs and 0 GPUs): ask for less, or add a node" in str(error.value)


class TestMistakes:
    def test_no_cluster(self):
        with pytest.raises(InputError, match=r"there is no Ray cluster at 127\.0\.0\.1:1 .*: start one by `ray start"):
            EngineSettings("ray", "127.0.0.1:1").open()

    def test_no_ray(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(InputError, match=r"this needs ray: pip install 'atoll\[ray\]'"):
            EngineSettings("ray").open()

    def test_flags(self):
        with pytest.raises(InputError, match="unknown engine 'rya': did you mean 'ray'"):
            EngineSettings("rya")
        with pytest.raises(InputError, match="--address is of a Ray cluster: add --engine ray"):
            EngineSettings(address="10.0.0.1:6379")
        with pytest.raises(InputError, match="--at-a-time must be at least 1"):
            EngineSettings(at_a_time=0)

    def test_a_node_that_does_not_share_the_folder(self, tmp_path):
        job = Job("a", [sys.executable, "-c", "pass"], tmp_path / "elsewhere", 5)
        with pytest.raises(OSError, match=r"does not see .*elsewhere, give --out in a folder that all nodes share, or"):
            Actor().start(job, "", tmp_path, sys.executable)
        assert not job.folder.exists()
        assert Actor().start(replace(job, is_shared=False), "", tmp_path, sys.executable).code in (None, 0)

    @pytest.mark.slow
    @pytest.mark.cluster
    @pytest.mark.parametrize(("version", "has"), [("9.9.9", "atoll 9.9.9"), (None, "no atoll")])
    def test_a_node_that_would_train_something_else(self, tmp_path, version, has):
        """Its packages are described by another folder, which Python looks into first."""
        shadow = "import importlib.metadata as m\nreal = m.version\ndef version(name):\n    if name != 'atoll':\n"
        shadow += "        return real(name)\n" + (
            f"    return {version!r}\n" if version else "    raise m.PackageNotFoundError(name)\n"
        )
        (tmp_path / "sitecustomize.py").write_text(shadow + "m.version = version\n")
        with ray_cluster(1) as cluster:
            cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
            with pytest.raises(InputError) as error:
                EngineSettings("ray", cluster.address).open()
        assert f" has {has}, and here it is " in str(error.value)
        assert str(error.value).endswith("install the same version on every node")


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "avatars"
    settings = PrepareSettings(size=16, codec="pixels", holdout=0.1)
    prepare(Source("avatars", num=400, size=16), folder, settings, 0, progress=False)
    partition(folder, 4, cap=1.3, progress=False)
    return folder


def train_all(data: Path, out: Path, *flags: str) -> list[str]:
    sizes = "--model xs/4 --steps 150 --batch 16 --log-every 5 --save-every 10 --eval-every 50 --sample-every 0"
    router = "--router --router.model xs/4 --router.steps 60 --router.batch 16 --router.sample-every 0"
    chosen = ["--objectives", "1ddpm:3fm", "--device", "cpu", "--router.device", "cpu"]
    return ["train-all", str(data), "--out", str(out), *sizes.split(), *router.split(), *chosen, *flags]


PARTS = [*(f"expert_{k}" for k in range(4)), "router"]


def contents(out: Path) -> dict[str, object]:
    """Returns the files of all parts to the byte, and of metrics and checkpoints all but how long they took."""
    found: dict[str, object] = {}
    for part in PARTS:
        for name in ("model.safetensors", "config.json"):
            found[f"{part}/{name}"] = (out / part / name).read_bytes()
        timeless = [
            {key: value for key, value in line.items() if key not in ("seconds", "samples_per_second")}
            for line in read_metrics(out / part)
        ]
        found[f"{part}/metrics"] = json.dumps(timeless)
        last = sorted((out / part / "state").glob("*.safetensors"))[-1]
        found[f"{part}/checkpoint"] = {name: t.numpy().tobytes() for name, t in load_file(last).items()}
    return found


@pytest.fixture(scope="module")
def local(data, tmp_path_factory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("local") / "run"
    main(train_all(data, out))
    return contents(out)


def pids_below(folder: Path) -> list[int]:
    """Returns the processes whose command names a folder, of this machine's nodes all."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(os.fsencode(folder) in word for word in words) and int(path.name) != os.getpid():
            pids.append(int(path.name))
    return pids


def actor_pids() -> list[int]:
    """Returns the Ray workers that hold a job."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::Actor" in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
        except OSError:
            continue
    return pids


def steps_of(out: Path) -> int:
    return sum(lines[-1]["step"] for part in PARTS if (lines := read_metrics(out / part)))


def wait_until(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def nothing_is_left(out: Path) -> None:
    wait_until(lambda: not any(map(is_alive, pids_below(out))), 60)
    assert not list(out.rglob("*.tmp"))
    assert not list(out.rglob(".*.partial"))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.bits
@pytest.mark.timeout(900)
class TestTraining:
    def test_same_bits(self, data, local, cluster, tmp_path):
        """Experts, router, assembled and evaluated on the cluster: the bytes of the local engine."""
        out = tmp_path / "run"
        main(train_all(data, out, "--engine", "ray", "--address", cluster.address))
        assert contents(out) == local
        nothing_is_left(out)

    def test_ten_workers_are_killed(self, data, local, cluster, tmp_path, report):
        """With -9, at random moments, each time another at random."""
        out, rng = tmp_path / "run", random.Random(0)
        killed: list[int] = []

        def kill() -> None:
            while len(killed) < 10:
                before = steps_of(out)
                wait_until(lambda before=before: steps_of(out) > before or not thread_runs[0])
                if not thread_runs[0]:
                    return
                time.sleep(rng.random() * 0.5)
                if pids := actor_pids():
                    killed.append(rng.choice(pids))
                    os.kill(killed[-1], signal.SIGKILL)

        thread_runs = [True]
        thread = threading.Thread(target=kill)
        thread.start()
        try:
            main(train_all(data, out, "--engine", "ray", "--address", cluster.address))
        finally:
            thread_runs[0] = False
            thread.join()
        report(f"workers killed while four experts and the router trained on three nodes: {len(killed)}")
        assert len(killed) >= 5, "the training was over too soon"
        assert contents(out) == local
        nothing_is_left(out)

    def test_a_node_dies(self, data, local, cluster, tmp_path):
        out = tmp_path / "run"
        node = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        removed = []

        def remove() -> None:
            wait_until(lambda: steps_of(out) > 40)
            cluster.remove_node(node, allow_graceful=False)
            removed.append(steps_of(out))

        thread = threading.Thread(target=remove)
        thread.start()
        main(train_all(data, out, "--engine", "ray", "--address", cluster.address))
        thread.join()
        assert removed
        assert contents(out) == local
        nothing_is_left(out)

    def test_the_driver_is_killed(self, data, local, cluster, tmp_path):
        """Jobs end with it, having saved a checkpoint; the same command resumes."""
        out = tmp_path / "run"
        command = train_all(data, out, "--engine", "ray", "--address", cluster.address)
        driver = subprocess.Popen([sys.executable, "-m", "atoll.cli.main", *command], stderr=subprocess.DEVNULL)
        wait_until(lambda: steps_of(out) > 100)
        driver.kill()
        driver.wait()
        wait_until(lambda: not pids_below(out))
        main(command)
        assert contents(out) == local

    def test_processes_of_one_expert(self, data, cluster, tmp_path):
        """Two on one node share out the network; what they make, one process makes to rounding."""
        flags = ["--experts", "1", "--device", "cpu", "--steps", "20", "--shard", "--cpus-per-expert", "2"]
        main([*train_all(data, tmp_path / "two"), *flags, "--engine", "ray", "--address", cluster.address])
        main([*train_all(data, tmp_path / "one"), "--experts", "1", "--steps", "20"])
        about = json.loads((tmp_path / "two" / "expert_1" / "config.json").read_text())["training"]
        assert about["processes"] == 2
        losses = [
            [line["loss"] for line in read_metrics(tmp_path / name / "expert_1") if "loss" in line]
            for name in ("one", "two")
        ]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_evaluation(data, cluster, tmp_path):
    """Two models, judged on the cluster: the figures of one process."""
    small = ["--steps", "10", "--router.steps", "10"]
    main([*train_all(data, tmp_path / "run"), *small])
    experts = [str(tmp_path / "run" / part) for part in PARTS[:4]]
    model = str(tmp_path / "model")
    main(["assemble", *experts, "--router", str(tmp_path / "run" / "router"), "--data", str(data), "--out", model])
    flags = ["--num", "20", "--features", "simple", "--metrics", "frechet", "kernel", "--steps", "4", "--device", "cpu"]
    evaluate = partial(lambda out, *more: main(["evaluate", model, str(data), *flags, "--out", str(out), *more]))
    evaluate(tmp_path / "here")
    evaluate(tmp_path / "there", "--engine", "ray", "--address", cluster.address)
    figures = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("here", "there")]
    assert figures[0] == figures[1]
