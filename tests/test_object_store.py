"""Object stores by URL: a folder, memory and moto's S3 server, and faulty servers."""

import hashlib
import os
import pickle
import threading

import pytest

from atoll.errors import InputError, StoreError
from atoll.object_store import PART, is_url, open_store
from object_stores import SECRET, WrongServer, moto_server, use_server

obstore = pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def s3():
    with moto_server() as url:
        yield url


@pytest.fixture(params=["file", "memory", "s3"])
def store(request, tmp_path):
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:16]
    if request.param == "s3":
        return open_store(f"{request.getfixturevalue('s3')}/{name}")
    return open_store(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{name}")


@pytest.mark.parametrize("text", ["s3://a/b", "gs://a", "az://a/b", "file:///a", "memory://a", "ftp://a"])
def test_urls_are_told_from_paths(text):
    assert is_url(text)
    assert not is_url(text.replace("://", "_"))
    assert not is_url("C:/a")
    assert not is_url("a/b://c")
    assert not is_url("")


def test_objects_come_and_go(store, tmp_path):
    assert store.list() == []
    assert not store.exists("a/b")
    with pytest.raises(FileNotFoundError, match="there is no .*a/b"):
        store.get("a/b")
    store.put("a/b", b"one")
    store.put("a/c.bin", b"")
    store.put("ab/d", b"four")
    assert store.list() == [("a/b", 3), ("a/c.bin", 0), ("ab/d", 4)]
    assert store.list("a") == [("a/b", 3), ("a/c.bin", 0)], "a prefix is a folder, not the beginning of a name"
    assert store.get("a/b") == b"one"
    assert store.get("a/c.bin") == b""
    assert store.exists("a/b")
    assert store.get_range("ab/d", 1, 2) == b"ou"
    with pytest.raises(InputError, match="is larger than 3 bytes"):
        store.get("ab/d", limit=3)
    store.delete("a/b")
    store.delete("a/b")
    assert store.list("a") == [("a/c.bin", 0)]


def test_large_files_go_there_and_back(store, tmp_path):
    content = os.urandom(2 * PART + 12345)
    (tmp_path / "file").write_bytes(content)
    store.put_file("large", tmp_path / "file")
    seen = []
    store.get_to_file("large", tmp_path / "copy" / "file", seen.append)
    assert (tmp_path / "copy" / "file").read_bytes() == content
    assert sum(seen) == len(content)
    assert len(seen) == 3


def test_conditional_writes(store):
    assert store.create("lease", b"mine")
    assert not store.create("lease", b"yours")
    content, etag = store.read("lease")
    assert content == b"mine"
    assert store.replace("lease", b"mine still", etag)
    assert not store.replace("lease", b"yours", etag), "it has changed since"
    assert not store.replace("other", b"yours", etag), "there is none"
    assert store.get("lease") == b"mine still"


def test_only_one_of_many_creates(store):
    won = []
    threads = [
        threading.Thread(target=lambda i=i: won.append(store.create("lease", b"%d" % i) and i)) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [i for i in won if i is not False]
    assert store.get("lease") == b"%d" % winner


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/passwd", "a//b", "", ".", "a/./b", "a\\..\\b", "a\nb", "x" * 1000]
)
def test_keys_do_not_leave_the_prefix(store, key, tmp_path):
    (tmp_path / "x").write_bytes(b"not yours")
    for act in (
        store.get,
        store.exists,
        store.delete,
        lambda key: store.put(key, b"1"),
        lambda key: store.create(key, b"1"),
    ):
        with pytest.raises(InputError, match="is no key of an object"):
            act(key)


def test_links_do_not_leave_a_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"not yours")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    store = open_store(f"file://{tmp_path}/store")
    for act in (store.get, lambda key: store.put(key, b"mine"), lambda key: store.get_range(key, 0, 3)):
        with pytest.raises(InputError, match="link that leaves its folder"):
            act("link")
    assert (tmp_path / "secret").read_bytes() == b"not yours"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"s3://key:{SECRET}@bucket/x", "may hold no user, password"),
        (f"az://box/x?sig={SECRET}", "may hold no user, password"),
        ("http://example.org/x", "accepted are s3://"),
        ("s3:///x", "must look like"),
        ("file://host/x", "must look like"),
        ("s3://bucket/../other", "may not leave its prefix"),
        ("memory://a/b", "has no prefix"),
        ("s3://[", "no URL"),
    ],
)
def test_bad_urls(url, message):
    with pytest.raises(InputError, match=message) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_an_environment_that_does_not_say_where(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InputError, match="az://box/x cannot be opened: check what the environment says"):
        open_store("az://box/x").get("a")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(InputError, match=r"pip install 'atoll\[store\]'"):
        open_store("s3://bucket/x").get("a")


