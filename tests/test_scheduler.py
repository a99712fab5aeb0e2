"""Step-level batching: each image equals the pipeline's, whatever else is in flight; fair, bounded, faults isolated."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from atoll.diffusion.solvers import SOLVERS
from atoll.errors import InputError
from atoll.sampling.ensemble import Mixture
from atoll.sampling.expert import FolderExpert, VelocityExpert
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.images import OwnImages, Shown
from atoll.serving.scheduler import BusyError, Event, Failed, Finished, Job, Preview, Scheduler
from atoll.serving.settings import Limits
from serving import eventually

WORDS = ["a", "pink", "ghost", "robot", "green", "cat", "with", "round", "glasses", "party", "hat", "on", "blue"]


@pytest.fixture(scope="module")
def pipe(served_model) -> AtollPipeline:
    return AtollPipeline(served_model)


@pytest.fixture
def scheduler(served_model):
    made: list[Scheduler] = []

    def make(**limits: object) -> Scheduler:
        made.append(Scheduler(AtollPipeline(served_model), Limits(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.close(cancel=True)


class Told:
    """Collects a scheduler's events for some images."""

    def __init__(self, num: int) -> None:
        self.events: list[list[Event]] = [[] for _ in range(num)]

    def calls(self) -> list[Callable[[Event], None]]:
        return [own.append for own in self.events]

    def last(self) -> list[Event]:
        eventually(lambda: all(own and not isinstance(own[-1], Preview) for own in self.events), 240)
        return [own[-1] for own in self.events]


def make_job(
    pipe: AtollPipeline, seed: int = 0, prompt: str = "a robot", client: str = "", previews: int = 0, **plan: object
) -> Job:
    return Job(prompt, "", seed, pipe.plan(**{"steps": 3, **plan}), client, previews)


def by_pipeline(pipe: AtollPipeline, job: Job) -> torch.Tensor:
    plan = job.plan
    return pipe(
        job.prompt, negative_prompt=job.negative, seed=job.seed, num_inference_steps=plan.steps,
        guidance_scale=plan.guidance, solver=plan.solver, routing=str(plan.routing), route_every=plan.routing.every,
        confident=plan.routing.confident, experts=plan.experts, output_type="latent", progress=False,
    ).images  # fmt: skip


def random_jobs(pipe: AtollPipeline, num: int, most_steps: int) -> list[Job]:
    rng = random.Random(0)
    jobs = []
    for i in range(num):
        plan = pipe.plan(
            steps=rng.randint(1, most_steps), guidance=rng.choice([None, 1.0, 3.0, 0.5]),
            solver=rng.choice(list(SOLVERS)),
            routing=rng.choice(["top1", "topk:2", "full", "threshold:0.2", "sample", "by_time:0.5"]),
            route_every=rng.choice([1, 1, 2]), confident=rng.choice([None, None, 0.7]),
            experts=rng.choice([None, None, [0, 2], [1]]),
        )  # fmt: skip
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(0, 8)))
        jobs.append(Job(prompt, rng.choice(["", "a dog"]), rng.randrange(2**63 - 1), plan, str(i % 16)))
    return jobs


@pytest.mark.parametrize(
    ("num", "steps"), [(24, 8), pytest.param(200, 30, marks=pytest.mark.slow)], ids=["some", "200 of 1 to 30 steps"]
)
def test_every_image_is_the_pipeline_s(scheduler, pipe, num, steps, report):
    """From 16 clients at random times, with random prompts, seeds, steps, guidance, solvers and routings."""
    jobs, told, many = random_jobs(pipe, num, steps), Told(num), scheduler(waiting=1000)

    def client(number: int) -> None:
        rng = random.Random(number)
        for i in range(number, num, 16):
            many.submit([jobs[i]], [told.calls()[i]])
            threading.Event().wait(rng.random() * 0.05)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    worst = 0.0
    for job, event in zip(jobs, told.last(), strict=True):
        assert isinstance(event, Finished), event
        expected = by_pipeline(pipe, job)
        worst = max(worst, float((event.latents - expected).abs().max()))
        assert event.without == ()
        torch.testing.assert_close(event.trace.weights.sum(1), torch.ones(len(event.trace.times)))
    report(f"{num} images of 1 to {steps} steps, 16 clients: largest difference of latents to the pipeline {worst:.1e}")
    assert worst < 1e-4


