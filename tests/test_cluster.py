"""The Ray engine on clusters of several nodes on this machine: the local engine's bits, whatever is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

import atoll.data.prepare as prepare_module
from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.engines.engine import Job, Resources, encode
from atoll.engines.ray import Actor
from atoll.engines.settings import EngineSettings
from atoll.engines.train_all import Part
from atoll.errors import InputError
from atoll.training.metrics_log import read_metrics
from atoll.training.settings import DistillSettings
from clusters import NODE, patiently, ray_cluster
from test_engines import is_alive
from test_store_data import assert_same_files

ray = pytest.importorskip("ray")
SCRIPT = "import json, sys; json.dump(dict(complete=True, steps_done=5), open(sys.argv[1], 'w'))"


@pytest.mark.slow
class TestShort:
    def test_jobs_and_functions(self, tmp_path):
        """Covers everything a one-node cluster does in one test: starting it takes longer than using it."""

        def negative(number: int) -> int:
            if number == 0:
                raise InputError("zero has no sign: give another number")
            return -number

        with ray_cluster(1) as cluster:
            engine = EngineSettings("ray", cluster.address).open("cpu")
            assert list(engine.map(negative, range(1, 9))) == [-1, -2, -3, -4, -5, -6, -7, -8]
            assert list(engine.map(negative, range(1, 4), then=negative)) == [1, 2, 3]
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

    def test_flags_of_a_student(self, capsys):
        of_a_cluster, of_this_machine = ["--cpus", "2"], ["--engine", "ray", "--dry-run"]
        for flags, message in (
            (of_a_cluster, "--cpus and --gpus are of a job on a cluster: add --engine ray"),
            (of_this_machine, "--dry-run looks at this machine: leave --engine out"),
        ):
            with pytest.raises(SystemExit):
                main(["distill", "model", "data", "--out", "out", *flags])
            assert message in capsys.readouterr().err
        part = Part("student", Path("out"), DistillSettings(), Path("data"), init=Path("first"), teacher=Path("model"))
        assert part._replace(allow_missing=True).verb == [
            "distill", "model", "data", "--init", "first", "--allow-missing"
        ]  # fmt: skip

    def test_a_node_that_does_not_share_the_folder(self, tmp_path):
        job = Job("a", [sys.executable, "-c", "pass"], tmp_path / "elsewhere", 5)
        with pytest.raises(OSError, match=r"does not see .*elsewhere, give --out in a folder that all nodes share, or"):
            Actor().start(job, "", tmp_path, sys.executable)
        assert not job.folder.exists()
        assert Actor().start(replace(job, is_shared=False), "", tmp_path, sys.executable).code in (None, 0)

    @pytest.mark.slow
    @pytest.mark.cluster
    @pytest.mark.parametrize(("version", "has"), [("9.9.9", "atoll 9.9.9"), (None, "no atoll")])
    def test_a_node_that_would_train_something_else(self, cluster, tmp_path, version, has):
        """Another folder, first on Python's path, describes its packages."""
        shadow = "import importlib.metadata as m\nreal = m.version\ndef version(name):\n    if name != 'atoll':\n"
        shadow += "        return real(name)\n" + (
            f"    return {version!r}\n" if version else "    raise m.PackageNotFoundError(name)\n"
        )
        (tmp_path / "sitecustomize.py").write_text(shadow + "m.version = version\n")
        path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        with another_node(cluster, num_cpus=1, env_vars={"PYTHONPATH": path}), pytest.raises(InputError) as error:
            EngineSettings("ray", cluster.address).open()
        assert f" has {has}, and here it is " in str(error.value)
        assert str(error.value).endswith("install the same version on every node")


# --- the whole chain --------------------------------------------------------------------------------------------------


def prepare_all(out: Path, *flags: str) -> None:
    """Prepares the demo's data, with fewer images, and its four clusters."""
    main(["prepare", "avatars", "--num", "400", "--size", "32", "--near-duplicates", "keep", "--device", "cpu",
          "--workers", "0", "--out", str(out), *flags])  # fmt: skip
    main(["partition", str(out), "--experts", "4"])


def train_all(data: Path, out: Path, *flags: str) -> list[str]:
    sizes = "--model xs --steps 150 --batch 16 --log-every 5 --save-every 10 --eval-every 50 --sample-every 0"
    chosen = ["--objectives", "1ddpm:3fm", "--device", "cpu"]
    return ["train-all", str(data), "--out", str(out), *sizes.split(), *chosen, *flags]


