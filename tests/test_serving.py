"""The API: compatible with OpenAI's own client, and closed to improper requests."""

import base64
import hashlib
import io
import json
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from atoll.errors import InputError
from atoll.networks import stored
from atoll.sampling.assemble import assemble
from atoll.sampling.ensemble import Mixture
from atoll.sampling.folder import read_metadata
from atoll.sampling.pipeline import AtollPipeline
from atoll.serving.access import Access
from atoll.serving.guard import listen, warn_if_open
from atoll.serving.models import Source
from atoll.serving.requests import Generation
from atoll.serving.settings import Limits
from serving import Command, eventually, in_process
from test_assemble import parts

PATH = "/v1/images/generations"
ASK = {"prompt": "a robot", "seed": 5, "steps": 3}
KEY = "a-key-of-alice"


@pytest.fixture(scope="module")
def pipe(served_model) -> AtollPipeline:
    return AtollPipeline(served_model)


@pytest.fixture(scope="module")
def server(served_model, tmp_path_factory):
    clusters = parts(tmp_path_factory.getbasetemp())[0] / "clusters"
    limits = Limits(images=8, waiting=12, n=4, steps=400, patience=3)
    with in_process(f"tiny={served_model}", limits=limits, clusters=clusters) as (url, state):
        yield url, state


@pytest.fixture(scope="module")
def url(server) -> str:
    return server[0]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    others = [{"name": f"key-{i}", "sha256": hashlib.sha256(f"k{i}".encode()).hexdigest()} for i in range(3000)]
    alice = {"name": "alice", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "per_minute": 6, "in_flight": 4}
    path.write_text(json.dumps({"keys": [alice, *others]}))
    return path


@pytest.fixture(scope="module")
def locked(served_model, keys):
    with in_process(f"tiny={served_model}", keys=keys) as (url, state):
        yield url, state


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def ours(pipe: AtollPipeline, prompt: str, seed: int, **options: object) -> np.ndarray:
    return np.asarray(pipe(prompt, seed=seed, progress=False, **options).images[0])