def test_images_of_one_time_share_it(scheduler, pipe):
    """Images that started together use the networks' fast path."""
    jobs = [make_job(pipe, seed) for seed in range(4)]
    told = Told(4)
    scheduler().submit(jobs, told.calls())
    for job, event in zip(jobs, told.last(), strict=True):
        assert isinstance(event, Finished)
        torch.testing.assert_close(event.latents, by_pipeline(pipe, job), atol=1e-4, rtol=0)


def test_previews(scheduler, pipe):
    told, one = Told(2), make_job(pipe, previews=3, steps=6)
    scheduler().submit([one, replace(one, state=True)], told.calls())
    told.last()
    expected = pipe("a robot", seed=0, num_inference_steps=6, previews=3, output_type="latent", progress=False).trace[0]
    for own in told.events:
        previews = [event for event in own if isinstance(event, Preview)]
        assert [event.number for event in previews] == [0, 2, 4]
        assert [event.t for event in previews] == pytest.approx([preview.t for preview in expected.previews])
    for event, preview in zip(told.events[0], expected.previews, strict=False):
        torch.testing.assert_close(event.latents[0], preview.x0, atol=1e-4, rtol=0)
    assert float(told.events[1][0].latents.std()) > float(told.events[0][0].latents.std())  # noise is in it


def test_the_first_preview_is_ready_before_the_next_step(scheduler, pipe, monkeypatch):
    """The scheduler's own thread decodes it; one that cannot be decoded fails only its own request."""
    many, order, threads = scheduler(), [], []
    answer, render = Mixture.answer, many.pipe.render

    def recorded(latents: torch.Tensor) -> list:
        order.append("render")
        threads.append(threading.current_thread().name)
        return render(latents)

    def evaluated(self: Mixture, *args: object) -> object:
        order.append("step")
        return answer(self, *args)

    monkeypatch.setattr(many.pipe, "render", recorded)
    monkeypatch.setattr(Mixture, "answer", evaluated)

    async def shown(*jobs: Job) -> list[Shown]:
        return [one async for one in OwnImages(many.pipe, many, jobs).shown() if one is not None]

    found = asyncio.run(shown(make_job(pipe, previews=3)))
    assert [type(one.event) for one in found] == [Preview, Preview, Preview, Finished]
    assert order[:3] == ["step", "render", "step"]
    assert threads[0].startswith("atoll-")
    assert not threads[0].startswith("atoll-render")
    assert all(name.startswith("atoll-render") for name in threads[1:])

    def failing(latents: torch.Tensor) -> list:
        if threading.current_thread().name.startswith("atoll-render"):
            return render(latents)
        raise InputError("it cannot be decoded")

    async def both() -> list[object]:
        work = shown(make_job(pipe, previews=1)), shown(make_job(pipe, seed=1))
        return await asyncio.gather(*work, return_exceptions=True)

    monkeypatch.setattr(many.pipe, "render", failing)
    failed, fine = asyncio.run(both())
    assert isinstance(failed, InputError)
    assert isinstance(fine, list)
    assert isinstance(fine[-1].event, Finished)


class Gate:
    """Blocks a scheduler until it is opened, and counts its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.seen = threading.Semaphore(0), list[list[str]]()
        answer = Mixture.answer

        def gated(mixture: Mixture, samples: Sequence, x: torch.Tensor, t: torch.Tensor):
            assert self.allowed.acquire(timeout=60)
            self.seen.append([str(len(samples))])
            return answer(mixture, samples, x, t)

        monkeypatch.setattr(Mixture, "answer", gated)

    def step(self, num: int = 1) -> None:
        before = len(self.seen)
        self.allowed.release(num)
        eventually(lambda: len(self.seen) >= before + num)


def running(one: Scheduler) -> list[str]:
    return sorted(image.job.client for image in one._running)


def test_who_joins_and_leaves(scheduler, pipe, monkeypatch):
    """New images join at the next step, and cancelled ones leave."""
    gate, one, told = Gate(monkeypatch), scheduler(), Told(2)
    first = one.submit([make_job(pipe, steps=50, client="a")], told.calls()[:1])[0]
    gate.step()
    one.submit([make_job(pipe, steps=8, client="b")], told.calls()[1:])  # more than all below
    gate.step(2)
    eventually(lambda: running(one) == ["a", "b"])
    first.cancel()
    gate.step(2)
    eventually(lambda: running(one) == ["b"])
    gate.allowed.release(100)
    eventually(lambda: told.events[1])
    assert isinstance(told.events[1][0], Finished)
    assert told.events[0] == []
    eventually(lambda: one.counts() == (0, 0))


def test_clients_share_the_places(scheduler, pipe, monkeypatch):
    """One with many images gives up places to a later one; the paused image still equals the pipeline's."""
    gate, one, told = Gate(monkeypatch), scheduler(images=4), Told(9)
    jobs = [make_job(pipe, seed, client="many", steps=6) for seed in range(8)] + [
        make_job(pipe, 9, client="one", steps=6)
    ]
    one.submit(jobs[:8], told.calls()[:8])
    gate.step(2)
    assert running(one) == ["many"] * 4
    one.submit(jobs[8:], told.calls()[8:])
    gate.step(2)
    eventually(lambda: running(one) == ["many"] * 3 + ["one"])
    gate.allowed.release(1000)
    for job, event in zip(jobs, told.last(), strict=True):
        assert isinstance(event, Finished)
        torch.testing.assert_close(event.latents, by_pipeline(pipe, job), atol=1e-4, rtol=0)


