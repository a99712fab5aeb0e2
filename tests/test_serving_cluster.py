"""`atoll serve --engine ray`: the same images from replicas and experts in actors; losing a replica loses no image."""

import asyncio
import base64
import io
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline, ImageTrace
from atoll.serving.cluster import NOTHING, Refused, Replicated
from atoll.serving.guard import Refusal
from atoll.serving.images import Shown
from atoll.serving.models import Source
from atoll.serving.scheduler import Finished, Job, Preview
from clusters import ray_cluster
from serving import Command, eventually
from test_assemble import parts

PATH = "/v1/images/generations"
ASK = {"prompt": "a robot", "seed": 5, "steps": 3, "routing": "full"}


class TestRefused:
    """Refused in one sentence, before anything is started."""

    def said(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
        with pytest.raises(SystemExit) as end:
            main(["serve", *map(str, arguments)])
        assert end.value.code == 2
        return "".join(capsys.readouterr())

    def test_flags(self, served_model, capsys):
        assert "did you mean 'ray'" in self.said(capsys, served_model, "--engine", "rya")
        assert "add --engine ray" in self.said(capsys, served_model, "--replicas", 2)
        assert "add --engine ray" in self.said(capsys, served_model, "--spread", "--max-resident", 1)
        ray = "--engine", "ray"
        assert "--replicas must be from 1" in self.said(capsys, served_model, *ray, "--replicas", 0)
        assert "nowhere" in self.said(capsys, "nowhere/at/all", *ray)
        there = "--address", "127.0.0.1:1", "--port", 0
        assert "there is no Ray cluster at 127.0.0.1:1" in self.said(capsys, served_model, *ray, *there)

    def test_no_ray(self, served_model, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.setitem(sys.modules, "ray.serve", None)
        said = self.said(capsys, served_model, "--engine", "ray")
        assert "this needs ray.serve: pip install 'atoll[ray,serve]'" in said.replace("\n", " ")


def pixels(answer: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["b64_json"])))).astype(int)


def ours(pipe: AtollPipeline, seed: int, steps: int = 3) -> np.ndarray:
    made = pipe("a robot", seed=seed, num_inference_steps=steps, routing="full", progress=False)
    return np.asarray(made.images[0]).astype(int)


def workers(name: str) -> list[int]:
    """Returns the Ray workers of this name."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                command = (path / "cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            if command.startswith("ray::") and name in command:
                found.append(int(path.name))
    return found


class Lossy:
    """A model's handle whose first replica is lost after it has shown and finished some images."""

    def __init__(self, lost: type[Exception], refusal: Refused | None = None) -> None:
        self.lost, self.refusal, self.make, self.asked = lost, refusal, self, list[list[int]]()

    def options(self, stream: bool) -> "Lossy":
        return self

    def remote(self, digest: str, jobs: list[Job]) -> "Stream":
        self.asked.append([job.seed for job in jobs])
        return Stream(self.items(jobs, is_lost=len(self.asked) == 1))

    async def items(self, jobs: list[Job], is_lost: bool) -> AsyncIterator[Shown | Refused | None]:
        yield None
        trace = ImageTrace((1.0,), torch.ones(1, 3))
        for step in range(4):
            for number, _ in enumerate(jobs):
                if is_lost and step == 2:
                    yield Shown(0, Finished(NOTHING, trace, ()), b"first")
                    raise self.lost("gone")
                yield Shown(number, Preview(step, 0.5, NOTHING, [1.0, 0.0, 0.0]), b"")
        if self.refusal:
            yield self.refusal
        for number, _ in enumerate(jobs):
            yield Shown(number, Finished(NOTHING, trace, ()), b"other")


class Stream:
    def __init__(self, items: AsyncIterator[Any]) -> None:
        self.items, self.cancelled = items, False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items

    def __anext__(self) -> Any:
        return anext(self.items)

    def cancel(self) -> None:
        self.cancelled = True