ROUTER = "--router --router.model xs --router.steps 60 --router.batch 16 --router.sample-every 0 --router.device cpu"


def judge_all(folder: Path, *flags: str) -> None:
    """Assembles what was trained on FOLDER/data, evaluates it, and distils a student from it."""
    data, model = str(folder / "data"), str(folder / "model")
    main(["assemble", str(folder / "run"), "--data", data, "--out", model])
    small = "--num 20 --features simple --metrics frechet kernel --steps 4 --device cpu"
    main(["evaluate", model, data, *small.split(), "--out", str(folder / "evaluated"), *flags])
    small = "--student xs --steps 6 --batch 8 --sample-every 0 --device cpu"
    main(["distill", model, data, *small.split(), "--out", str(folder / "student"), *flags])


PARTS = [*(f"expert_{k}" for k in range(4)), "router"]


def contents(out: Path, parts: Sequence[str] = PARTS) -> dict[str, object]:
    """Returns the bytes of all parts, and metrics and checkpoints without their timings."""
    found: dict[str, object] = {}
    for part in parts:
        for name in ("model.safetensors", "config.json"):
            found[f"{part}/{name}"] = (out / part / name).read_bytes()
        timeless = [
            {key: value for key, value in line.items() if key not in ("seconds", "cpu_seconds", "samples_per_second")}
            for line in read_metrics(out / part)
        ]
        found[f"{part}/metrics"] = json.dumps(timeless)
        last = sorted((out / part / "state").glob("*.safetensors"))[-1]
        found[f"{part}/checkpoint"] = {name: t.numpy().tobytes() for name, t in load_file(last).items()}
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """Returns the local engine's results: data, run, model, evaluated, student."""
    folder = tmp_path_factory.mktemp("local")
    prepare_all(folder / "data")
    main(train_all(folder / "data", folder / "run", *ROUTER.split()))
    judge_all(folder)
    return folder


def pids_below(folder: Path) -> list[int]:
    """Returns the processes on all of this machine's nodes whose command names a folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(os.fsencode(folder) in word for word in words) and int(path.name) != os.getpid():
            pids.append(int(path.name))
    return pids


def workers_of(*names: str) -> list[int]:
    """Returns the Ray workers of this process's clusters that run one of these."""
    prefixes, pids = tuple(f"ray::{name}" for name in names), []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(prefixes):
                pids.append(process.pid)
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


@contextmanager
def another_node(cluster, **options: object) -> Iterator[Any]:
    """Yields an additional node of the cluster, which may be removed meanwhile."""
    node = patiently(lambda: cluster.add_node(**{**NODE, **options}))
    try:
        yield node
    finally:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.bits