def test_no_more_than_fits(scheduler, pipe, monkeypatch):
    gate, one = Gate(monkeypatch), scheduler(images=2, waiting=3)
    one.submit([make_job(pipe)] * 4, Told(4).calls())
    with pytest.raises(BusyError, match="no room for 2 more") as refused:
        one.submit([make_job(pipe)] * 2, Told(2).calls())
    assert 1 <= refused.value.retry_after <= 600
    one.submit([make_job(pipe)], Told(1).calls())
    gate.allowed.release(1000)


def test_places_by_memory(served_model):
    small = Scheduler(AtollPipeline(served_model), Limits(images=4096, memory=1e-9))
    assert small.places == 1
    small.close()


def test_a_failure_is_one_image_s(scheduler, pipe, monkeypatch):
    """Tested with an image whose experts all fail, in a batch with others, and one with a routing the model lacks."""
    velocity = VelocityExpert.velocity

    def failing(self: FolderExpert, x: torch.Tensor, *rest: object) -> torch.Tensor:
        u = velocity(self, x, *rest)
        return torch.where((x.flatten(1).abs().amax(1) > 50).view(-1, 1, 1, 1), torch.nan, u)

    expected = [by_pipeline(pipe, make_job(pipe, seed)) for seed in (1, 2)]
    monkeypatch.setattr(VelocityExpert, "velocity", failing)
    one, told = scheduler(), Told(3)
    jobs = [make_job(pipe, 1), make_job(pipe, 0, guidance=1e6), make_job(pipe, 2)]
    one.submit(jobs, told.calls())
    good, bad, also = told.last()
    assert isinstance(bad, Failed)
    assert isinstance(bad.error, InputError)
    for event, latents in zip((good, also), expected, strict=True):
        assert isinstance(event, Finished)
        torch.testing.assert_close(event.latents, latents, atol=1e-4, rtol=0)


def test_what_must_not_happen_does_not_end_it(scheduler, pipe, monkeypatch):
    one, told = scheduler(), Told(2)
    with monkeypatch.context() as patch:
        patch.setattr(Mixture, "answer", lambda *_: 1 / 0)
        one.submit([make_job(pipe)], told.calls()[:1])
        eventually(lambda: told.events[0])
    assert isinstance(told.events[0][0], Failed)
    one.submit([make_job(pipe)], told.calls()[1:])
    assert isinstance(told.last()[1], Finished)


def test_closing_finishes_what_is_there(scheduler, pipe):
    one, told = scheduler(images=2), Told(5)
    one.submit([make_job(pipe, seed) for seed in range(5)], told.calls())
    one.close()
    assert all(isinstance(own[-1], Finished) for own in told.events)
    with pytest.raises(BusyError, match="shut down"):
        one.submit([make_job(pipe)], Told(1).calls())


def test_texts_do_not_stay(scheduler, pipe):
    one, told = scheduler(), Told(3)
    one.submit([make_job(pipe, prompt=f"a robot {i}") for i in range(3)], told.calls())
    told.last()
    one.submit([make_job(pipe)], Told(1).calls())
    eventually(lambda: one.counts() == (0, 0))
    assert len(one._texts) <= 4