class TestLost:
    """What a client sees of a lost replica, without a cluster."""

    def shown(self, pipe: AtollPipeline, handle: Lossy) -> list[Shown]:
        served = Replicated(Source("tiny", str(pipe.folder), {}), handle)
        jobs = [Job("a robot", "", seed, pipe.plan(steps=4), previews=4) for seed in (7, 8, 9)]

        async def run() -> list[Shown]:
            images = await served.start(jobs)
            try:
                return [one async for one in images.shown() if one is not None]
            finally:
                images.cancel()
                assert served.counts() == (0, 0)

        return asyncio.run(run())

    def test_others_make_what_is_left(self, pipe):
        lost = pytest.importorskip("ray").exceptions.ActorDiedError
        handle = Lossy(lambda _: lost())
        shown = self.shown(pipe, handle)
        assert handle.asked == [[7, 8, 9], [8, 9]]
        previews = [(one.number, one.event.number) for one in shown if isinstance(one.event, Preview)]
        assert len(set(previews)) == len(previews)  # none twice
        assert {number for number, _ in previews} == {0, 1, 2}
        assert sorted((one.number, one.png) for one in shown if isinstance(one.event, Finished)) == [
            (0, b"first"), (1, b"other"), (2, b"other"),
        ]  # fmt: skip

    def test_a_failure_is_told(self, pipe):
        pytest.importorskip("ray")
        handle = Lossy(ValueError, Refused(400, "the image is not finite", None, None))
        handle.asked.append([])  # none is lost
        with pytest.raises(Refusal, match="not finite"):
            self.shown(pipe, handle)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(1, num_cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pipe(served_model) -> AtollPipeline:
    return AtollPipeline(served_model)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
class TestOnACluster:
    def serve(self, cluster: Any, served_model: Path, *more: object) -> Command:
        ray = ("--engine", "ray", "--address", cluster.address, "--port", 0, "--device", "cpu")
        return Command("serve", f"tiny={served_model}", *ray, *more)

    def test_two_replicas(self, cluster, served_model, pipe, tmp_path, tmp_path_factory):
        """These share one application, which takes a while to start."""
        folder = Path(shutil.copytree(served_model, tmp_path / "model"))
        with self.serve(cluster, folder, "--replicas", 2) as command:
            self.as_by_one(command.url, pipe)
            self.a_replica_is_lost(command.url, pipe)
            data, run = parts(tmp_path_factory.getbasetemp())
            assemble([run], run / "centroids", folder, data)
            command.process.send_signal(signal.SIGHUP)
            self.a_new_version_takes_over(command.url, ModelIndex.read(folder).hash)
            assert command.stop() == 0
            assert workers("model-tiny") == []

    def as_by_one(self, url: str, pipe: AtollPipeline) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == ["tiny"]
            with pytest.raises(openai.BadRequestError, match="did you mean 'seed'"):
                client.images.generate(prompt="a", extra_body={"sede": 1})
            events = list(client.images.generate(prompt="a robot", stream=True, partial_images=3, extra_body=ASK))
        assert [event.type.rpartition(".")[2] for event in events] == ["partial_image"] * 3 + ["completed"]
        assert np.abs(pixels(events[-1].model_dump()) - ours(pipe, 5)).max() <= 1
        answer = httpx.post(url + PATH, json={**ASK, "n": 2, "response_format": "url"}, timeout=60).json()
        for seed, image in zip((5, 6), answer["data"], strict=True):
            content = httpx.get(image["url"]).content  # whichever replica has made it
            assert np.abs(np.asarray(Image.open(io.BytesIO(content))).astype(int) - ours(pipe, seed)).max() <= 1
        assert "never met" in httpx.get(url).text
        assert 'atoll_images_total{complete="yes",model="tiny"} 3.0' in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}).status_code == 421

    def a_replica_is_lost(self, url: str, pipe: AtollPipeline) -> None:
        """Under load, every image arrives and is the right one."""
        before = workers("model-tiny")
        assert len(before) == 2

        def ask(seed: int) -> tuple[int, dict[str, Any]]:
            answer = httpx.post(url + PATH, json={**ASK, "seed": seed, "steps": 60}, timeout=300)
            return answer.status_code, answer.json()

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, seed) for seed in range(16)]
            busy = 'atoll_images_in_flight{model="tiny"} 8.0'
            eventually(lambda: busy in httpx.get(f"{url}/metrics").text)
            os.kill(before[0], signal.SIGKILL)
            answers = [one.result() for one in asked]
        assert [status for status, _ in answers] == [200] * 16
        for seed in (0, 7, 15):
            assert np.abs(pixels(answers[seed][1]["data"][0]) - ours(pipe, seed, 60)).max() <= 1
        eventually(lambda: len(workers("model-tiny")) == 2 and before[0] not in workers("model-tiny"))

    def a_new_version_takes_over(self, url: str, new: str) -> None:
        def version() -> str:
            answer = httpx.post(url + PATH, json=ASK, timeout=60)
            assert answer.status_code == 200, answer.text
            content = base64.b64decode(answer.json()["data"][0]["b64_json"])
            return str(Image.open(io.BytesIO(content)).text["model"])

        eventually(lambda: version() == new)
        assert {version() for _ in range(6)} == {new}  # of both replicas

    def test_experts_in_actors(self, cluster, served_model, pipe):
        """Images equal those of one process; a killed expert has no weight until Ray has restarted it."""
        with self.serve(cluster, served_model, "--spread") as command:
            answer = httpx.post(command.url + PATH, json=ASK, timeout=60).json()["data"][0]
            assert np.abs(pixels(answer) - ours(pipe, 5)).max() <= 1
            actors = workers("ExpertActor")
            assert len(actors) == 3
            os.kill(actors[0], signal.SIGKILL)
            away = httpx.post(command.url + PATH, json={**ASK, "steps": 2}, timeout=60)
            assert away.status_code == 200

            def whole() -> bool:
                answer = httpx.post(command.url + PATH, json=ASK, timeout=60).json()["data"][0]
                return "without" not in answer and int(np.abs(pixels(answer) - ours(pipe, 5)).max()) <= 1

            eventually(whole, 120)
            assert command.stop() == 0

    def test_no_room(self, cluster, served_model, capsys):
        with pytest.raises(SystemExit):
            main(["serve", str(served_model), "--engine", "ray", "--address", cluster.address, "--port", "0",
                  "--replicas", "9"])  # fmt: skip
        assert "9 workers with 1 CPU each are asked for, and the cluster has" in capsys.readouterr().err
