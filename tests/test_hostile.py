"""Model folders from strangers: whatever they contain gets a quick one-sentence refusal, and nothing leaks."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atoll import storage as files
from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.errors import InputError, printable, shown
from atoll.networks.centroid_router import CentroidRouter
from atoll.networks.dit import DiT
from atoll.networks.router import Router
from atoll.networks.stored import Stored
from atoll.sampling import assemble as module
from atoll.sampling.assemble import assemble
from atoll.sampling.pipeline import AtollPipeline
from atoll.tensors import TensorFile, read_tensors
from test_assemble import edit, parts

SECRET = "the key to everything"
PROMPT = "a pink ghost with a yellow party hat on a blue background"
FILES = ("model_index.json", "expert_0/config.json", "expert_0/model.safetensors", "expert_1/calibration.safetensors",
         "router/config.json", "router/model.safetensors", "vae/config.json", "vae/model.safetensors",
         "text_encoder/config.json", "text_encoder/model.safetensors")  # fmt: skip


@pytest.fixture
def data(tmp_path_factory) -> Path:
    return parts(tmp_path_factory.getbasetemp())[0]


@pytest.fixture
def stranger(tmp_path_factory, tmp_path) -> Path:
    """Returns a stranger's run to tamper with."""
    return Path(shutil.copytree(parts(tmp_path_factory.getbasetemp())[1], tmp_path / "stranger"))


@pytest.fixture
def model(tmp_path_factory, tmp_path) -> Path:
    """Returns a stranger's whole model to tamper with."""
    data, run = parts(tmp_path_factory.getbasetemp())
    assemble([run], None, tmp_path / "linked", data)
    shutil.copytree(tmp_path / "linked", tmp_path / "model")
    shutil.rmtree(tmp_path / "linked")
    return tmp_path / "model"


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def refused(arguments: list[object], capsys, sentence: str = "") -> str:
    """Returns the command's error: one line without control characters, with a nonzero exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert told.startswith("atoll: ")
    assert "\n" not in told
    assert len(told) < 3000
    assert not any(ord(character) < 32 for character in told)
    assert sentence in told
    return told


def sampled(model: Path, out: Path) -> list[object]:
    return ["sample", model, PROMPT, "--steps", 2, "--routing", "full", "--out", out]


def rehash(model: Path, change: Callable[[dict], None]) -> None:
    """Alters model_index.json together with its hash."""
    about = json.loads((model / "model_index.json").read_text())
    change(about)
    head = {key: about.pop(key) for key in ("_class_name", "format", "hash")}
    head["hash"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    (model / "model_index.json").write_text(json.dumps({**head, **about}))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def content_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


# --- links --------------------------------------------------------------------------------------------------------


class TestLinks:
    @pytest.mark.parametrize("name", ["conversion.json", "config.json", "model.safetensors", "calibration.safetensors"])
    def test_a_part_that_leads_elsewhere_is_not_copied(self, name, stranger, data, secret, tmp_path, capsys):
        path = stranger / "expert_0" / name
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
        out = tmp_path / "model"
        refused(["assemble", stranger, "--data", data, "--out", out], capsys, "leaves its folder")
        assert not out.exists()
        assert os.stat(secret).st_nlink == 1

    @pytest.mark.parametrize("name", ["vae/x.safetensors", "vae/notes.txt", "text_encoder/more.json"])
    def test_nor_what_lies_beside_a_codec(self, name, stranger, data, secret, tmp_path, capsys):
        theirs = Path(shutil.copytree(data, tmp_path / "theirs"))
        (theirs / name).symlink_to(secret)
        refused(["assemble", stranger, "--data", theirs, "--out", tmp_path / "model"], capsys, "leaves its folder")
        assert not (tmp_path / "model").exists()
        assert os.stat(secret).st_nlink == 1

    @pytest.mark.parametrize("part", ["expert_0", "router"])
    def test_nor_a_folder(self, part, stranger, data, tmp_path, capsys):
        (stranger / part).rename(tmp_path / "mine")
        (stranger / part).symlink_to(tmp_path / "mine")
        refused(["assemble", stranger, "--data", data, "--out", tmp_path / "model"], capsys, "leaves its folder")

    def test_a_folder_that_one_names_oneself_may_be_a_link(self, stranger, data, tmp_path):
        (tmp_path / "here").symlink_to(stranger)
        assemble([tmp_path / "here"], None, tmp_path / "model", data)

    def test_links_of_the_hub_may_be(self, model, tmp_path, capsys):
        """The hub's cache has links from snapshots to blobs, which are allowed."""
        blobs, snapshot = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/1"))
        blobs.mkdir(parents=True)
        for number, path in enumerate([path for path in model.rglob("*") if path.is_file()]):
            link = snapshot / path.relative_to(model)
            link.parent.mkdir(parents=True, exist_ok=True)
            path.rename(blobs / str(number))
            link.symlink_to(f"{os.path.relpath(blobs, link.parent)}/{number}")
        main([str(argument) for argument in sampled(snapshot, tmp_path / "out")])
        assert "1 image of 1 prompt" in capsys.readouterr().out

    @pytest.mark.parametrize("name", FILES)
    def test_a_model_is_not_read_elsewhere(self, name, model, tmp_path, capsys):
        (model / name).rename(tmp_path / "elsewhere")
        (model / name).symlink_to(tmp_path / "elsewhere")
        refused(sampled(model, tmp_path / "out"), capsys, "leaves its folder")
        assert not (tmp_path / "out").exists()

    def test_nor_published(self, model, secret, tmp_path, monkeypatch):
        taken: set[str] = set()

        class Hub:
            def __init__(self, token: object) -> None: ...

            def create_repo(self, *_: object, **__: object) -> None: ...

            def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str]) -> str:
                paths = [path for pattern in allow_patterns for path in folder_path.glob(pattern)]
                taken.update(str(path.relative_to(folder_path)) for path in paths)
                return "there"

        monkeypatch.setattr("atoll.networks.stored.HfApi", Hub)
        (model / "expert_0" / "conversion.json").symlink_to(secret)
        (model / "vae" / "x.safetensors").symlink_to(secret)
        AtollPipeline(model).push_to_hub("me/mine")
        index = ModelIndex.read(model)
        assert taken == {"model_index.json", "README.md", "samples.png", *index.files}
        (model / "vae" / "config.json").unlink()
        (model / "vae" / "config.json").symlink_to(secret)
        with pytest.raises(InputError, match="leaves its folder"):
            module.push_model(model, "me/mine")

    def test_a_copy_leaves_them_out(self, model, secret, tmp_path):
        pipe = AtollPipeline(model)
        (model / "expert_0" / "conversion.json").symlink_to(secret)
        pipe.save_pretrained(tmp_path / "copy")
        assert SECRET.encode() not in content_of(tmp_path / "copy")


