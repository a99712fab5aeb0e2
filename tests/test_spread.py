"""Experts in their own processes: the same images, processes that are lost and restarted, and a graceful shutdown."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx
import pytest
import torch

from atoll.errors import InputError
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving import spread
from atoll.serving.remote import RemoteExpert
from atoll.serving.scheduler import Finished, Job, Scheduler, bytes_per_image
from atoll.serving.spread import ProcessCarrier, spread_here
from serving import Command, eventually

PROMPTS = ["a pink ghost with a yellow party hat", "a robot", "", "a green frog"]
OPTIONS = {"seed": 3, "num_inference_steps": 4, "output_type": "latent", "progress": False}
CPU = {"device": "cpu"}


def carrier_of(expert: RemoteExpert) -> ProcessCarrier:
    carrier = expert._carrier
    assert isinstance(carrier, ProcessCarrier)
    return carrier


def process_of(expert: RemoteExpert) -> int:
    pid = carrier_of(expert)._process.pid
    assert pid is not None
    return pid


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children_of(pid: int) -> set[int]:
    """Returns a process's descendants."""
    direct = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return direct.union(*(children_of(child) for child in direct)) if direct else direct


@pytest.fixture(scope="module")
def pipe(served_model) -> AtollPipeline:
    return AtollPipeline(served_model)


@pytest.fixture
def experts(served_model):
    experts = spread_here(served_model, CPU, samples=8)
    yield experts
    for expert in experts.values():
        expert.close()


