"""An expert behind a URL is a velocity function like any other: latents, times and texts out, velocities back.

One request per step has all samples that are routed to the expert, once each: the owner's server applies guidance.
Bodies are safetensors. Texts are sent as the encoder's tokens, once, and then referred to by hash. Nothing that comes
back is trusted: size, type and shape are checked here, values by the mixture.

A peer that fails or is slow is marked unavailable ("away") until a polling thread gets an answer again; no image waits
for it meanwhile.
"""

import hashlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakSet

import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from atoll.cards import ExpertCard
from atoll.diffusion.prediction import Prediction
from atoll.errors import AwayError, InputError, printable
from atoll.networks.dit import DiTConfig
from atoll.sampling.expert import Guidance, TextCache, VelocityExpert
from atoll.serving.guard import NEEDED
from atoll.storage import parse_json, reason_of
from atoll.tensors import tensors_of

LOG = logging.getLogger("atoll.serving")
MAX_CARD = 1 << 20  # bytes
LOCAL = {"localhost", "127.0.0.1", "::1"}
PAUSES = (0.1, 1.0)  # seconds between polls of a peer that is away: initial and maximum
MAX_KNOWN = 4096  # texts, about as many as an owner keeps
NO_TEXT = -1
ANOTHER = "another expert answers there now"


def digest_of_text(tokens: Tensor) -> bytes:
    """Returns the hash that names a text: the SHA-256 of its tokens[1, L, text_dim]."""
    content = tokens.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(str(tuple(content.shape)).encode() + content.numpy().tobytes()).digest()


class Carrier(Protocol):
    """Carries requests to an expert's owner, and the responses back."""

    def request(self, method: str, path: str, body: bytes | None, largest: int) -> tuple[int, bytes]:
        """Returns status and content, at most `largest` bytes; raises OSError or ValueError if none arrives in time."""

    def close(self) -> None:
        """Closes the connection, or ends the process behind it."""


class Http:
    """Carries requests over HTTP, on persistent connections."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        try:
            import httpx
        except ImportError as error:
            raise InputError(NEEDED) from error
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise InputError(f"{url!r} is no URL of an expert: give one such as https://experts.example.org")
        if not 0 < timeout <= 3600:
            raise InputError(f"the timeout must lie above 0 and be at most 3600 seconds, but is {timeout}")
        if key and parts.scheme == "http" and parts.hostname not in LOCAL:
            LOG.warning("the key for %s goes over the network as it is: use https", parts.netloc)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._failure, self._client = httpx.HTTPError, httpx.Client(headers=headers, follow_redirects=False)
        self.url, self.timeout = url.rstrip("/"), timeout
        self._sockets: WeakSet[socket.socket] = WeakSet()  # of open connections

    def request(self, method: str, path: str, body: bytes | None, largest: int) -> tuple[int, bytes]:
        try:
            return self._request(method, path, body, largest)
        except self._failure as error:
            raise OSError(reason_of(error) or type(error).__name__) from error

    def _request(self, method: str, path: str, body: bytes | None, largest: int) -> tuple[int, bytes]:
        content, url, trace = b"", self.url + path, {"trace": self._trace}
        with (
            self._deadline(),
            self._client.stream(method, url, content=body, timeout=self.timeout, extensions=trace) as response,
        ):
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > largest:
                    raise ValueError("its answer is too large")
            return response.status_code, content

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """Cuts the connections if a response is not complete in time: httpx limits each read, not all of them."""
        late, message = threading.Event(), f"it took more than {self.timeout:g} seconds"

        def cut() -> None:
            late.set()
            for connection in list(self._sockets):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        except self._failure as error:
            if late.is_set():
                raise ValueError(message) from error
            raise
        finally:
            timer.cancel()
        if late.is_set():  # a body without a length may look complete
            raise ValueError(message)

    def _trace(self, event: str, about: dict[str, Any]) -> None:
        """Notes the socket of each new connection, as httpcore reports it."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._sockets.add(about["return_value"].get_extra_info("socket"))

    def close(self) -> None:
        self._client.close()