@pytest.mark.timeout(1800)
class TestBits:
    """The cluster's results equal the local engine's, byte for byte."""

    def test_from_images_to_figures(self, local, cluster, tmp_path):
        """Prepared, partitioned, four experts and the router trained, assembled, evaluated, distilled."""
        on_ray = ["--engine", "ray", "--address", cluster.address]
        prepare_all(tmp_path / "data", *on_ray)
        assert_same_files(local / "data", tmp_path / "data")
        main(train_all(tmp_path / "data", tmp_path / "run", *ROUTER.split(), *on_ray))
        assert contents(tmp_path / "run") == contents(local / "run")
        judge_all(tmp_path, *on_ray)
        figures = [json.loads((folder / "evaluated" / "results.json").read_text()) for folder in (local, tmp_path)]
        assert figures[0]["models"] == figures[1]["models"]
        assert contents(tmp_path, ["student"]) == contents(local, ["student"])
        nothing_is_left(tmp_path)

    def test_ten_workers_and_a_node_die(self, local, cluster, tmp_path):
        """Random workers are killed with -9 at random moments; the node after half of them."""
        out, rng, killed, stop = tmp_path / "run", random.Random(0), list[int](), threading.Event()

        def kill(node: Any) -> None:
            while len(killed) < 10 and not stop.is_set():
                before = steps_of(out)
                wait_until(lambda before=before: steps_of(out) > before or stop.is_set())
                time.sleep(rng.random() * 0.3)
                if pids := workers_of("Actor"):
                    killed.append(rng.choice(pids))
                    with suppress(ProcessLookupError):
                        os.kill(killed[-1], signal.SIGKILL)
                if len(killed) == 5:
                    cluster.remove_node(node, allow_graceful=False)

        with another_node(cluster) as node:
            thread = threading.Thread(target=kill, args=[node])
            thread.start()
            try:
                flags = ["--engine", "ray", "--address", cluster.address]
                main(train_all(local / "data", out, *ROUTER.split(), *flags))
            finally:
                stop.set()
                thread.join()
        assert len(killed) == 10, "the training was over too soon"
        assert contents(out) == contents(local / "run")
        nothing_is_left(out)

    def test_the_driver_is_killed(self, local, cluster, tmp_path):
        """Its jobs save a checkpoint and end; rerunning the command resumes."""
        out = tmp_path / "run"
        flags = ["--experts", "0,3", "--engine", "ray", "--address", cluster.address]
        command = train_all(local / "data", out, *flags)
        driver = subprocess.Popen([sys.executable, "-m", "atoll.cli.main", *command], stderr=subprocess.DEVNULL)
        wait_until(lambda: steps_of(out) > 40)
        driver.kill()
        driver.wait()
        wait_until(lambda: not pids_below(out))
        main(command)
        chosen = ["expert_0", "expert_3"]
        assert contents(out, chosen) == contents(local / "run", chosen)

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_a_prepare_that_loses_workers_and_a_node(self, cluster, tmp_path, monkeypatch, gpus):
        """Ten that read and encode are killed; where a node claims a GPU, others encode, and three of each are."""
        monkeypatch.setattr(prepare_module, "BATCH", 16)
        source, settings = Source("shapes", num=1100, size=16), PrepareSettings(size=16, codec="pca:plain", flip=True)
        killed, num_killed, chance = list[int](), 3 if gpus else 10, random.Random(0)

        def kill_some(function: Any, values: Any, then: Any = None) -> Iterator[Any]:
            engine, due = EngineSettings("ray", cluster.address).open("auto"), 2
            for i, result in enumerate(encode(engine, function, values, then)):
                if then and i >= due and len(killed) < num_killed:
                    name = "Caller" if gpus and len(killed) % 2 == 0 else "_call"
                    # There may be none: the rest may have finished before the last ones were killed.
                    if pids := workers_of(name) or workers_of("_call", "IDLE"):
                        with suppress(ProcessLookupError):
                            os.kill(pid := chance.choice(pids), signal.SIGKILL)
                            killed.append(pid)
                            due = i + 4
                if then and i == 30:
                    cluster.remove_node(node, allow_graceful=False)
                yield result

        prepare(source, tmp_path / "local", settings, 0, progress=False, device="cpu")
        with another_node(cluster) as node, another_node(cluster, num_cpus=1, num_gpus=gpus):
            prepare(source, tmp_path / "ray", settings, 0, progress=False, run_elsewhere=kill_some)
        assert len(killed) == num_killed
        assert_same_files(tmp_path / "local", tmp_path / "ray")
        names = {path.name for path in (tmp_path / "ray" / "shards").iterdir()}
        assert names == {*(f"{i:05d}.safetensors" for i in range(3)), "SHA256SUMS"}

    def test_gpus_are_for_what_needs_them(self, cluster):
        """Each of two GPUs is held by one process of the second function; the first function gets none."""

        def with_gpus(item: object) -> tuple[object, tuple[str, ...], int]:
            return item, tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"]), os.getpid()

        with another_node(cluster, num_cpus=1, num_gpus=2):
            engine = EngineSettings("ray", cluster.address).open("auto")
            wait_until(lambda: ray.available_resources().get("GPU") == 2)
            results = list(engine.map(with_gpus, range(40), then=with_gpus))
        first, second = zip(*((result[0][1], result[1]) for result in results), strict=True)
        assert set(first) == {()}
        assert set(second) == {("0",), ("1",)}
        assert len({result[2] for result in results}) == 2
        assert [result[0][0] for result in results] == list(range(40))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_processes_of_one_expert(local, cluster, tmp_path):
    """Two on one node shard the network; up to rounding, the result is that of one process."""
    flags = ["--experts", "1", "--steps", "20", "--shard"]
    on_ray = ["--cpus-per-expert", "2", "--engine", "ray", "--address", cluster.address]
    main([*train_all(local / "data", tmp_path / "two"), *flags, *on_ray])
    main([*train_all(local / "data", tmp_path / "one"), *flags])
    about = json.loads((tmp_path / "two" / "expert_1" / "config.json").read_text())["training"]
    assert about["processes"] == 2
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "expert_1") if "loss" in line]
        for name in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