def near(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and int(np.abs(one.astype(int) - other).max()) <= 1  # rounding to bytes


class TestOpenAI:
    """The real client, from PyPI."""

    @pytest.fixture
    def client(self, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client

    def test_models(self, client):
        (model,) = client.models.list().data
        assert model.id == client.models.retrieve("tiny").id == "tiny"
        assert len(model.atoll["experts"]) == 3
        with pytest.raises(openai.NotFoundError, match="did you mean 'tiny'"):
            client.models.retrieve("tinny")

    def test_generates(self, client, pipe, tmp_path):
        answer = client.images.generate(
            prompt="a robot", n=2, size="32x32", model="tiny", response_format="b64_json",
            extra_body={**ASK, "guidance": 3, "routing": "full", "negative_prompt": "a cat", "trace": True},
        )  # fmt: skip
        options = {"num_inference_steps": 3, "guidance_scale": 3, "routing": "full", "negative_prompt": "a cat"}
        for i, image in enumerate(answer.data):
            content = base64.b64decode(image.b64_json)
            assert near(pixels(content), ours(pipe, "a robot", 5 + i, **options))
            (tmp_path / "a.png").write_bytes(content)
            about = read_metadata(tmp_path / "a.png")
            assert (about["prompt"], about["seed"], about["model"]) == ("a robot", 5 + i, pipe.index.hash)
            assert about["settings"]["guidance"] == 3
            assert sum(image.shares) == pytest.approx(1, abs=1e-4)
            assert len(image.trace) == 3

    def test_as_urls(self, client, url):
        (image,) = client.images.generate(prompt="a cat", response_format="url", extra_body={"steps": 1}).data
        assert image.url.startswith(url)
        assert pixels(httpx.get(image.url).content).shape == (32, 32, 3)
        other = "x" if image.url[-5] != "x" else "y"
        assert httpx.get(f"{image.url[:-5]}{other}.png").status_code == 404

    def test_streams(self, client, pipe):
        stream = client.images.generate(
            prompt="a robot", stream=True, partial_images=3, extra_body={"seed": 5, "steps": 6, "routing": "full"}
        )
        *partial, last = list(stream)
        assert [event.type for event in partial] == ["image_generation.partial_image"] * 3
        assert [event.partial_image_index for event in partial] == [0, 1, 2]
        assert [event.step for event in partial] == [1, 3, 5]
        for event in partial:
            assert sum(event.weights) == pytest.approx(1, abs=1e-4)
        assert last.type == "image_generation.completed"
        assert near(
            pixels(base64.b64decode(last.b64_json)), ours(pipe, "a robot", 5, num_inference_steps=6, routing="full")
        )

    def test_some_experts_alone(self, client, pipe):
        (image,) = client.images.generate(prompt="a robot", extra_body={**ASK, "experts": [1]}).data
        assert image.shares == [0, 1, 0]
        assert near(
            pixels(base64.b64decode(image.b64_json)), ours(pipe, "a robot", 5, num_inference_steps=3, experts=[1])
        )

    def test_mistakes(self, client):
        with pytest.raises(openai.BadRequestError, match="unknown field 'sede': did you mean 'seed'"):
            client.images.generate(prompt="a", extra_body={"sede": 1})
        with pytest.raises(openai.BadRequestError, match="this model makes 32x32"):
            client.images.generate(prompt="a", size="1024x1024")
        with pytest.raises(openai.NotFoundError, match="unknown model 'dall-e-3'"):
            client.images.generate(prompt="a", model="dall-e-3")

    def test_a_key(self, locked):
        with openai.OpenAI(base_url=f"{locked[0]}/v1", api_key=KEY, max_retries=0) as client:
            assert client.models.list().data[0].id == "tiny"
        with (
            openai.OpenAI(base_url=f"{locked[0]}/v1", api_key="another", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="wants an API key"),
        ):
            client.models.list()


class TestRefused:
    """Each improper request gets a one-sentence error, and the server keeps serving."""

    @pytest.mark.parametrize(
        ("body", "status", "sentence"),
        [
            (b"", 400, "not JSON"),
            (b"{", 400, "not JSON"),
            (b"\xff\xfe", 400, "not JSON"),
            (b"[1]", 400, "table of keys"),
            (b'{"prompt": NaN}', 400, "not JSON"),
            (b'{"prompt": "a", "guidance": 1e999}', 400, "not JSON"),
            (b"[" * 60_000, 400, "not JSON"),
            (b'{"a":' * 9_000 + b"1" + b"}" * 9_000, 400, "levels deep"),
            (json.dumps({f"k{i}": i for i in range(5000)}).encode(), 413, "larger than"),
            (json.dumps({f"k{i}": 1 for i in range(2000)}).encode(), 400, "unknown field 'k0'"),
            (b'{"seed": 1}', 400, "lacks prompt"),
            (b'{"prompt": 3}', 400, "prompt must be a text, but is 3"),
            (b'{"prompt": "a", "n": "2"}', 400, "n must be a whole number"),
            (b'{"prompt": "a", "n": 0}', 400, "n must be greater"),
            (b'{"prompt": "a", "n": 5}', 400, "n is 5, and this server allows 4"),
            (b'{"prompt": "a", "steps": 401}', 400, "steps is 401"),
            (b'{"prompt": "a", "steps": 1e3}', 400, "steps must be a whole number"),
            (b'{"prompt": "a", "seed": -1}', 400, "seed must be greater"),
            (b'{"prompt": "a", "seed": 9223372036854775807, "n": 2}', 400, "beyond 2"),
            (b'{"prompt": "a", "guidance": -1}', 400, "guidance must be greater"),
            (b'{"prompt": "a", "guidance": true}', 400, "guidance must be"),
            (b'{"prompt": "a", "routing": "oracle"}', 400, "unknown routing 'oracle'"),
            (b'{"prompt": "a", "routing": "topk:9"}', 400, "asks for more than the 3 experts"),
            (b'{"prompt": "a", "solver": "../../etc/passwd"}', 400, "unknown solver"),
            (b'{"prompt": "a", "experts": []}', 400, "none of the experts"),
            (b'{"prompt": "a", "experts": [7]}', 400, "there is no expert 7"),
            (b'{"prompt": "a\\u0000b"}', 400, "control character"),
            (b'{"prompt": "a\\u001b[31m"}', 400, "control character"),
            (b'{"prompt": "\\ud800"}', 400, "prompt must be a valid string"),
            (b'{"prompt": "a", "model": "../../etc/passwd"}', 404, "unknown model"),
            (b'{"prompt": "a", "stream": true, "response_format": "url"}', 400, "leave response_format out"),
            (b'{"prompt": "a", "output_format": "exe"}', 400, "output_format must be"),
            (b'{"prompt": "' + b"a" * 4001 + b'"}', 400, "at most 4000"),
            (b"x" * 100_000, 413, "larger than"),
        ],
        ids=lambda value: str(value)[:40],
    )  # fmt: skip
    def test_bodies(self, url, body, status, sentence):
        answer = httpx.post(url + PATH, content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, sentence in error["message"]) == (status, True), error
        assert len(error["message"]) < 2100
        assert set(error) == {"message", "type", "param", "code"}

    def test_without_json(self, url):
        answer = httpx.post(url + PATH, content=json.dumps(ASK), headers={"content-type": "text/plain"})
        assert answer.status_code == 415  # other sites can send this without a preflight request

    def test_a_body_without_an_end(self, url):
        def drip():
            for _ in range(1000):
                yield b"x" * 1000

        answer = httpx.post(url + PATH, content=drip(), headers={"content-type": "application/json"})
        assert answer.status_code == 413

    @pytest.mark.parametrize("path", [
        "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/sheets/../model", "/static/x",
        "/v1/sheets/%2e%2e", "/v1/sheets/99", "/v1/images/files/..%2f..%2fetc%2fpasswd", "/docs", "/redoc",
    ])  # fmt: skip
    def test_paths(self, url, path):
        answer = httpx.get(url + path)
        assert answer.status_code == 404
        assert "root:" not in answer.text

    def test_methods(self, url):
        assert httpx.get(url + PATH).status_code == 405
        assert httpx.delete(f"{url}/v1/models").status_code == 405

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "[::1", "a b", ""])
    def test_names_that_are_not_ours(self, url, host):
        """These are what a DNS rebinding attack would send."""
        assert httpx.get(f"{url}/v1/models", headers={"host": host}).status_code in (400, 421)

    @pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
    def test_pages_of_other_sites(self, url, origin):
        answer = httpx.post(url + PATH, json=ASK, headers={"origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        preflight = httpx.options(url + PATH, headers={"origin": origin, "access-control-request-method": "POST"})
        assert "access-control-allow-origin" not in preflight.headers
        assert httpx.get(f"{url}/v1/models", headers={"origin": url}).status_code == 200  # our own page

    @pytest.mark.parametrize("given", ["a\tb", "x" * 65, "<script>", "ü"])
    def test_ids_are_given_or_made(self, url, given):
        assert httpx.get(f"{url}/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        answer = httpx.get(f"{url}/healthz", headers={"x-request-id": given.encode("latin-1")})
        assert len(answer.headers["x-request-id"]) == 32

    @pytest.mark.parametrize("text", [
        b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"b" * 200_000,
    ])  # fmt: skip
    def test_what_is_not_http(self, url, text):
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), 30) as sock:
            sock.sendall(text)
            assert b"400" in sock.recv(1000)
        assert httpx.get(f"{url}/healthz").status_code == 200

    def test_a_body_that_does_not_come(self, url):
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), 60) as sock:
            sock.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{{".encode())
            assert b"408" in sock.recv(1000)

    def test_browsers_are_told_to_be_careful(self, url):
        page = httpx.get(f"{url}/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for name, value in {
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
        }.items():
            assert page.headers[name] == value
        assert "server" not in page.headers or "uvicorn" in page.headers["server"]


class TestKeys:
    def test_no_key_no_answer(self, locked):
        url = locked[0]
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/sheets/0", "/nothing"):
            assert httpx.get(url + path).status_code == 401
        for header in ("Bearer wrong", "Basic abc", "Bearer", f"bearer{KEY}", "Bearer " + "x" * 20_000):
            assert httpx.post(url + PATH, json=ASK, headers={"authorization": header}).status_code == 401
        for path in ("/", "/healthz", "/readyz"):  # nothing private
            assert httpx.get(url + path).status_code == 200

    def test_limits_per_key(self, locked):
        url, state = locked
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            assert client.post(PATH, json={**ASK, "n": 5}).status_code == 429  # more than four in flight
            assert client.post(PATH, json={**ASK, "n": 4}).status_code == 200
            refused = client.post(PATH, json={**ASK, "n": 3})
            assert refused.status_code == 429  # six per minute
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert "alice" in refused.json()["error"]["message"]
            assert client.get("/v1/models").status_code == 200
            assert 'atoll_key_used{key="alice"} 4.0' in client.get("/metrics").text
        one = httpx.post(url + PATH, json=ASK, headers={"authorization": "Bearer k2999"}, timeout=60)
        assert one.status_code == 200
        assert all(client.held == 0 for client in state.access._clients.values())

    def test_the_file(self, tmp_path, keys):
        path = tmp_path / "keys.json"
        for content, sentence in [
            ("{", "cannot be read as JSON"),
            ('{"keys": [{"name": "a", "sha256": "short"}]}', "must"),
            ('{"keys": [{"name": "a b", "sha256": "' + "0" * 64 + '"}]}', "name"),
            ('{"keys": [{"name": "a", "key": "plain"}]}', "unknown key|lacks"),
            (json.dumps({"keys": [{"name": n, "sha256": "0" * 64} for n in "ab"]}), "two keys of the same sha256"),
        ]:
            path.write_text(content)
            with pytest.raises(InputError, match=sentence):
                Access(path)
        with pytest.raises(InputError, match="there is no"):
            Access(tmp_path / "none.json")
        path.write_text(keys.read_text())
        access = Access(path)
        client = access.client(f"Bearer {KEY}", "")
        assert client is not None
        with client.hold(2):
            access.reload()
            assert access.client(f"Bearer {KEY}", "") is client  # its usage is kept
        path.write_text('{"keys": []}')
        access.reload()
        assert access.client(f"Bearer {KEY}", "") is None


class TestLoad:
    @pytest.fixture
    def held(self, monkeypatch):
        """Holds all steps back while it is set."""
        free = threading.Event()
        answer = Mixture.answer

        def gated(mixture, samples, x, t):
            assert free.wait(60)
            return answer(mixture, samples, x, t)

        monkeypatch.setattr(Mixture, "answer", gated)
        yield free
        free.set()

    def test_429_in_time(self, server, held):
        url, state = server
        with ThreadPoolExecutor(9) as pool, httpx.Client(base_url=url, timeout=90) as client:
            ask = {**ASK, "n": 4}
            waiting = [pool.submit(client.post, PATH, json=ask) for _ in range(5)]
            eventually(lambda: sum(state.models.get(None).scheduler.counts()) == 20)
            refused = client.post(PATH, json=ask)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            held.set()
            assert [one.result().status_code for one in waiting] == [200] * 5

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_frees_its_place(self, server, stream):
        url, state = server
        scheduler = state.models.get(None).scheduler
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), 30) as sock:
            body = json.dumps({**ASK, "steps": 400, "stream": stream, "n": 2})
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            eventually(lambda: scheduler.counts() == (2, 0))
        eventually(lambda: scheduler.counts() == (0, 0))
        eventually(lambda: all(client.held == 0 for client in state.access._clients.values()))

    def test_answers_are_not_mixed_up(self, url, pipe):
        """Each image identifies its request; clients that disconnect meanwhile change nothing."""

        def ask(number: int) -> None:
            rng = random.Random(number)
            ask = {"prompt": f"a robot {number}", "seed": number, "steps": rng.randint(1, 5), "routing": "full"}
            with httpx.Client(base_url=url, timeout=120) as client:
                while (answer := client.post(PATH, json=ask)).status_code == 429:
                    time.sleep(0.05)
            content = base64.b64decode(answer.json()["data"][0]["b64_json"])
            texts = Image.open(io.BytesIO(content)).text
            assert (texts["prompt"], json.loads(texts["seed"])) == (ask["prompt"], number)
            found[number] = content, ask

        found: dict[int, tuple[bytes, dict]] = {}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(24)))
        assert len(found) == 24
        for content, asked in list(found.values())[::4]:
            options = {"num_inference_steps": asked["steps"], "routing": "full"}
            assert near(pixels(content), ours(pipe, asked["prompt"], asked["seed"], **options))

    def test_metrics_and_health(self, url):
        httpx.post(url + PATH, json=ASK, timeout=60)
        text = httpx.get(f"{url}/metrics").text
        for name in (
            "atoll_images_total",
            "atoll_step_seconds_count",
            "atoll_expert_samples_total",
            "atoll_requests_total",
        ):
            assert f"{name}{{" in text
        httpx.get(f"{url}/made-up-by-a-client")
        assert "made-up" not in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/readyz").text == "ready\n"
        assert "/v1/images/generations" in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_sheets_of_clusters(url):
    answer = httpx.get(f"{url}/v1/sheets/1")
    assert answer.headers["content-type"] == "image/png"
    assert pixels(answer.content).size