class RemoteExpert(VelocityExpert):
    """An expert of `atoll serve-expert` at a URL."""

    elsewhere = True
    config: DiTConfig | None = None  # of its network, if that uses this machine's memory

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: float = 10.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        carrier: Carrier | None = None,
        card: ExpertCard | None = None,
    ) -> None:
        """Fetches the expert's card. `timeout` is in seconds, per response; `dtype` is that of latents on the wire.

        A `carrier` replaces HTTP; `url` then only names the expert. If its `card` is given, an expert that does not
        answer is marked away instead of raising InputError.
        """
        self.url, self.path, self._wire, self.device = url.rstrip("/"), url, dtype, torch.device(device)
        self._carrier = carrier or Http(url, key, timeout)
        self._digests = WeakTensorKeyDictionary()
        self._known: set[bytes] = set()  # the texts that the owner has
        self._away: str | None = None  # why it is away
        self._lock, self._closed = threading.Lock(), threading.Event()
        try:
            found = self._read_card()
            if card not in (None, found):
                raise ValueError(ANOTHER)
            self.card = found
        except (OSError, ValueError) as error:
            if card is None:
                advice = "start `atoll serve-expert` there" if carrier is None else "repair the expert, or leave it out"
                raise InputError(f"no expert answers at {url} ({reason_of(error)}): {advice}") from error
            self.card = card
            self._leave(printable(reason_of(error) or type(error).__name__, 200))
        self.shape = tuple(self.card.latent_space.shape)
        self.is_flow = self.card.objective.get("prediction") == Prediction.VELOCITY

    @property
    def text_dim(self) -> int | None:
        return None if self.card.text_encoder is None else self.card.text_encoder.dim

    @property
    def away(self) -> str | None:
        """Returns why it is unavailable, or None if it is available."""
        return self._away

    def close(self) -> None:
        self._closed.set()
        self._carrier.close()

    def velocity(self, x: Tensor, t: Tensor, text: Any = None) -> Tensor:
        """Returns dx/dt of an expert that reads no text."""
        assert text is None, "its owner reads the text: call guided_velocity"
        return self._ask(x, t, [], {})

    def guided_velocity(self, x: Tensor, t: Tensor, texts: Guidance, cache: TextCache) -> Tensor:
        wanted = texts.with_null([row for row, scale in enumerate(texts.scales) if scale != 1])
        named = {self._digest(text): text for text in wanted}
        numbers = {digest: number for number, digest in enumerate(named)}
        negative = [
            NO_TEXT if scale == 1 or null is None else numbers[self._digest(null)]
            for null, scale in zip(texts.negative, texts.scales, strict=True)
        ]
        about = {
            "positive": torch.tensor([numbers[self._digest(text)] for text in texts.positive], dtype=torch.int32),
            "negative": torch.tensor(negative, dtype=torch.int32),
            "scales": torch.tensor(texts.scales, dtype=torch.float32),
            "digests": torch.frombuffer(bytearray(b"".join(named)), dtype=torch.uint8).view(-1, 32),
        }
        return self._ask(x, t, list(named.items()), about)

    def _digest(self, text: Tensor) -> bytes:
        if text not in self._digests:
            self._digests[text] = digest_of_text(text)
        digest: bytes = self._digests[text]
        return digest

    def _ask(self, x: Tensor, t: Tensor, texts: Sequence[tuple[bytes, Tensor]], about: dict[str, Tensor]) -> Tensor:
        if self._away is not None:
            raise AwayError(f"the expert at {self.url} is away ({self._away})")
        body = {**about, "x": x.cpu().to(self._wire).contiguous(), "t": t.cpu().float().reshape(-1)}
        try:
            answer = self._send(body, texts)
            u = tensors_of(answer).get("u")
            if u is None or u.shape != x.shape or u.dtype != self._wire:
                raise ValueError("its answer has not the shape of the question")
        except (OSError, ValueError) as error:
            reason = printable(reason_of(error) or type(error).__name__, 200)
            self._leave(reason)
            raise AwayError(f"the expert at {self.url} is away ({reason})") from error
        return u.to(x.device, x.dtype)

    def _send(self, body: dict[str, Tensor], texts: Sequence[tuple[bytes, Tensor]]) -> bytes:
        """Sends a request with the texts that the owner may lack or, if it has dropped others, with all of them."""
        largest = body["x"].numel() * body["x"].element_size() + (64 << 10)
        for missing in ([pair for pair in texts if pair[0] not in self._known], texts):
            own = {f"text.{name.hex()}": tokens[0].cpu().float().contiguous() for name, tokens in missing}
            status, answer = self._carrier.request("POST", "/v1/velocity", save({**body, **own}), largest)
            if status != 409:
                break
        if status != 200:
            raise ValueError(f"it answers {status}: {answer[:200].decode('utf-8', 'replace')}")
        if len(self._known) > MAX_KNOWN:
            self._known.clear()  # sent again when next used
        self._known.update(name for name, _ in texts)
        return answer

    def _read_card(self) -> ExpertCard:
        status, content = self._carrier.request("GET", "/v1/expert", None, MAX_CARD)
        if status != 200:
            raise ValueError(f"it answers {status}")
        try:
            return ExpertCard.model_validate(parse_json(content))
        except ValidationError as error:
            raise ValueError("what it says of itself is no expert's card") from error

    def _leave(self, reason: str) -> None:
        with self._lock:
            if self._away is None and not self._closed.is_set():
                LOG.warning("the expert at %s is away (%s): others answer in its place", self.url, reason)
                self._away = reason
                threading.Thread(target=self._return, name="atoll-return", daemon=True).start()

    def _return(self) -> None:
        pause, most = PAUSES
        while not self._closed.wait(pause):
            pause = min(2 * pause, most)
            try:
                if self._read_card() != self.card:
                    raise ValueError(ANOTHER)
            except (OSError, ValueError, RuntimeError) as error:
                self._away = printable(reason_of(error) or type(error).__name__, 200)
                continue
            self._known.clear()
            self._away = None
            LOG.info("the expert at %s is back", self.url)
            return
