"""`atoll serve-expert`: the owner's side of a remote expert. Weights stay here; velocities leave."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from atoll.errors import InputError, printable
from atoll.sampling.expert import FolderExpert, Guidance, TextCache
from atoll.sampling.pipeline import get_dtype
from atoll.serving.access import Access, Client
from atoll.serving.guard import LOG, NEEDED, Guard, Refusal, run, warn_if_open
from atoll.serving.metrics import Metrics
from atoll.serving.remote import NO_TEXT, digest_of_text
from atoll.serving.scheduler import BusyError
from atoll.serving.settings import Limits
from atoll.tensors import get_device, send, tensors_of

WIRE = (torch.float32, torch.float16)
MAX_GUIDANCE = 1000.0
MAX_WAITING = 64  # requests
TEXT_BYTES = 1 << 30  # of cached keys and values


class Forgotten(Refusal):
    """A request names texts by hash that are not cached: the client has to resend them."""

    def __init__(self) -> None:
        super().__init__(409, "texts are named that are not here: send their tokens")


class Owner:
    """Answers requests with the velocities of an expert."""

    def __init__(self, expert: FolderExpert, samples: int) -> None:
        expert.load()
        self.expert, self.samples = expert, samples
        self.cache = TextCache(expert.read_text)
        config, text = expert.network.config, expert.card.text_encoder
        self.length = 0 if text is None else text.max_length
        per_text = 8 * config.depth * config.hidden_size * max(1, self.length)
        self.most_texts = max(2 * samples, min(4096, TEXT_BYTES // per_text))
        # Keyed by client too: otherwise a cache hit would reveal what another client has requested.
        self._texts: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self.most_bytes = (1 << 20) + samples * 4 * (
            torch.Size(expert.shape).numel() + 2 * self.length * (expert.text_dim or 0)
        )

    @torch.no_grad()
    def answer(self, body: bytes, client: str) -> bytes:
        """Returns the velocities that a request asks for."""
        try:
            tensors = tensors_of(body)
        except ValueError as error:
            raise Refusal(400, "the request is not a safetensors file") from error
        x, t = self._take(tensors, "x", WIRE), self._take(tensors, "t", (torch.float32,))
        if x.shape[1:] != self.expert.shape or not 1 <= len(x) <= self.samples:
            raise Refusal(
                400, f"x must be 1 to {self.samples} samples of {list(self.expert.shape)}, but is {list(x.shape)}"
            )
        if t.shape not in ((1,), (len(x),)) or not bool(((t >= 0) & (t <= 1)).all()):
            raise Refusal(400, f"t must be 1 or {len(x)} times from 0 to 1")
        there, times = send(x.float(), self.expert.device), send(t if len(t) > 1 else t[0], self.expert.device)
        if self.expert.text_dim is None:
            u = self.expert.velocity(there, times)
        else:
            u = self.expert.guided_velocity(there, times, self._guidance(tensors, len(x), client), self.cache)
        return save({"u": u.cpu().to(x.dtype).contiguous()})

    def _take(self, tensors: dict[str, Tensor], name: str, types: Sequence[torch.dtype]) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in types:
            raise Refusal(400, f"the request needs {name} as {' or '.join(map(str, types))}")
        return tensor

    def _guidance(self, tensors: dict[str, Tensor], num: int, client: str) -> Guidance:
        for name, tokens in tensors.items():
            if name.startswith("text."):
                self._keep(client, tokens)
        digests = self._take(tensors, "digests", (torch.uint8,))
        numbers = [self._take(tensors, name, (torch.int32,)) for name in ("positive", "negative")]
        scales = self._take(tensors, "scales", (torch.float32,))
        right = digests.dim() == 2 and digests.shape[1] == 32 and len(digests) <= 2 * num
        if not right or any(values.shape != (num,) for values in (*numbers, scales)):
            raise Refusal(
                400, "positive, negative and scales must have one number per sample, digests 32 bytes per text"
            )
        positive, negative = (values.tolist() for values in numbers)
        if not all(0 <= value <= MAX_GUIDANCE for value in scales.tolist()):
            raise Refusal(400, f"scales must lie from 0 to {MAX_GUIDANCE:g}")
        known = range(len(digests))
        if not all(number in known for number in positive) or not all(
            number in known or (number == NO_TEXT and scale == 1)
            for number, scale in zip(negative, scales.tolist(), strict=True)
        ):
            raise Refusal(400, "positive and negative must be numbers of digests")
        texts = [self._text(client, bytes(row)) for row in digests.tolist()]
        nulls = [None if number == NO_TEXT else texts[number] for number in negative]
        return Guidance([texts[number] for number in positive], nulls, scales.tolist())

    def _keep(self, client: str, tokens: Tensor) -> None:
        """Caches a text under its own hash, not under the one that the client claims."""
        width = self.expert.text_dim
        if tokens.dtype != torch.float32 or tokens.dim() != 2 or tokens.shape[1] != width:
            raise Refusal(400, f"a text must be float32 tokens of width {width}")
        if not 1 <= len(tokens) <= self.length:
            raise Refusal(400, f"a text must have 1 to {self.length} tokens")
        text = tokens[None].clone()
        self._texts.setdefault((client, digest_of_text(text)), text)
        while len(self._texts) > self.most_texts:
            self._texts.popitem(last=False)

    def _text(self, client: str, digest: bytes) -> Tensor:
        if (client, digest) not in self._texts:
            raise Forgotten
        self._texts.move_to_end((client, digest))
        return self._texts[client, digest]


def make_app(owner: Owner, access: Access, limits: Limits, metrics: Metrics, names: Sequence[str] = ()) -> Guard:
    """Returns the ASGI app."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse, Response
    except ImportError as error:
        raise InputError(NEEDED) from error
    app = FastAPI(title="Atoll expert", docs_url=None, redoc_url=None, openapi_url=None)
    pool, waiting = ThreadPoolExecutor(1, "atoll-expert"), asyncio.Semaphore(MAX_WAITING)

    @app.exception_handler(Refusal)
    @app.exception_handler(InputError)
    async def refused(request: Request, error: Exception) -> Response:
        refusal = Refusal.of(error)
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    @app.get("/healthz")
    @app.get("/readyz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/metrics")
    async def text() -> Response:
        return Response(metrics.text(access, []), media_type="text/plain; version=0.0.4")

    @app.get("/v1/expert")
    async def card() -> Response:
        return JSONResponse(owner.expert.card.values())

    @app.post("/v1/velocity")
    async def velocity(request: Request) -> Response:
        body, client = await request.body(), request.state.client
        assert isinstance(client, Client)
        num = samples_in(body)
        if waiting.locked():
            raise BusyError(f"{MAX_WAITING} requests are waiting", 1)
        with client.hold(num):
            async with waiting:
                answer = await asyncio.get_running_loop().run_in_executor(pool, owner.answer, body, client.name)
        metrics.answered(owner.expert.path.name, owner.expert.card.cluster or 0, num)
        return Response(answer, media_type="application/octet-stream")

    return Guard(app, access, limits, lambda path: path in ("/healthz", "/readyz"), names, (), metrics.request)