def test_several_models(served_model):
    with in_process(f"one={served_model}", f"a/two={served_model}") as (url, _):
        assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["one", "a/two"]
        assert httpx.get(f"{url}/v1/models/a/two").json()["id"] == "a/two"
        answer = httpx.post(url + PATH, json={**ASK, "model": "a/two"}, timeout=60)
        assert answer.json()["model"] == "a/two"
    with pytest.raises(InputError, match="need as many names"), in_process(str(served_model), str(served_model)):
        pass
    for spec in ("a b=x", "=x", "<script>=x"):
        with pytest.raises(InputError, match="NAME=FOLDER"):
            Source.parse(spec)


def test_a_model_of_the_hub(served_model, monkeypatch):
    """It is served by its id, which is also its name."""
    asked = []

    def download(name, **options):
        asked.append((name, options.get("revision")))
        return str(served_model)

    monkeypatch.setattr(stored, "snapshot_download", download)
    with in_process("some/model") as (url, state):
        answer = httpx.post(url + PATH, json={**ASK, "model": "some/model"}, timeout=60)
        assert answer.json()["model"] == "some/model"
        assert state.models.changed() == []
    assert set(asked) == {("some/model", None)}


def test_credits(served_model, tmp_path):
    folder = Path(shutil.copytree(served_model, tmp_path / "model"))
    for content, said in (
        (b"# Credits\n<b>Alice</b> trained expert 0\n", True),
        (b"\xff", False),
        (b"x" * 70_000, False),
    ):
        (folder / "CREDITS.md").write_bytes(content)
        with in_process(f"tiny={folder}") as (url, _):
            about = httpx.get(f"{url}/v1/models/tiny").json()["atoll"]
            assert about["credits"] == (content.decode() if said else None)