def test_a_store_may_be_sent_to_another_process(s3):
    store = open_store(s3)
    store.put("sent", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.get("sent") == b"1"
    assert SECRET.encode() not in pickle.dumps(store)


def test_another_key_is_refused(s3, monkeypatch):
    """Refused by our own server: moto checks no signature."""
    with WrongServer(403, f"<Error><Code>SignatureDoesNotMatch</Code><Key>{SECRET}</Key></Error>") as (endpoint, _):
        use_server(monkeypatch, endpoint)
        with pytest.raises(InputError, match="refuses access: check the credentials") as caught:
            open_store("s3://lake/x", timeout=2, retry_for=2).get("a")
    assert SECRET not in repr(caught.getrepr())


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_have_expired(monkeypatch, status):
    """The response is AWS's for an expired session token; a HEAD response has no body to explain it."""
    with WrongServer(status, f"<Error><Code>ExpiredToken</Code><Token-0>{SECRET}</Token-0></Error>") as (endpoint, _):
        use_server(monkeypatch, endpoint)
        store = open_store("s3://lake/x", timeout=2, retry_for=2)
        for ask in (lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: list(store.list("a"))):
            with pytest.raises(StoreError, match="credentials in the environment have expired: get new ones") as caught:
                ask()
            assert SECRET not in repr(caught.getrepr())


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"status": 500, "body": SECRET}, "the server answers 500"),
        ({"status": 503, "body": SECRET}, "the server answers 503"),
        ({"hang": True}, "does not answer in time"),
        ({"body": "short", "length": 5000}, "is truncated|its answer makes no sense|does not answer"),
    ],
    ids=["500", "503", "hangs", "truncated"],
)
def test_servers_that_do_wrong(server, message, monkeypatch, tmp_path):
    with WrongServer(**server) as (endpoint, requests):
        use_server(monkeypatch, endpoint)
        store = open_store("s3://lake/x", timeout=0.3, retry_for=0.5)
        acts = [lambda: store.get("a"), lambda: store.get_to_file("a", tmp_path / "a")]
        if "length" not in server:
            acts += [lambda: store.put("a", b"1"), store.list]
        for act in acts:
            before = len(requests)
            with pytest.raises(InputError, match=message) as caught:
                act()
            assert "\n" not in str(caught.value)
            assert SECRET not in repr(caught.getrepr(style="long"))
            assert 1 <= len(requests) - before <= 24, "attempts are bounded"
    assert list(tmp_path.iterdir()) == []


def test_no_server_at_all(monkeypatch):
    use_server(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(
        InputError, match=r"s3://lake/x/a cannot be read or written \(the server refuses the connection\)"
    ):
        open_store("s3://lake/x", retry_for=0.5).get("a")


def test_a_listing_that_leaves_the_prefix(monkeypatch):
    body = """<ListBucketResult><Name>lake</Name><Prefix>x/</Prefix><IsTruncated>false</IsTruncated>
    <Contents><Key>x/../../etc/passwd</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>"1"</ETag>
    <Size>1</Size></Contents></ListBucketResult>"""
    with WrongServer(body=body) as (endpoint, _):
        use_server(monkeypatch, endpoint)
        with pytest.raises(InputError, match="s3://lake/x cannot be read or written|is no key"):
            open_store("s3://lake/x", retry_for=1).list()


def test_a_listing_that_was_cut_short_is_asked_for_again(monkeypatch):
    import obstore
    from obstore.exceptions import GenericError

    store = open_store("memory://cut-short")
    store.put("a/b", b"1")
    original, failures = obstore.list, iter(range(3))

    def cut_short(*arguments, **options):
        if next(failures, None) is not None:
            raise GenericError("end of file")
        return original(*arguments, **options)

    monkeypatch.setattr(obstore, "list", cut_short)
    assert store.list("a") == [("a/b", 1)]
    assert store.list_modified("a").keys() == {"a/b"}
