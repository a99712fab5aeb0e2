"""Remote experts: the same images, an owner that refuses invalid requests, peers that fail and return."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, save

from atoll.errors import AwayError, InputError
from atoll.sampling.expert import FolderExpert, Guidance, Prompts, TextCache
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving import remote
from atoll.serving.access import Access
from atoll.serving.metrics import Metrics
from atoll.serving.owner import Owner, make_app
from atoll.serving.remote import Http, RemoteExpert
from atoll.serving.scheduler import Finished, Job, Scheduler
from atoll.serving.settings import Limits
from serving import Command, eventually, in_a_thread, in_process

FEW = {"num_inference_steps": 4, "output_type": "latent", "progress": False}
PROMPTS = ["a pink ghost with a yellow party hat", "a robot", "", "a green frog"]
KEY = "between-us"


def owner_app(folder: Path, keys: Path | None = None, samples: int = 32):
    owner = Owner(FolderExpert(folder), samples)
    return make_app(owner, Access(keys), Limits(body=owner.most_bytes), Metrics())


@pytest.fixture(scope="module")
def owners(served_model):
    """Serves two of three experts remotely."""
    with (
        in_a_thread(owner_app(served_model / "expert_0")) as zero,
        in_a_thread(owner_app(served_model / "expert_1")) as one,
    ):
        yield {0: zero, 1: one}


@pytest.fixture
def one(owners):
    expert = RemoteExpert(owners[0])
    yield expert
    expert.close()


@pytest.fixture(scope="module")
def pipe(served_model) -> AtollPipeline:
    return AtollPipeline(served_model)


@pytest.mark.parametrize("routing", ["top1", "full", "sample"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_same_images(served_model, pipe, owners, routing, guidance):
    far = AtollPipeline(served_model, elsewhere={k: RemoteExpert(url) for k, url in owners.items()})
    options = {"seed": 3, "routing": routing, "guidance_scale": guidance, **FEW}
    torch.testing.assert_close(far(PROMPTS, **options).images, pipe(PROMPTS, **options).images, atol=1e-4, rtol=0)


def test_each_sample_guided_in_its_own_way(served_model, pipe, one):
    local, cache = FolderExpert(served_model / "expert_0"), None
    local.load()
    cache = TextCache(local.read_text)
    texts = Prompts.encode(pipe.text_encoder, PROMPTS, "a cat").guidance(1.0)
    x, t = torch.randn(4, *pipe.ensemble.shape), torch.tensor([0.9, 0.2, 0.5, 1.0])
    with torch.no_grad():
        for scales in ([1.0, 3.0, 1.0, 0.0], [2.0] * 4, [1.0] * 4):
            guided = Guidance(texts.positive, texts.negative, scales)
            expected = local.guided_velocity(x, t, guided, cache)
            torch.testing.assert_close(one.guided_velocity(x, t, guided, cache), expected, atol=1e-5, rtol=1e-5)
            for row, scale in enumerate(scales):  # alone
                own = Guidance(texts.positive[row : row + 1], texts.negative[row : row + 1], [scale])
                alone = local.guided_velocity(x[row : row + 1], t[row], own, cache)
                torch.testing.assert_close(expected[row : row + 1], alone, atol=1e-4, rtol=1e-4)


def test_what_is_sent(one, pipe, monkeypatch):
    """Latents are sent once per sample and step, whatever the guidance; a text only once."""
    sent: list[int] = []
    request = Http.request

    def watched(self, method, path, body, largest):
        sent.append(len(body or b""))
        return request(self, method, path, body, largest)

    monkeypatch.setattr(Http, "request", watched)
    texts = Prompts.encode(pipe.text_encoder, PROMPTS[:2], "").guidance(2.0)
    x, t = torch.randn(2, *pipe.ensemble.shape), torch.tensor(0.5)
    for _ in range(3):
        one.guided_velocity(x, t, texts, None)
    tokens = 4 * sum(text.numel() for text in {id(text): text for text in texts.with_null([0, 1])}.values())
    assert sent[0] > tokens
    assert sent[1] == sent[2] < 4 * x.numel() + 1500
    half = RemoteExpert(one.url, dtype=torch.float16)
    coarse = half.guided_velocity(x, t, texts, None)
    torch.testing.assert_close(coarse, one.guided_velocity(x, t, texts, None), atol=0.05, rtol=0.05)
    half.guided_velocity(x, t, texts, None)
    assert sent[-1] < 2 * x.numel() + 1500


def test_an_owner_that_has_forgotten_the_texts(owners, served_model, pipe, monkeypatch):
    texts = Prompts.encode(pipe.text_encoder, PROMPTS[:2], "").guidance(2.0)
    x, t = torch.randn(2, *pipe.ensemble.shape), torch.tensor(0.5)
    owner = Owner(FolderExpert(served_model / "expert_0"), 32)
    with in_a_thread(make_app(owner, Access(), Limits(body=owner.most_bytes), Metrics())) as url:
        expert = RemoteExpert(url)
        first = expert.guided_velocity(x, t, texts, None)
        owner._texts.clear()
        assert torch.equal(expert.guided_velocity(x, t, texts, None), first)


class TestOwner:
    @pytest.fixture
    def good(self, served_model) -> dict[str, torch.Tensor]:
        card = FolderExpert(served_model / "expert_0").card
        text = torch.randn(3, card.text_encoder.dim)
        digest = remote.digest_of_text(text[None])
        return {
            "x": torch.randn(2, *card.latent_space.shape), "t": torch.tensor([0.5, 0.25]), "text.a": text,
            "positive": torch.zeros(2, dtype=torch.int32), "negative": torch.full((2,), -1, dtype=torch.int32),
            "scales": torch.ones(2), "digests": torch.tensor([list(digest)], dtype=torch.uint8),
        }  # fmt: skip

    def post(self, url: str, body: bytes) -> httpx.Response:
        return httpx.post(f"{url}/v1/velocity", content=body, timeout=60)

    def test_it_answers(self, owners, good):
        answer = self.post(owners[0], save(good))
        assert load(answer.content)["u"].shape == good["x"].shape
        assert set(httpx.get(f"{owners[0]}/v1/expert").json()) >= {"objective", "latent_space", "text_encoder"}

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"x": None}, "safetensors file with x"),
            ({"x": torch.zeros(2, 3, 4)}, "x must be 1 to 32 samples"),
            ({"x": torch.zeros(0, 12, 4, 4)}, "x must be 1 to 32 samples"),
            ({"x": torch.zeros(33, 12, 4, 4)}, "x must be 1 to 32 samples"),
            ({"x": torch.zeros(2, 12, 4, 4, dtype=torch.int64)}, "needs x as"),
            ({"t": torch.tensor([0.5, 1.5])}, "times from 0 to 1"),
            ({"t": torch.tensor([torch.nan, 0.5])}, "times from 0 to 1"),
            ({"t": torch.tensor([0.5, 0.5, 0.5])}, "times from 0 to 1"),
            ({"positive": torch.tensor([0, 9], dtype=torch.int32)}, "numbers of digests"),
            ({"negative": torch.tensor([0, -7], dtype=torch.int32)}, "numbers of digests"),
            ({"scales": torch.tensor([2.0, 2.0])}, "numbers of digests"),
            ({"scales": torch.tensor([torch.inf, 1.0])}, "scales must lie"),
            ({"digests": torch.zeros(1, 31, dtype=torch.uint8)}, "32 bytes per text"),
            ({"digests": torch.zeros(1, 32, dtype=torch.uint8)}, "not here"),
            ({"text.a": torch.zeros(3, 5)}, "float32 tokens of width"),
            ({"text.a": torch.zeros(1000, 64)}, "tokens"),
            ({"positive": None}, "needs positive"),
        ],
        ids=str,
    )
    def test_it_refuses(self, owners, good, change, sentence):
        body = {key: value for key, value in {**good, **change}.items() if value is not None}
        answer = self.post(owners[0], save(body))
        assert answer.status_code in (400, 409)
        assert sentence in answer.json()["error"]["message"]

    @pytest.mark.parametrize("body", [b"", b"\xff" * 100, b"\x00" * 8, (1 << 62).to_bytes(8, "little") + b"{}"])
    def test_what_is_no_safetensors_file(self, owners, body):
        assert self.post(owners[0], body).status_code == 400

    def test_too_much(self, owners):
        assert self.post(owners[0], b"x" * (16 << 20)).status_code == 413

    def test_keys_and_counts(self, served_model, tmp_path, good):
        keys = tmp_path / "keys.json"
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        keys.write_text(json.dumps({"keys": [{"name": "atoll-1", "sha256": digest, "per_minute": 4}]}))
        with in_a_thread(owner_app(served_model / "expert_0", keys)) as url:
            with pytest.raises(InputError, match="it answers 401"):
                RemoteExpert(url)
            assert self.post(url, save(good)).status_code == 401
            expert, x = RemoteExpert(url, key=KEY), good["x"]
            texts = Guidance([good["text.a"][None]] * 2, [None] * 2, [1.0, 1.0])
            for _ in range(2):
                expert.guided_velocity(x, torch.tensor(0.5), texts, None)
            with pytest.raises(AwayError, match="429"):
                expert.guided_velocity(x, torch.tensor(0.5), texts, None)
            text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
            assert 'atoll_key_used{key="atoll-1"} 4.0' in text


class Peer:
    """A peer with a configurable behaviour, which at first presents expert 0's card."""

    def __init__(self, folder: Path) -> None:
        self.card, self.behaviour = FolderExpert(folder).card.values(), "good"
        self.inner = owner_app(folder)

    async def __call__(self, scope, receive, send):
        import asyncio

        if scope["path"] == "/v1/expert" and self.behaviour == "good":
            return await self.inner(scope, receive, send)
        content = b""
        match self.behaviour:
            case "good":
                return await self.inner(scope, receive, send)
            case "slow":
                await asyncio.sleep(4)
            case "huge":
                content = b"x" * (64 << 20)
            case "wrong":
                content = save({"u": torch.zeros(1, 2)})
            case "garbage":
                content = b"\xff" * 64
            case "no type of torch's":
                header = b'{"u":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}'
                content = len(header).to_bytes(8, "little") + header + bytes(4)
            case "drip":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(40):
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
                    await asyncio.sleep(0.1)
        await send({"type": "http.response.start", "status": 500 if self.behaviour == "broken" else 200, "headers": []})
        await send({"type": "http.response.body", "body": content})