def test_a_new_version_takes_over(served_model, tmp_path, tmp_path_factory):
    """Under load, every request is answered by the old version or the new one."""
    folder = Path(shutil.copytree(served_model, tmp_path / "model"))
    data, run = parts(tmp_path_factory.getbasetemp())
    hashes: list[str] = []
    with in_process(f"tiny={folder}") as (url, state):

        def ask(number: int) -> None:
            answer = httpx.post(url + PATH, json={**ASK, "seed": number, "steps": 6}, timeout=120)
            assert answer.status_code == 200, answer.text
            content = base64.b64decode(answer.json()["data"][0]["b64_json"])
            hashes.append(Image.open(io.BytesIO(content)).text["model"])

        old = state.models.get(None)
        assemble([run], run / "centroids", folder, data)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, number) for number in range(12)]
            new = state.models.open(*state.models.changed())
            eventually(lambda: hashes)
            assert state.models.swap(new) is old
            old.scheduler.close()
            asked += [pool.submit(ask, number) for number in range(12, 16)]
            for one in asked:
                one.result()
        assert set(hashes) == {old.pipe.index.hash, new.pipe.index.hash}
        assert hashes[-1] == new.pipe.index.hash
        assert state.models.changed() == []


def test_the_command(served_model, pipe, keys, tmp_path):
    """In its own process: closed to other machines, silent clients are dropped, SIGHUP reloads, SIGTERM drains."""
    arguments = [f"tiny={served_model}", "--port", 0, "--patience", 2, "--keys", keys, "--reload", 0]
    with Command("serve", *arguments) as command:
        assert command.url.startswith("http://127.0.0.1:")
        head = {"authorization": "Bearer k1", "x-request-id": "mine-1"}
        with socket.create_connection(("127.0.0.1", int(command.url.rsplit(":")[-1])), 60) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: loc")  # and no more
            assert sock.recv(100) == b""
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(
                    httpx.post, command.url + PATH, json={**ASK, "steps": 40, "seed": i}, headers=head, timeout=120
                )
                for i in range(4)
            ]
            counts = 'atoll_images_in_flight{model="tiny"} 4.0'
            eventually(lambda: counts in httpx.get(f"{command.url}/metrics", headers=head).text)
            assert command.stop() == 0
            answers = [one.result() for one in asked]
        assert [answer.status_code for answer in answers] == [200] * 4
        first = base64.b64decode(answers[0].json()["data"][0]["b64_json"])
        assert near(pixels(first), ours(pipe, "a robot", 0, num_inference_steps=40))
        log = "".join(command.log)
        assert "a robot" not in log  # prompts are not logged
        assert '"id": "mine-1", "client": "key-1"' in log


