"""A scheduler in its own process: the same images, even if the process is lost, and a graceful shutdown."""

import os
import shutil
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from atoll.cards import ModelIndex
from atoll.errors import InputError
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.apart import LOSSES, SchedulerProcess
from atoll.serving.guard import Refusal
from atoll.serving.metrics import Metrics
from atoll.serving.models import ServedApart
from atoll.serving.scheduler import BusyError, Failed, Finished, Observer, Preview
from atoll.serving.settings import Limits
from atoll.serving.start import Launch, open_here
from serving import Command, eventually
from test_scheduler import Told, by_pipeline, make_job, random_jobs
from test_spread import is_there


def opener(folder: Path, **limits: int) -> partial:
    launch = Launch([f"m={folder}"], Limits(**limits))
    return partial(open_here, launch, False, 1, "m", folder, {})


@pytest.fixture(scope="module")
def pipe(served_model) -> AtollPipeline:
    return AtollPipeline(served_model)


@pytest.fixture
def scheduler(served_model, pipe):
    made: list[SchedulerProcess] = []

    def make(observer: Observer | None = None, **limits: int) -> SchedulerProcess:
        made.append(SchedulerProcess(opener(served_model, **limits), Limits(**limits), observer))
        made[-1].wait(pipe.hash)
        return made[-1]

    yield make
    for one in made:
        pid = one.pid
        one.close(cancel=True)
        assert not is_there(pid)


class Counted(Observer):
    def __init__(self) -> None:
        self.samples, self.done = Counter[int](), 0

    def stepped(self, seconds: float, images: int, samples: Counter[int]) -> None:
        self.samples += samples

    def finished(self, waited: float | None, without: bool) -> None:
        self.done += 1


def test_the_same_images(pipe, scheduler):
    """The images do not depend on what else is in flight; observer and traces agree with them."""
    jobs, observer = random_jobs(pipe, 16, 8), Counted()
    told = Told(len(jobs))
    process = scheduler(observer, images=4)
    process.submit(jobs, told.calls())
    for job, event in zip(jobs, told.last(), strict=True):
        assert isinstance(event, Finished)
        torch.testing.assert_close(event.latents, by_pipeline(pipe, job), atol=1e-4, rtol=0)
        assert sum(event.trace.shares) == pytest.approx(1)
        assert 0 < len(event.trace.times) <= job.evaluations
    eventually(lambda: observer.done == len(jobs))
    assert observer.samples.total() >= sum(job.plan.steps for job in jobs)
    assert process.counts() == (0, 0)


def test_a_process_that_is_lost(pipe, scheduler):
    """A new process generates its images; no preview is repeated."""
    process, jobs = scheduler(), [make_job(pipe, seed, steps=60, previews=60) for seed in range(3)]
    told, lost = Told(3), process.pid
    process.submit(jobs, told.calls())
    eventually(lambda: all(len(own) > 2 for own in told.events))
    os.kill(lost, signal.SIGKILL)
    for job, event in zip(jobs, told.last(), strict=True):
        torch.testing.assert_close(event.latents, by_pipeline(pipe, job), atol=1e-4, rtol=0)
    assert process.pid != lost
    for own in told.events:
        assert [event.number for event in own if isinstance(event, Preview)] == list(range(60))


def test_an_image_that_ends_every_process_is_refused(pipe, scheduler):
    process, told = scheduler(), Told(1)
    process.submit([make_job(pipe, steps=200)], told.calls())
    for _ in range(LOSSES):
        eventually(lambda: process.ready)
        pid = process.pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: process.pid != pid)
    (event,) = told.last()
    assert isinstance(event, Failed)
    assert Refusal.of(event.error).status == 503
    eventually(lambda: process.ready)
    again = Told(1)
    process.submit([make_job(pipe)], again.calls())
    assert isinstance(again.last()[0], Finished)


def test_images_of_a_model_that_is_there_no_more_are_refused(served_model, pipe, tmp_path):
    """Its folder was overwritten, and its process is lost: it can be closed nevertheless."""
    folder = Path(shutil.copytree(served_model, tmp_path / "model"))
    process, told = SchedulerProcess(opener(folder), Limits()), Told(1)
    process.wait(pipe.hash)
    process.submit([make_job(pipe, steps=1000)], told.calls())
    eventually(lambda: process.counts() == (1, 0))
    ModelIndex.read(folder).model_copy(update={"license": "CC-BY-4.0"}).write(folder)
    os.kill(process.pid, signal.SIGKILL)
    process.close()
    (event,) = told.last()
    assert Refusal.of(event.error).status == 503