@pytest.mark.parametrize("behaviour", ["slow", "huge", "wrong", "garbage", "no type of torch's", "drip", "broken"])
def test_a_peer_that_fails_and_comes_back(served_model, pipe, behaviour):
    """Its weight goes to the next most probable expert, images report it, and it returns by itself."""
    peer = Peer(served_model / "expert_0")
    with in_a_thread(peer) as url:
        expert = RemoteExpert(url, timeout=100)
        far = AtollPipeline(served_model, elsewhere={0: expert})
        options = {"seed": 3, "routing": "full", **FEW}
        expected = pipe(PROMPTS, **options).images
        torch.testing.assert_close(far(PROMPTS, **options).images, expected, atol=1e-4, rtol=0)
        peer.behaviour, expert._carrier.timeout = behaviour, 0.7
        without = pipe(PROMPTS, experts=[1, 2], **options)
        found = far(PROMPTS, **options)
        torch.testing.assert_close(found.images, without.images, atol=1e-4, rtol=0)
        assert expert.away
        scheduler, events = Scheduler(far), []
        scheduler.submit([Job("a robot", "", 4, far.plan(steps=4, routing="full"))], [events.append])
        eventually(lambda: events)
        assert isinstance(events[0], Finished)
        assert events[0].without == (0,)
        scheduler.close()
        peer.behaviour, expert._carrier.timeout = "good", 100
        eventually(lambda: expert.away is None, 90)
        torch.testing.assert_close(far(PROMPTS, **options).images, expected, atol=1e-4, rtol=0)
        expert.close()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx-a: b", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_the_timeout_is_for_the_whole_response(head):
    """Also where every single read is quick: one byte at a time, of the headers or of the body."""
    ended = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(head)
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip)
        thread.start()
        peer = Http(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 0.5)
        try:
            with pytest.raises(ValueError, match="took more than 0.5 seconds"):
                peer.request("GET", "/v1/expert", None, 1 << 20)
        finally:
            ended.set()
            thread.join()
            peer.close()