def test_a_server_that_is_open_to_all_says_so(tmp_path):
    with pytest.warns(UserWarning, match="whoever reaches 0.0.0.0 may ask"):
        warn_if_open("0.0.0.0", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for host, keys in (("127.0.0.1", None), ("::1", None), ("localhost", None), ("0.0.0.0", tmp_path)):
            warn_if_open(host, keys)


def test_flags(served_model, capsys):
    from atoll.cli.main import main

    for arguments, sentence in [
        ([], "there is no model"),
        (["nowhere/at/all"], "nowhere"),
        ([str(served_model), "--port", "99999"], "cannot listen"),
        ([str(served_model), "--images", "0"], "images must be a whole number"),
        ([str(served_model), "--memory", "2"], "memory must be a share"),
        ([str(served_model), "--remote", "0=ftp://x"], "NUMBER=URL"),
        ([str(served_model), "--remote", "0=http://127.0.0.1:9"], "no expert answers"),
        ([str(served_model), "--keys", "nowhere.json"], "there is no nowhere.json"),
        ([str(served_model), str(served_model), "--clusters", "x"], "serve it alone"),
        ([str(served_model), "--spread", "--max-resident", "1"], "leave out --max-resident"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(["serve", *arguments])
        assert end.value.code == 2
        assert sentence in "".join(capsys.readouterr()), sentence


class TestDocs:
    """The examples of docs/serving.md."""

    PAGE = (Path(__file__).parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")

    def blocks(self, kind: str, url: str) -> list[str]:
        found = re.findall(rf"```{kind}\n(.*?)```", self.PAGE, re.DOTALL)
        return [block.replace("http://127.0.0.1:8000", url) for block in found]

    def test_curl(self, url):
        if shutil.which("curl") is None:
            pytest.skip("there is no curl")
        (block,) = self.blocks("bash", url)
        run = subprocess.run(["bash", "-c", block], capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(run.stdout)["data"][0]["seed"] == 7

    def test_python(self, url, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        exec(compile(self.blocks("py", url)[0], "page", "exec"), {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["robot-7.png", "robot-8.png"]
        assert capsys.readouterr().out.count("image_generation.partial_image [") == 3

    def test_javascript(self, url, tmp_path):
        if shutil.which("node") is None:
            pytest.skip("there is no node")
        (tmp_path / "ask.mjs").write_text(self.blocks("js", url)[0])
        run = subprocess.run(["node", "ask.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
        assert run.stdout.startswith("7 ")
        assert run.stdout.count("image_generation.partial_image\n") == 3
        assert run.stdout.endswith("image_generation.completed\n")

    def test_every_field_is_there(self):
        table = self.PAGE.split("| field | meaning |")[1].split("\n\n")[0]
        named = {
            name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        assert named == set(Generation.model_fields)

    def test_keys(self, tmp_path):
        (tmp_path / "keys.json").write_text(self.blocks("json", "")[0])
        assert [name for name, *_ in Access(tmp_path / "keys.json").usage()] == ["alice"]


def test_answers_do_not_wait_for_acknowledgements():
    """Small writes are sent immediately: Nagle's algorithm would add 40 ms to every step of a remote expert."""
    with (
        listen("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