# --- what is no file ----------------------------------------------------------------------------------------------


class TestNoFiles:
    """A FIFO would block its reader forever, a device would fill the memory."""

    @pytest.mark.parametrize("kind", ["fifo", "device", "itself", "folder"])
    @pytest.mark.parametrize("name", FILES)
    def test_in_a_model(self, name, kind, model, tmp_path, capsys):
        spoil(model / name, kind)
        refused(sampled(model, tmp_path / "out"), capsys)

    @pytest.mark.parametrize("kind", ["fifo", "device", "itself", "folder"])
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "calibration.safetensors", "conversion.json"])
    def test_in_a_part(self, name, kind, stranger, data, tmp_path, capsys):
        spoil(stranger / "expert_1" / name, kind)
        refused(["assemble", stranger, "--data", data, "--out", tmp_path / "model"], capsys)
        assert not (tmp_path / "model").exists()


def spoil(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "itself":
            path.symlink_to(path.name)
        case "folder":
            path.mkdir()


# --- more than any machine has ------------------------------------------------------------------------------------


class TestBombs:
    @pytest.mark.parametrize(
        ("part", "changes"),
        [
            ("text_encoder", {"dim": 20000, "max_length": 100000}),
            ("text_encoder", {"dim": 10**30}),
            ("router", {"num_experts": 10**15}),
            ("router", {"depth": 10**9}),
            ("vae", {"patch_size": 10**10}),
            ("vae", {"patch_size": 255, "num_components": 10**5}),
            ("expert_0", {"hidden_size": 65536, "depth": 1024}),
            ("expert_0", {"input_size": 4096, "patch_size": 1}),
            ("expert_0", {"in_channels": 4096, "input_size": 4096, "patch_size": 256}),
            ("expert_0", {"mlp_ratio": 1e300}),
        ],
    )
    def test_configs_that_ask_for_it(self, part, changes, stranger, data, tmp_path, capsys):
        theirs = Path(shutil.copytree(data, tmp_path / "theirs"))
        for key, value in changes.items():
            edit((theirs if part in ("vae", "text_encoder") else stranger) / part, "architecture", key, value=value)
        refused(["assemble", stranger, "--data", theirs, "--out", tmp_path / "model"], capsys)

    def test_centroids(self, stranger, data, tmp_path):
        edit(stranger / "centroids", "architecture", "input_size", value=65536)
        edit(stranger / "centroids", "architecture", "num_experts", value=65536)
        with pytest.raises(InputError, match="larger than any machine|size mismatch"):
            CentroidRouter.from_pretrained(stranger / "centroids")

    def test_weights_of_a_terabyte_on_an_empty_disk(self, stranger, data, tmp_path, capsys):
        """A sparse file can claim any size, with a matching header."""
        path, size = tmp_path / "huge.safetensors", 2**40
        header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + size)
        with pytest.raises(InputError, match="needs 1,100 GB of memory"):
            read_tensors(path, "copy it again")
        path.replace(stranger / "expert_0" / "model.safetensors")
        told = refused(["assemble", stranger, "--data", data, "--out", tmp_path / "model"], capsys)
        assert "needs 1,100 GB of memory" in told

    @pytest.mark.parametrize(
        "header",
        [
            {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}},  # shape and span disagree
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},  # a gap
            {"w": {"dtype": "F32", "shape": [10**18, 10**18], "data_offsets": [0, 8]}},
            {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
            {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 8]}},
            {"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
            {"w": {"dtype": "X" * 10**6, "shape": [2], "data_offsets": [0, 8]}},
            {"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
            {"w": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}},
            {"w": None},
            {"__metadata__": {"a": 1}},
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
             "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
            [],
        ],
    )  # fmt: skip
    def test_headers_that_lie(self, header, tmp_path):
        content = json.dumps(header).encode()
        (tmp_path / "x").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
        with pytest.raises(InputError, match="is truncated or not a safetensors file"):
            TensorFile(tmp_path / "x", "copy it again")

    @pytest.mark.parametrize("content", [b"", b"1", (2**63).to_bytes(8, "little"), bytes(8), (9).to_bytes(8, "little")])
    def test_no_header(self, content, tmp_path):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(InputError, match="is truncated or not a safetensors file"):
            TensorFile(tmp_path / "x", "copy it again")

    @pytest.mark.parametrize("depth", [70, 900, 200_000])
    def test_deep_json(self, depth, model, tmp_path, capsys):
        (model / "model_index.json").write_text('{"a":' + "[" * depth + "]" * depth + "}")
        refused(sampled(model, tmp_path / "out"), capsys, "levels deep")

    def test_large_json(self, model, tmp_path, capsys):
        with (model / "model_index.json").open("wb") as file:
            file.truncate(2**40)
        refused(sampled(model, tmp_path / "out"), capsys, "larger than")