def test_texts_sent_long_ago_are_forgotten(one, pipe, monkeypatch):
    monkeypatch.setattr(remote, "MAX_KNOWN", 5)
    x, t = torch.randn(1, *pipe.ensemble.shape), torch.tensor([0.5])
    for number in range(20):
        texts = Prompts.encode(pipe.text_encoder, [f"robot {number}"], "").guidance(2.0)
        assert one.guided_velocity(x, t, texts, TextCache(None)).shape == x.shape
        assert len(one._known) <= 7


def test_no_other_may_answer(served_model):
    peer = Peer(served_model / "expert_0")
    with in_a_thread(peer) as url:
        far = AtollPipeline(served_model, elsewhere={0: RemoteExpert(url)})
        peer.behaviour = "broken"
        with pytest.raises(InputError, match="is away .* and no other expert is left"):
            far("a robot", experts=[0], **FEW)


def test_a_missing_expert_is_elsewhere(served_model, owners, pipe, tmp_path):
    """The server of the model need not have the weights."""
    import shutil

    folder = Path(shutil.copytree(served_model, tmp_path / "model"))
    shutil.rmtree(folder / "expert_0")
    far = AtollPipeline(folder, elsewhere={0: RemoteExpert(owners[0])})
    options = {"seed": 3, "routing": "full", **FEW}
    torch.testing.assert_close(far(PROMPTS, **options).images, pipe(PROMPTS, **options).images, atol=1e-4, rtol=0)
    with in_process(f"tiny={folder}", elsewhere={0: RemoteExpert(owners[0])}) as (url, _):
        experts = httpx.get(f"{url}/v1/models").json()["data"][0]["atoll"]["experts"]
        assert [expert["place"] for expert in experts] == ["elsewhere", "here", "here"]
        assert experts[0]["images"] > 0