def samples_in(body: bytes) -> int:
    """Returns how many samples a request has, to charge them before they are computed."""
    try:
        return max(1, len(tensors_of(body)["x"]))
    except (KeyError, ValueError, TypeError) as error:
        raise Refusal(400, "the request is not a safetensors file with x") from error


def serve_velocities(
    folder: Path, host: str, port: int, *, keys: Path | None, names: Sequence[str], samples: int, limits: Limits,
    device: str, dtype: str | None, conversion: str | None,
) -> None:  # fmt: skip
    """Serves one expert until SIGTERM, and prints the URL."""
    if not 1 <= samples <= 65536:
        raise InputError(f"--samples must be from 1 to 65536, but is {samples}")
    warn_if_open(host, keys)
    expert = FolderExpert(
        folder, conversion=conversion, dtype=None if dtype is None else get_dtype(dtype), device=get_device(device)
    )
    owner, access = Owner(expert, samples), Access(keys)
    app = make_app(owner, access, replace(limits, body=owner.most_bytes), Metrics(), names)

    def tell(url: str) -> None:
        kind = expert.card.objective.get("prediction")
        print(printable(f"{folder.name}: cluster {expert.card.cluster}, predicts {kind}"), flush=True)
        print(
            f"it answers at {url}: atoll serve MODEL --remote {expert.card.cluster or 0}={url}; Ctrl-C ends it",
            flush=True,
        )

    def reload() -> None:
        try:
            access.reload()
        except InputError as error:
            LOG.warning("the keys stay as they were: %s", error)

    run(app, host, port, limits, on_start=tell, on_stop=lambda: None, on_hangup=reload)