@pytest.mark.bits
@pytest.mark.parametrize("routing", ["top1", "full"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_same_images(served_model, pipe, experts, routing, guidance):
    """With several experts in each step, images are bit-identical."""
    assert sorted(experts) == [0, 1, 2]
    assert len({os.getpid(), *map(process_of, experts.values())}) == 4
    far = AtollPipeline(served_model, elsewhere=experts)
    options = {**OPTIONS, "routing": routing, "guidance_scale": guidance}
    assert torch.equal(far(PROMPTS, **options).images, pipe(PROMPTS, **options).images)


def test_a_process_that_is_lost_comes_back(served_model, pipe, experts):
    """Meanwhile its weight goes to the others, and images report it."""
    far = AtollPipeline(served_model, elsewhere=experts)
    scheduler = Scheduler(far)

    def make(seed: int) -> Finished:
        events: list[object] = []
        scheduler.submit([Job("a robot", "", seed, far.plan(steps=4, routing="full"))], [events.append])
        (event,) = eventually(lambda: events)
        assert isinstance(event, Finished)
        return event

    def expected(seed: int, allowed: list[int] | None = None) -> torch.Tensor:
        options = {**OPTIONS, "seed": seed, "routing": "full", "experts": allowed}
        return torch.as_tensor(pipe("a robot", **options).images)

    first, lost = make(1), process_of(experts[1])
    torch.testing.assert_close(first.latents, expected(1), atol=1e-4, rtol=0)
    assert first.without == ()
    os.kill(lost, signal.SIGSTOP)  # so that it is killed during a request; before one, it would be restarted in time
    with ThreadPoolExecutor(1) as pool:
        without = pool.submit(make, 2)
        eventually(carrier_of(experts[1])._lock.locked)
        os.kill(lost, signal.SIGKILL)
    assert without.result().without == (1,)
    eventually(lambda: experts[1].away is None)
    assert process_of(experts[1]) != lost
    back = make(3)
    assert back.without == ()
    torch.testing.assert_close(back.latents, expected(3), atol=1e-4, rtol=0)
    scheduler.close()


def test_a_process_that_hangs_is_replaced(served_model, experts, monkeypatch, caplog):
    monkeypatch.setattr(spread, "HANGING", 2.0)
    far, hung = AtollPipeline(served_model, elsewhere=experts), process_of(experts[1])
    os.kill(hung, signal.SIGSTOP)
    assert far("a robot", **OPTIONS, routing="full").images.isfinite().all()
    assert "its process did not answer within 2 seconds" in caplog.text
    eventually(lambda: experts[1].away is None)
    assert process_of(experts[1]) != hung


def test_a_process_that_cannot_be_restarted(served_model, experts, monkeypatch):
    """Its expert is away until one can be started again; no image fails."""
    far, lost = AtollPipeline(served_model, elsewhere=experts), process_of(experts[1])
    carrier = carrier_of(experts[1])
    start = ForkServerProcess.start

    def fail(process: ForkServerProcess) -> None:
        raise EOFError

    monkeypatch.setattr(ForkServerProcess, "start", fail)
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: not carrier._process.is_alive())
    assert far("a robot", **OPTIONS, routing="full").images.isfinite().all()
    assert "no process can be started" in experts[1].away
    monkeypatch.setattr(ForkServerProcess, "start", start)
    eventually(lambda: experts[1].away is None)
    assert process_of(experts[1]) != lost


def test_no_process_can_be_started(served_model, monkeypatch):
    started = list[ForkServerProcess]()
    start = ForkServerProcess.start

    def fail_later(process: ForkServerProcess) -> None:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(ForkServerProcess, "start", fail_later)
    with pytest.raises(InputError, match="no process can be started .Resource temporarily unavailable.: end others"):
        spread_here(served_model, CPU, samples=8)
    assert not started[0].is_alive()


def test_images_are_admitted_by_the_memory_of_all_processes(served_model, pipe, experts):
    assert bytes_per_image(AtollPipeline(served_model, elsewhere=experts)) == bytes_per_image(pipe)


def test_closing_ends_the_processes(served_model):
    experts = spread_here(served_model, CPU, samples=8)
    pids = [process_of(expert) for expert in experts.values()]
    for number in (signal.SIGINT, signal.SIGTERM):  # only the server handles them
        for pid in pids:
            os.kill(pid, number)
    assert AtollPipeline(served_model, elsewhere=experts)("a robot", **OPTIONS).images is not None
    assert all(map(is_there, pids))
    for expert in experts.values():
        expert.close()
    assert not any(map(is_there, pids))


def test_an_expert_that_cannot_be_loaded(served_model, tmp_path):
    """It is named at startup, and no process is left."""
    folder = Path(shutil.copytree(served_model, tmp_path / "model"))
    before = children_of(os.getpid())
    path = folder / "expert_1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"expert_1 \(.*model.safetensors.*\): repair the expert"):
        spread_here(folder, CPU, samples=8)
    eventually(lambda: len(children_of(os.getpid()) - before) <= 2)  # multiprocessing's own


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGTERM", "SIGTERM to all", "SIGKILL"])
def test_the_command(served_model, end):
    """SIGTERM finishes what is in flight, even if all its processes get it; none outlives the server."""
    with Command("serve", f"tiny={served_model}", "--port", 0, "--spread", "--device", "cpu") as command:
        model = httpx.get(f"{command.url}/v1/models").json()["data"][0]["atoll"]
        assert [expert["place"] for expert in model["experts"]] == ["here"] * 3
        children = children_of(command.process.pid)
        assert len(children) >= 3
        body = {"prompt": "a robot", "seed": 5, "steps": 40, "routing": "full"}
        if end == "SIGKILL":
            command.process.kill()
        else:
            with ThreadPoolExecutor(2) as pool:
                ask: Callable[..., httpx.Response] = httpx.post
                path = f"{command.url}/v1/images/generations"
                answers = [pool.submit(ask, path, json={**body, "n": 2}, timeout=120) for _ in range(2)]
                counts = 'atoll_images_in_flight{model="tiny"} 4.0'
                eventually(lambda: counts in httpx.get(f"{command.url}/metrics").text)
                for pid in children if end == "SIGTERM to all" else ():
                    os.kill(pid, signal.SIGTERM)
                assert command.stop() == 0
                for answer in answers:
                    assert answer.result().status_code == 200
                    assert not any("without" in image for image in answer.result().json()["data"])
        eventually(lambda: not any(map(is_there, children)))
