"""Step-level batching: all images in flight advance by one velocity evaluation per step.

Each image is a walk of its solver from its own noise, and a sample of one mixture. A step gathers where all walks need
the velocity, whatever their prompts, times, guidance, solvers and routing, calls each expert once, and sends each walk
its own velocity. So new images join at the next step, finished and cancelled ones leave, and each image matches the one
that `AtollPipeline` generates, up to rounding.

One thread per model computes, and reports events by a callback per image.
"""

import math
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from atoll.diffusion.solvers import EVALUATIONS, Step, Walk, get_solver
from atoll.errors import InputError
from atoll.sampling.ensemble import Mixture, Sample, draw_noise, image_generators
from atoll.sampling.expert import Prompts
from atoll.sampling.folder import png_of
from atoll.sampling.pipeline import AtollPipeline, ImageTrace, Plan
from atoll.serving.settings import Limits
from atoll.tensors import send

FIRST_GUESS = 0.01  # seconds per evaluation of one image, until measured


class BusyError(InputError):
    """Raised when no image can be accepted now; a retry after `retry_after` seconds may succeed."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(min(retry_after, 600)))

    @classmethod
    def of(cls, waiting: int, more: int, seconds: float) -> "BusyError":
        return cls(f"{waiting} images are waiting and there is no room for {more} more", seconds)


class Preview(NamedTuple):
    """An unfinished image after a step."""

    number: int  # of the step, from 0
    t: float
    latents: Tensor  # [1, C, S, S]
    weights: list[float]  # of the experts, at the last evaluation
    png: bytes | None = None  # if it is decoded already


class Finished(NamedTuple):
    latents: Tensor  # [1, C, S, S]
    trace: ImageTrace
    without: tuple[int, ...]  # the experts that were needed but away


class Failed(NamedTuple):
    error: Exception


Event = Preview | Finished | Failed


@dataclass(frozen=True)
class Job:
    """One image to generate."""

    prompt: str
    negative: str
    seed: int
    plan: Plan
    client: str = ""  # images wait for others of the same client, not for those of all
    previews: int = 0  # at most this many, evenly spaced
    state: bool = False  # whether they show the noisy latents, not the estimate of the clean ones

    @property
    def evaluations(self) -> int:
        return self.plan.steps * EVALUATIONS[self.plan.solver]


@dataclass(eq=False)
class InFlight:
    """An image in flight; created by `Scheduler.submit`."""

    job: Job
    tell: Callable[[Event], None]
    arrived: float
    cancelled: bool = False
    started: float | None = None
    sample: Sample | None = None
    walk: Walk | None = None
    at: tuple[Tensor, Tensor] | None = None  # where the walk needs the velocity
    previews: list[Step] = field(default_factory=list)  # taken in the last step, not yet reported
    shown: bool = False  # whether it has had a preview
    evaluations: list[tuple[float, list[float]]] = field(default_factory=list)  # t, and the experts' weights

    def cancel(self) -> None:
        """Stops the image at the next step; no further events are reported."""
        self.cancelled = True

    @property
    def left(self) -> int:
        return self.job.evaluations - len(self.evaluations)


class Observer:
    """Receives what a scheduler reports for metrics; its methods are called from a background thread."""

    def stepped(self, seconds: float, images: int, samples: Counter[int]) -> None:
        """Called after a step: it advanced so many `images`, and each expert answered for so many `samples`."""

    def finished(self, waited: float | None, without: bool) -> None:
        """Called when an image is done; it `waited` in the queue for so many seconds, if that is known."""


class Scheduler:
    """Generates submitted images, at most `places` at once."""

    def __init__(self, pipe: AtollPipeline, limits: Limits = Limits(), observer: Observer | None = None) -> None:  # noqa: B008
        self.pipe, self.limits, self.observer = pipe, limits, observer or Observer()
        self.places = max(1, min(limits.images, int(limits.memory * _memory() / bytes_per_image(pipe))))
        self._mixture = Mixture(pipe.ensemble, checked=True)
        self._texts: WeakValueDictionary[str, Tensor] = WeakValueDictionary()  # those in flight
        self._wake = threading.Condition()
        self._waiting: dict[str, deque[InFlight]] = {}  # by client
        self._running: list[InFlight] = []
        self._pace = FIRST_GUESS  # seconds per evaluation of one image
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=f"atoll-{pipe.folder.name}", daemon=True)
        self._thread.start()

    # --- for other threads ----------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], tell: Sequence[Callable[[Event], None]]) -> list[InFlight]:
        """Queues all of these images or, if there is no room, none, and raises BusyError."""
        with self._wake:
            if self._closed:
                raise BusyError("the model is being replaced or shut down: ask again", 1)
            running, num = self.counts()
            free = self.places - running
            if num + len(jobs) > self.limits.waiting + max(0, free):
                raise BusyError.of(num, len(jobs), self.backlog())
            now = time.monotonic()
            images = [InFlight(job, call, now) for job, call in zip(jobs, tell, strict=True)]
            for image in images:
                self._waiting.setdefault(image.job.client, deque()).append(image)
            self._wake.notify()
        return images

    def backlog(self) -> float:
        """Returns the estimated seconds until all running and waiting images are done."""
        with self._wake:
            return self._pace * sum(image.left for image in self._all() if not image.cancelled)

    def counts(self) -> tuple[int, int]:
        """Returns how many images are in flight, and how many wait."""
        with self._wake:
            waiting = sum(not image.cancelled for image in chain(*self._waiting.values()))
            return sum(not image.cancelled for image in self._running), waiting

    def close(self, cancel: bool = False) -> None:
        """Stops accepting images, and returns when those left are finished or cancelled."""
        with self._wake:
            self._closed = True
            if cancel:
                for image in self._all():
                    image.cancel()
            self._wake.notify()
        self._thread.join()

    def _all(self) -> Iterator[InFlight]:
        return chain(self._running, *self._waiting.values())

    # --- the scheduler's thread -----------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._running = [image for image in self._running if not image.cancelled]
                self._admit()
                if not self._running:
                    if self._closed:
                        return
                    self._wake.wait()
                    continue
                running = list(self._running)
            try:
                done = self._step(running)
            except Exception as error:  # an unexpected error fails these images, not the server
                done = running
                for image in running:
                    image.tell(Failed(error))
            if done:
                with self._wake:
                    self._running = [image for image in self._running if image not in done]

    def _admit(self) -> None:
        """Gives free places to the clients with the fewest; among equals, to the one that has waited longest.

        If none is free, a client with at least two more than another gives one up: that image pauses, and resumes
        when its turn comes.
        """
        for client, images in list(self._waiting.items()):
            self._waiting[client] = deque(image for image in images if not image.cancelled)
        while True:
            self._waiting = {client: images for client, images in self._waiting.items() if images}
            if not self._waiting:
                return
            held = Counter(image.job.client for image in self._running)
            poorest = min(self._waiting, key=lambda client: (held[client], self._waiting[client][0].arrived))
            if len(self._running) >= self.places:
                richest, most = held.most_common(1)[0]
                if most < held[poorest] + 2:
                    return
                paused = next(image for image in reversed(self._running) if image.job.client == richest)
                self._running.remove(paused)
                self._waiting.setdefault(richest, deque()).appendleft(paused)
            self._running.append(self._waiting[poorest].popleft())

    def _step(self, running: Sequence[InFlight]) -> list[InFlight]:
        """Advances these images by one evaluation each; returns those that are done."""
        begin = time.perf_counter()
        done: list[InFlight] = []
        for image in running:
            if image.walk is None:
                try:
                    self._start(image)
                except Exception as error:
                    done.append(image)
                    image.tell(Failed(error))
        images = [image for image in running if image.at is not None]
        if not images:
            return done
        samples = [image.sample for image in images if image.sample is not None]
        xs, times = zip(*(image.at for image in images if image.at is not None), strict=True)
        # One time for all is faster; the solvers' progress shows this without reading from the device.
        alike = {(image.job.plan.steps, image.job.plan.solver, len(image.evaluations)) for image in images}
        t = times[0] if len(alike) == 1 else torch.stack(times)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trace says which experts were left out
            answer = self._mixture.answer(samples, torch.cat(xs), t)
        weights, ts = answer.weights.cpu().tolist(), torch.stack(times).tolist()
        for row, (image, u) in enumerate(zip(images, answer.velocity.split(1), strict=True)):
            image.evaluations.append((ts[row], weights[row]))
            event: Event | None = None
            try:
                if row in answer.errors:
                    raise answer.errors[row]
                assert image.walk is not None
                image.at = image.walk.send(u)
            except StopIteration as end:
                event = self._finished(image, end.value)
            except Exception as error:
                event = Failed(error)
            if image.previews and not isinstance(event, Failed):
                try:
                    self._show(image, weights[row])
                except Exception as error:  # fails this image, not all in flight
                    event = Failed(error)
            image.previews.clear()
            if event is not None:
                done.append(image)
                if not image.cancelled:
                    image.tell(event)
        seconds = time.perf_counter() - begin
        self._pace += 0.1 * (seconds / len(images) - self._pace)
        answered = Counter({k: sum(row[k] > 0 for row in weights) for k in range(len(weights[0]))})
        self.observer.stepped(seconds, len(images), answered)
        return done

    def _show(self, image: InFlight, weights: list[float]) -> None:
        """Reports the last step's previews. The first is decoded here, before the next step: a user waits for it."""
        for step in image.previews:
            latents = step.x if image.job.state else step.x0
            png = None if image.shown else png_of(self.pipe.render(latents)[0])
            image.shown = True
            image.tell(Preview(step.number, float(step.t), latents, weights, png))

    def _start(self, image: InFlight) -> None:
        job, ensemble = image.job, self.pipe.ensemble
        plan = job.plan
        generators = image_generators([job.seed])
        sample = ensemble.make_sample(plan.routing, plan.guidance, plan.experts)
        sample.text, sample.negative, sample.generator = self._text(job.prompt), self._text(job.negative), generators[0]
        shown = range(0, plan.steps, -(-plan.steps // job.previews)) if job.previews > 0 else range(0)

        def on_step(step: Step) -> None:
            if step.number in shown:
                image.previews.append(step)

        noise = send(draw_noise(generators, ensemble.shape), ensemble.device)
        walk = get_solver(plan.solver).walk(noise, plan.times, on_step)
        image.sample, image.started, image.at, image.walk = sample, time.monotonic(), next(walk), walk

    def _text(self, text: str) -> Tensor:
        """Returns an encoded text; images in flight share it, so that each expert reads it only once."""
        tokens = self._texts.get(text)
        if tokens is None:
            self._texts[text] = tokens = Prompts.encode(self.pipe.text_encoder, [text], text).texts[0]
        return tokens

    def _finished(self, image: InFlight, latents: Tensor) -> Event:
        if not bool(torch.isfinite(latents).all()):
            return Failed(InputError("the image is not finite: use smaller guidance or more steps"))
        assert image.sample is not None
        assert image.started is not None
        times, weights = zip(*image.evaluations, strict=True)
        without = tuple(sorted(image.sample.without))
        self.observer.finished(image.started - image.arrived, bool(without))
        return Finished(latents, ImageTrace(times, torch.tensor(weights)), without)


def bytes_per_image(pipe: AtollPipeline) -> int:
    """Returns an estimated upper bound on the memory of an image in flight, in bytes.

    Its latents are small beside the keys and values of its two texts, which each expert that it was routed to caches,
    and the activations of one block, twice for guidance.
    """
    kept = activations = 0
    for number, expert in enumerate(pipe.ensemble.experts):
        if expert is None:
            continue
        config = getattr(expert, "config", None) if expert.elsewhere else pipe.ensemble.take(number).network.config
        if config is None:
            continue
        kept += 2 * 2 * config.depth * config.hidden_size * pipe.text_encoder.max_length
        widest = config.hidden_size * (8 + 2 * config.mlp_ratio) + config.num_heads * config.num_tokens
        activations = max(activations, 2 * int(config.num_tokens * widest))
    return 4 * (kept + activations + 8 * math.prod(pipe.ensemble.shape))


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