def test_no_room(pipe, scheduler):
    """Images beyond the places and the queue are refused; a cancelled one gives up its place at once."""
    process, told = scheduler(images=2, waiting=1), Told(3)
    images = process.submit([make_job(pipe, seed, steps=200) for seed in range(3)], told.calls())
    assert process.counts() == (2, 1)
    with pytest.raises(BusyError, match="1 images are waiting and there is no room for 1 more") as refused:
        process.submit([make_job(pipe)], [print])
    assert refused.value.retry_after >= 1
    for image in images:
        image.cancel()
    assert process.counts() == (0, 0)
    again = Told(3)
    process.submit([make_job(pipe, seed) for seed in range(3)], again.calls())
    assert all(isinstance(event, Finished) for event in again.last())
    assert not any(isinstance(event, Finished) for own in told.events for event in own)


def test_closing_finishes_what_is_in_flight(pipe, scheduler):
    process, told = scheduler(), Told(2)
    process.submit([make_job(pipe, seed, steps=40) for seed in range(2)], told.calls())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # only the server handles them
        os.kill(process.pid, number)
    process.close()
    assert all(isinstance(own[-1], Finished) for own in told.events)
    with pytest.raises(BusyError, match="replaced or shut down"):
        process.submit([make_job(pipe)], [print])


def test_images_can_be_cancelled_while_it_closes(pipe, scheduler):
    process, told = scheduler(), Told(2)
    images = process.submit([make_job(pipe, seed, steps=1000) for seed in range(2)], told.calls())
    closing = threading.Thread(target=process.close)
    closing.start()
    eventually(lambda: process._closed)
    for image in images:
        image.cancel()
    closing.join()
    assert not any(isinstance(event, Finished) for own in told.events for event in own)


def test_what_fails_is_told(pipe, scheduler):
    """Errors of a request are reported as by a scheduler in this process."""
    process, told = scheduler(), Told(2)
    process.submit([make_job(pipe, guidance=1e38, steps=4), make_job(pipe)], told.calls())
    failed, finished = told.last()
    assert "not finite" in str(failed.error)
    assert Refusal.of(failed.error).status == 400
    assert isinstance(finished, Finished)


class TestOpening:
    def test_a_model_that_cannot_be_opened(self, served_model, tmp_path):
        folder = Path(shutil.copytree(served_model, tmp_path / "model"))
        source = Launch([f"m={folder}"]).source("m")
        shutil.rmtree(folder / "router")
        with pytest.raises(InputError, match="router"):
            ServedApart(source, Limits(), partial(open_here, Launch([f"m={folder}"]), False, 1))
        process = SchedulerProcess(opener(folder), Limits())
        with pytest.raises(InputError, match="router"):
            process.wait("")
        process.close(cancel=True)
        assert not is_there(process.pid)

    def test_experts_in_processes_of_their_own_end_with_it(self, served_model, tmp_path):
        folder = Path(shutil.copytree(served_model, tmp_path / "model"))
        shutil.rmtree(folder / "router")
        process = SchedulerProcess(partial(open_here, Launch([f"m={folder}"]), True, 1, "m", folder, {}), Limits())
        with pytest.raises(InputError, match="router"):
            process.wait("")
        process.close(cancel=True)
        assert not is_there(process.pid)

    @pytest.mark.slow
    def test_a_link_to_another_version(self, served_model, tmp_path):
        """The model keeps its name, and its process finds the new folder."""
        folders = [Path(shutil.copytree(served_model, tmp_path / name)) for name in ("v1", "v2")]
        ModelIndex.read(folders[1]).model_copy(update={"license": "CC-BY-4.0"}).write(folders[1])
        link = tmp_path / "current"
        link.symlink_to("v1")
        with Command("serve", link, "--port", 0, "--reload", 0, "--device", "cpu") as command:

            def license_of(name: str) -> str | None:
                models = httpx.get(f"{command.url}/v1/models").json()["data"]
                return next(model["atoll"]["license"] for model in models if model["id"] == name)

            first = license_of("v1")
            assert first != "CC-BY-4.0"
            link.unlink()
            link.symlink_to("v2")
            command.process.send_signal(signal.SIGHUP)
            eventually(lambda: license_of("v1") == "CC-BY-4.0", 240)
            assert httpx.get(f"{command.url}/readyz").status_code == 200
            assert command.stop() == 0

    def test_files_that_change_meanwhile(self, served_model):
        process = SchedulerProcess(opener(served_model), Limits())
        with pytest.raises(InputError, match="changed while they were opened"):
            process.wait("0" * 64)
        process.close(cancel=True)

    def test_a_process_that_ends_before_it_is_ready(self, served_model):
        process = SchedulerProcess(opener(served_model), Limits())
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(InputError, match="the process that opens the model ended with -9"):
            process.wait("")
        process.close(cancel=True)


def test_this_process_has_no_weights(served_model):
    launch = Launch([f"m={served_model}"])
    source = next(iter(launch.sources(Metrics())))
    served = ServedApart(source, Limits(), partial(open_here, launch, False, 1))
    assert all(expert["place"] == "here" for expert in served.about["atoll"]["experts"])
    told = Told(1)
    served.scheduler.submit([make_job(served.pipe)], told.calls())
    assert isinstance(told.last()[0], Finished)
    assert not any(getattr(expert, "network", None) for expert in served.pipe.ensemble.experts)
    served.close()