def test_what_safetensors_writes_is_read(tmp_path, rng):
    """All types and shapes, against the library's own writer."""
    made = {
        "a": torch.randn(3, 5, generator=rng), "b": torch.tensor(3.0), "c": torch.zeros(0, 4),
        "d": torch.arange(7, dtype=torch.int64), "e": torch.randn(3, generator=rng).bfloat16(),
        "f": torch.tensor([True, False]), "g": torch.randn(2, 1, 3, generator=rng).double(),
        "h": torch.arange(5, dtype=torch.uint8), "i": torch.randn(3, generator=rng).half(),
    }  # fmt: skip
    save_file(made, tmp_path / "x", metadata={"who": "me"})
    with TensorFile(tmp_path / "x", "copy it again") as file:
        assert file.metadata == {"who": "me"}
        found = file.read()
        some = file.read(["e", "a"])
    assert found.keys() == made.keys()
    assert list(some) == ["e", "a"]
    for name, tensor in found.items():
        assert tensor.dtype == made[name].dtype
        assert torch.equal(tensor, made[name])
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


# --- what was changed ---------------------------------------------------------------------------------------------


class TestChanged:
    @pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".safetensors")])
    def test_a_flipped_bit_is_noticed(self, name, model, tmp_path, capsys):
        content = bytearray((model / name).read_bytes())
        content[len(content) * 2 // 3] ^= 1
        (model / name).write_bytes(content)
        refused(sampled(model, tmp_path / "out"), capsys, "is not the file that the model was made of")

    @pytest.mark.parametrize("name", ["model.safetensors", "calibration.safetensors"])
    def test_in_an_expert_alone(self, name, stranger, data, tmp_path, capsys):
        path = stranger / "expert_2" / name
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        told = refused(["assemble", stranger, "--data", data, "--out", tmp_path / "model"], capsys)
        assert "is not the file that its config.json belongs to" in told

    def test_experts_without_a_hash_still_open(self, stranger):
        path = stranger / "expert_0" / "config.json"
        about = json.loads(path.read_text())
        del about["sha256"]
        path.write_text(json.dumps(about))
        DiT.from_pretrained(stranger / "expert_0")

    def test_swapped_weights(self, model, tmp_path, capsys):
        one, other = (model / f"expert_{k}" / "model.safetensors" for k in (0, 2))
        one.rename(tmp_path / "one")
        other.rename(one)
        (tmp_path / "one").rename(other)
        rehash(model, lambda about: about["files"].update({
            f"expert_{k}/model.safetensors": digest(model / f"expert_{k}" / "model.safetensors") for k in (0, 2)
        }))  # fmt: skip
        refused(sampled(model, tmp_path / "out"), capsys, "is not the file that its config.json belongs to")

    def test_swapped_places(self, model, tmp_path, capsys):
        rehash(model, lambda about: about["experts"].reverse())
        refused(sampled(model, tmp_path / "out"), capsys, "has the expert of cluster 2 in the place of 0")

    def test_swapped_folders(self, model, tmp_path, capsys):
        (model / "expert_0").rename(tmp_path / "one")
        (model / "expert_2").rename(model / "expert_0")
        (tmp_path / "one").rename(model / "expert_2")
        names = ("config.json", "model.safetensors", "calibration.safetensors")
        rehash(model, lambda about: about["files"].update({
            f"expert_{k}/{name}": digest(model / f"expert_{k}" / name) for k in (0, 2) for name in names
        }))  # fmt: skip
        refused(sampled(model, tmp_path / "out"), capsys, "is the expert of cluster 2, not of 0")

    def test_a_rehashed_index_without_changes_is_accepted(self, model):
        before = ModelIndex.read(model)
        rehash(model, lambda about: None)
        assert ModelIndex.read(model) == before

    @pytest.mark.slow
    def test_weights_cut_short_while_in_use(self, model, tmp_path):
        """If they were memory-mapped, this would kill the process."""
        program = """
import os, sys
from pathlib import Path
from atoll.errors import InputError
from atoll.sampling.pipeline import AtollPipeline
pipe = AtollPipeline(sys.argv[1])
pipe("a cat", routing="full", num_inference_steps=1, progress=False)
for path in Path(sys.argv[1]).rglob("*.safetensors"):
    os.truncate(path, 16)
try:
    pipe("a dog", routing="full", num_inference_steps=1, progress=False)
except InputError as error:
    print(error)
print("alive")
"""
        run = subprocess.run([sys.executable, "-c", program, model], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stdout.endswith("alive\n")


class TestCheckpoints:
    FLAGS = ("--cluster", "0", "--model", "xs/1", "--batch", "4", "--save-every", "1", "--eval-every", "9",
             "--sample-every", "0")  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.parametrize("place", [pytest.param(0.1, marks=pytest.mark.slow), 0.7])
    def test_a_flipped_bit_is_told_and_the_one_before_is_taken(self, place, data, tmp_path, capsys):
        main(["train", str(data), "--out", str(tmp_path / "whole"), "--steps", "2", *self.FLAGS])
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        path = max((tmp_path / "cut" / "state").glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)
        capsys.readouterr()
        for name in ("whole", "cut"):
            main(["train", str(data), "--out", str(tmp_path / name), "--steps", "3", *self.FLAGS])
        assert f"{path.name} cannot be resumed from" in capsys.readouterr().err
        assert digest(tmp_path / "whole" / "model.safetensors") == digest(tmp_path / "cut" / "model.safetensors")


class TestKnownDigests:
    @pytest.fixture
    def path(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path = tmp_path / "weights"
        path.write_bytes(b"one")
        os.utime(path, (1, 1))
        return path

    def counted(self, monkeypatch) -> list[Path]:
        read: list[Path] = []
        digest_of = files.digest_of
        monkeypatch.setattr(files, "digest_of", lambda path, root=None: read.append(path) or digest_of(path, root))
        return read

    def test_a_file_is_hashed_once(self, path, monkeypatch):
        read = self.counted(monkeypatch)
        found = {files.known_digest(path) for _ in range(3)}
        assert found == {hashlib.sha256(b"one").hexdigest()}
        assert read == [path]

    def test_and_again_when_it_changed(self, path):
        files.known_digest(path)
        path.write_bytes(b"two")
        assert files.known_digest(path) == hashlib.sha256(b"two").hexdigest()

    def test_what_was_just_written_is_not_remembered(self, path, monkeypatch):
        read = self.counted(monkeypatch)
        path.touch()
        for _ in range(2):
            files.known_digest(path)
        assert len(read) == 2

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}', "\0"])
    def test_a_damaged_memory_is_none(self, path, content, tmp_path):
        files.known_digest(path)
        (memory,) = (tmp_path / "cache" / "atoll" / "sha256").iterdir()
        memory.write_text(content)
        assert files.known_digest(path) == hashlib.sha256(b"one").hexdigest()

    def test_without_a_place_to_remember(self, path, tmp_path, monkeypatch):
        (tmp_path / "cache").write_text("a file")
        assert files.known_digest(path) == hashlib.sha256(b"one").hexdigest()


# --- what is told of it -------------------------------------------------------------------------------------------


class TestMessages:
    ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e"

    @pytest.mark.parametrize("change", [
        {"format": ESCAPE}, {"license": [ESCAPE]}, {ESCAPE: 1}, {"num_experts": ESCAPE}, {"format": "x" * 50_000_000},
        {"experts": [{"folder": ESCAPE + "/"}] * 3}, {"files": {ESCAPE: "0"}}, {"router": {"folder": ESCAPE + "/"}},
        {"latent_space": {"codec": {}, "shape": ESCAPE}}, {"num_experts": 10**4000},
    ], ids=range(10))  # fmt: skip
    def test_of_an_index(self, change, model, tmp_path, capsys):
        about = json.loads((model / "model_index.json").read_text())
        (model / "model_index.json").write_text(json.dumps({**about, **change}))
        told = refused(sampled(model, tmp_path / "out"), capsys)
        assert "\u202e" not in told

    @pytest.mark.parametrize("change", [
        {"model": ESCAPE}, {ESCAPE: 1}, {"architecture": {ESCAPE: 1}}, {"format": ESCAPE * 10**5},
        {"data": {"cluster": ESCAPE}}, {"guidance": ESCAPE}, {"architecture": ESCAPE * 10**5},
    ], ids=range(7))  # fmt: skip
    def test_of_an_expert(self, change, stranger, data, tmp_path, capsys):
        path = stranger / "expert_0" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        refused(["assemble", stranger, "--data", data, "--out", tmp_path / "model"], capsys)

    def test_of_tensors(self, stranger, data, tmp_path, capsys):
        save_file({self.ESCAPE * 1000: torch.zeros(1)}, stranger / "expert_0" / "model.safetensors")
        refused(["assemble", stranger, "--data", data, "--out", tmp_path / "model"], capsys)

    def test_values_are_shown_shortly(self):
        for value in (
            "x" * 10**6,
            list(range(10**6)),
            {"a": "b" * 10**6},
            10**3000,
            [[[[[[[["deep"]]]]]]]],
            b"1" * 10**6,
        ):
            assert len(shown(value)) <= 200

    def test_lines_for_a_terminal(self):
        assert printable("plain: 'naïve 猫'") == "plain: 'naïve 猫'"
        assert printable("a\x1b[31mb\nc\x9b") == r"a\x1b[31mb\nc\x9b"
        assert len(printable("x" * 10**6)) < 2100


@pytest.mark.parametrize("cls", [DiT, Router, CentroidRouter])
def test_every_network_names_its_weights(cls: type[Stored], stranger, tmp_path):
    folder = {DiT: "expert_0", Router: "router", CentroidRouter: "centroids"}[cls]
    cls.from_pretrained(stranger / folder).save_pretrained(tmp_path / "again")
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    assert about["sha256"] == {"model.safetensors": digest(tmp_path / "again" / "model.safetensors")}
