"""The images of one request in flight: their scheduler's events, as PNG files.

Events come from a thread, the scheduler's or the one that reads from its process; images are decoded in another, so
that the event loop never blocks. The first preview of an image arrives decoded: the scheduler does that before its
next step, since two threads competing for the interpreter lock would delay it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from atoll.sampling.folder import described_png, png_of
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.apart import SchedulerProcess
from atoll.serving.scheduler import Event, Failed, Finished, Job, Preview, Scheduler

BEAT = 15.0  # seconds without an event after which a keep-alive is sent
POOL = ThreadPoolExecutor(1, "atoll-render")


class Shown(NamedTuple):
    """An image of a request, or a preview of one."""

    number: int  # of the image in its request
    event: Preview | Finished
    png: bytes


class Images(Protocol):
    """The images of one request in flight, wherever they are generated."""

    def shown(self) -> AsyncIterator[Shown | None]:
        """Yields previews and images until all are done, None as a keep-alive; raises the error of one that fails."""

    def cancel(self) -> None:
        """Cancels those that are not done."""


class OwnImages:
    """Images that a scheduler generates and this process decodes."""

    def __init__(self, pipe: AtollPipeline, scheduler: Scheduler | SchedulerProcess, jobs: Sequence[Job]) -> None:
        """Submits them; raises BusyError if there is no room."""
        self.pipe, self.jobs = pipe, jobs
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        self._images = scheduler.submit(jobs, [partial(self._tell, i) for i in range(len(jobs))])

    def _tell(self, index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def shown(self) -> AsyncIterator[Shown | None]:
        left = len(self.jobs)
        while left:
            try:
                async with asyncio.timeout(BEAT):
                    index, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Failed):
                raise event.error
            left -= isinstance(event, Finished)
            png = event.png if isinstance(event, Preview) else None
            if png is None:
                png = await self._loop.run_in_executor(POOL, self._render, self.jobs[index], event)
            yield Shown(index, event, png)

    def _render(self, job: Job, event: Preview | Finished) -> bytes:
        """Returns a PNG; that of a finished image records how it was generated."""
        pipe = self.pipe
        if isinstance(event, Preview):
            return png_of(pipe.render(event.latents)[0])
        settings = pipe.settings_of(job.plan) | ({"without": list(event.without)} if event.without else {})
        return described_png(
            pipe.render(event.latents)[0], prompt=job.prompt, negative_prompt=job.negative, seed=job.seed,
            model=pipe.hash, settings=settings,
        )  # fmt: skip

    def cancel(self) -> None:
        for image in self._images:
            image.cancel()