def test_one_that_is_away_at_the_start(one, owners):
    """With a known card it is away until it answers; another expert in its place is never accepted."""
    known = RemoteExpert("http://127.0.0.1:9", card=one.card)
    assert known.away
    assert known.shape == one.shape
    other = RemoteExpert(owners[1], card=one.card)
    assert other.away == "another expert answers there now"
    for expert in (known, other):
        expert.close()


def test_the_example_of_the_docs(served_model, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")
    block = re.findall(r"```py\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(served_model.parent)
    with in_a_thread(owner_app(served_model / "expert_2")) as url:
        names: dict[str, object] = {}
        exec(compile(block.replace("http://127.0.0.1:8100", url), "page", "exec"), names)
        assert names["pipe"].ensemble.is_elsewhere(2)


def test_one_that_does_not_fit(served_model, owners):
    with pytest.raises(InputError, match="is the expert of cluster 0, not of 1"):
        AtollPipeline(served_model, elsewhere={1: RemoteExpert(owners[0])})
    with pytest.raises(InputError, match="there is no place for expert 9"):
        AtollPipeline(served_model, elsewhere={9: RemoteExpert(owners[0])})
    for url in ("http://user:pw@127.0.0.1", "file:///etc/passwd", "http://", "x"):
        with pytest.raises(InputError, match="no URL of an expert"):
            RemoteExpert(url)


@pytest.mark.slow
def test_killed_again_and_again(served_model, report):
    """An expert's process is killed 5 times during 60 requests: all images finish, and affected ones report it."""
    with Command("serve-expert", served_model / "expert_0", "--port", 0) as first:
        port, processes = first.url.rsplit(":")[-1], [first.process]
        expert = RemoteExpert(first.url, timeout=5)
        with in_process(f"tiny={served_model}", elsewhere={0: expert}) as (url, _):
            done, affected = [], []

            def ask(number: int) -> None:
                body = {"prompt": "a robot", "seed": number, "steps": 12, "routing": "full"}
                answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=240)
                assert answer.status_code == 200, answer.text
                done.append(number)
                affected.extend([number] if answer.json()["data"][0].get("without") == [0] else [])

            kills, ended = 0, threading.Event()

            def kill() -> None:
                nonlocal kills
                while kills < 5 and not ended.is_set():
                    os.kill(processes[-1].pid, signal.SIGKILL)
                    processes[-1].wait()
                    kills += 1
                    command = [
                        sys.executable,
                        "-m",
                        "atoll",
                        "serve-expert",
                        str(served_model / "expert_0"),
                        "--port",
                        port,
                    ]
                    processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                    end = time.monotonic() + 60
                    while expert.away is not None and time.monotonic() < end:
                        time.sleep(0.05)

            killer = threading.Thread(target=kill)
            killer.start()
            with ThreadPoolExecutor(4) as pool:
                asked, number = [], 0
                while number < 60 or (killer.is_alive() and number < 4000):
                    asked.append(pool.submit(ask, number))
                    number += 1
                    while sum(not one.done() for one in asked) > 8:
                        time.sleep(0.01)
                for one in asked:
                    one.result()
            ended.set()
            killer.join()
            for process in processes:
                process.kill()
                process.wait()
            report(
                f"{kills} kills during {len(done)} requests: all finished, {len(affected)} say that expert 0 was away"
            )
            assert sorted(done) == list(range(number))
            assert kills == 5
            assert affected
        expert.close()
