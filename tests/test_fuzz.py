"""Thousands of damaged inputs through every reader: no traceback, no hang, no crash, and no change goes unnoticed.

Each case damages one file of a good input and reads it in a process with a memory limit, which reports the outcome:
refused in a sentence, the same as before, or changed. Cases are seeded, so that one can be rerun by its number.
"""

import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import tarfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import published
from atoll.cli.main import main
from atoll.data.builtin import make
from atoll.data.shards import Dataset
from atoll.sampling.assemble import assemble
from test_assemble import parts

SECONDS = 90  # for a case that normally takes 0.1
MEMORY = 12 << 30  # address space: torch alone reserves a few of these
PROMPT = "a pink ghost with a yellow party hat on a blue background"
HOSTILE: list[Any] = [
    None, True, -1, 0, 10**18, 10**400, 1e308, "", "x" * 100_000, "\x1b[2J", "../../etc/passwd", "/etc/passwd", [], {},
    [[]] * 50, {"a": {"b": {}}}, "\ud800", 0.5, [10**9, 10**9, 10**9], "nan",
]  # fmt: skip


# --- damage -------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Returns content with a few bytes changed, missing or repeated."""
    data = bytearray(content)
    first = rng.randrange(min(len(data), rng.choice([16, 200, 1 << 30])) or 1)
    length = min(rng.choice([1, 2, 4, 8, 64, 512]), len(data) - first)
    match rng.randrange(8):
        case 0 if data:
            data[first] ^= 1 << rng.randrange(8)
        case 1:
            data[first : first + length] = rng.randbytes(length)
        case 2:
            data[first : first + length] = rng.choice([b"\x00", b"\xff", b"9"]) * length
        case 3:
            del data[first : first + length]
        case 4:
            data[first:first] = data[first : first + length]
        case 5:
            del data[first:]
        case 6:
            data += rng.choice([b"\x00", b"}", bytes(data[:64])]) * rng.choice([1, 100])
        case _:
            data[first:first] = rng.randbytes(length)
    return bytes(data)


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """Returns JSON with a value changed or missing, or a new key."""
    values = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(values)
    node, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(["surprise", "", "\x1b]0;x\x07", "__class__"])] = rng.choice(HOSTILE)
        case 2 if type(node[key]) in (int, float):
            node[key] = rng.choice([-1, 0, 2, 10**6, 10**9, 10**18, 0.5, -0.0]) * rng.choice([1, node[key]])
        case _:
            node[key] = rng.choice(HOSTILE)
    return json.dumps(values).encode("utf-8", "surrogatepass")


def damaged_numbers(content: bytes, rng: random.Random) -> bytes:
    """Returns content with a number in its text or header replaced by one of as many or more digits."""
    found = list(re.finditer(rb"\d+", content[:20_000]))
    if not found:
        return damaged(content, rng)
    one = rng.choice(found)
    digits = one.end() - one.start()
    other = rng.choice([b"9" * digits, b"0" * digits, b"-" + b"1" * max(digits - 1, 1), b"9" * 30, b"1e999"])
    return content[: one.start()] + other + content[one.end() :]


def damage(path: Path, outside: Path, rng: random.Random) -> str:
    """Damages a file, and returns a description of how."""
    kind = rng.random()
    if kind < 0.06:
        special = rng.choice(["fifo", "link", "loop", "device", "folder", "missing", "empty", "sparse"])
        content = path.read_bytes()
        path.unlink()
        match special:
            case "fifo":
                os.mkfifo(path)
            case "link":
                (outside / "elsewhere").write_bytes(content)
                path.symlink_to(outside / "elsewhere")
            case "loop":
                path.symlink_to(path.name)
            case "device":
                path.symlink_to("/dev/zero")
            case "folder":
                path.mkdir()
            case "empty":
                path.touch()
            case "sparse":
                path.write_bytes(content)
                os.truncate(path, 1 << 40)
        return special
    content = path.read_bytes()
    if path.suffix == ".json" and kind < 0.7:
        path.write_bytes(damaged_json(content, rng))
        return "json"
    if kind < 0.25:
        path.write_bytes(damaged_numbers(content, rng))
        return "number"
    path.write_bytes(damaged(content, rng))
    return "bytes"


# --- readers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A good input, its reader, and the number of cases. `read` returns a digest of all output."""

    name: str
    num: int
    make: Callable[[Path, Path], None]  # (folder to make, folder of what is trained once)
    read: Callable[[Path, Path], str]  # (folder, place for output)
    hashed: bool = True  # whether any change must be detected; an image may be any other image


def command(*arguments: object) -> None:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        main([str(argument) for argument in arguments])


def digest_of(folder: Path, *patterns: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
        digest.update(f"\n{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def make_model(folder: Path, base: Path) -> None:
    data, run = parts(base)
    assemble([run], None, folder.with_name("linked"), data)
    shutil.copytree(folder.with_name("linked"), folder, dirs_exist_ok=True)


def sample(folder: Path, out: Path) -> str:
    command("sample", folder, PROMPT, "--steps", 1, "--routing", "full", "--out", out)
    with Image.open(next(out.glob("*-0.png"), None) or sorted(out.glob("*.png"))[0]) as image:
        return hashlib.sha256(image.tobytes()).hexdigest()


def make_run(folder: Path, base: Path) -> None:
    shutil.copytree(
        parts(base)[1], folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("state*", "*.png", "centroids")
    )
    for name in ("vae", "text_encoder"):
        shutil.copytree(parts(base)[0] / name, folder / name)


def put_together(folder: Path, out: Path) -> str:
    command("assemble", folder, "--out", out)
    return digest_of(out, "*/*.safetensors")  # a card is its author's word


def make_data(folder: Path, base: Path) -> None:
    shutil.copytree(parts(base)[0], folder, dirs_exist_ok=True)


def read_data(folder: Path, out: Path) -> str:
    command("inspect", folder, "--sheet", out / "sheet.png")
    data, digest = Dataset.open(folder), hashlib.sha256()
    for name in data.shards[0].names:
        digest.update(np.ascontiguousarray(data.column(name)[:]).tobytes())
    for name in ("key", "caption", "label"):
        digest.update(repr(data.strings(name)).encode())
    return digest.hexdigest()


TRAIN = ("--model", "xs/1", "--steps", 2, "--batch", 4, "--save-every", 1, "--eval-every", 2, "--sample-every", 0)


def copy_of_data(base: Path) -> Path:
    if not (base / "fuzz-data").exists():
        shutil.copytree(parts(base)[0], base / "fuzz-data")
    return base / "fuzz-data"


def make_half_trained(folder: Path, base: Path) -> None:
    command("train", copy_of_data(base), "--cluster", 0, "--out", folder, *TRAIN[:3], 1, *TRAIN[4:])


def resume(folder: Path, out: Path) -> str:
    command("train", BASE[0] / "fuzz-data", "--cluster", 0, "--out", folder, *TRAIN)
    return digest_of(folder, "model.safetensors")


BASE: list[Path] = []


def make_checkpoint(folder: Path, _: Path) -> None:
    torch.save({"ema": published.class_dit()}, folder / "dit.pt")


def convert(folder: Path, out: Path) -> str:
    command("convert", next(folder.iterdir()), "--heads", published.HEADS, "--out", out)
    return digest_of(out, "model.safetensors")


def make_safetensors(folder: Path, _: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in published.class_dit().items()}, folder / "dit.safetensors")


def make_pictures(folder: Path, _: Path) -> None:
    examples = make("shapes", 10, 32, 0)
    for i in range(10):
        kind = ("png", "jpg", "webp", "gif", "bmp")[i % 5]
        Image.fromarray(np.asarray(examples[i].image)).save(folder / f"{i}.{kind}")
        if i % 3:
            (folder / f"{i}.txt").write_text(examples[i].caption)
    rows = [{"file_name": f"{i}.{('png', 'jpg', 'webp', 'gif', 'bmp')[i % 5]}", "text": examples[i].caption}
            for i in range(0, 10, 3)]  # fmt: skip
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tar(folder: Path, base: Path) -> None:
    (place := folder.with_name("members")).mkdir()
    examples = make("shapes", 10, 32, 0)
    with tarfile.open(folder / "0.tar", "w") as archive:
        for i in range(10):
            place.joinpath(f"{i}.txt").write_text(examples[i].caption)
            Image.fromarray(np.asarray(examples[i].image)).save(place / f"{i}.png")
            for kind in ("png", "txt"):
                archive.add(place / f"{i}.{kind}", f"{i}.{kind}")


def prepare(folder: Path, out: Path) -> str:
    """Prepares ten images, each of which must be kept or reported."""
    command("prepare", folder, "--out", out, "--size", 32, "--codec", "pca:8x12", "--workers", 0, "--min-side", 16)
    kept = json.loads((out / "dataset.json").read_text())["counts"]["rows"]
    told = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    if kept + len(told) < 10 and not any("damaged" in str(line) for line in told):
        raise AssertionError(f"of ten pictures {kept} were kept and {len(told)} told of")
    return f"{kept} kept"


def make_recipe(folder: Path, base: Path) -> None:
    copy_of_data(base)
    (folder / "mine.toml").write_text(
        '[expert]\nmodel = "xs/1"\nsteps = 2\nbatch = 4\nlr = 0.001\nobjective = "fm"\n\n[router]\nsteps = 3\n'
    )


def read_recipe(folder: Path, out: Path) -> str:
    command("train", BASE[0] / "fuzz-data", "--cluster", 0, "--recipe", folder / "mine.toml", "--out", out, "--dry-run")
    return ""


TARGETS = [
    Target("model", 420, make_model, sample),
    Target("parts", 300, make_run, put_together),
    Target("data", 420, make_data, read_data),
    Target("checkpoint", 120, make_half_trained, resume),
    Target("pt", 200, make_checkpoint, convert, hashed=False),
    Target("safetensors", 150, make_safetensors, convert, hashed=False),
    Target("pictures", 200, make_pictures, prepare, hashed=False),
    Target("tar", 200, make_tar, prepare, hashed=False),
    Target("recipe", 60, make_recipe, read_recipe, hashed=False),
]


# --- running ------------------------------------------------------------------------------------------------------


def outcomes(target: Target, good: Path, place: Path, seed: int, pipe: Any) -> None:
    """Runs all cases of a target in its own process, announcing each before it is tried."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    names = sorted(str(path.relative_to(good)) for path in good.rglob("*") if path.is_file())
    for number in range(-1, target.num):
        case = place / "case"
        for folder in (case, place / "out", place / "outside"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, case, symlinks=True)
        (place / "outside").mkdir()
        rng = random.Random(f"{seed} {target.name} {number}")
        name = rng.choice(names)
        what = "nothing" if number < 0 else f"{damage(case / name, place / 'outside', rng)} of {name}"
        pipe.send(("try", number, what))
        try:
            told = ("read", target.read(case, place / "out"))
        except SystemExit as stop:
            told = ("refused" if stop.code == 2 else f"exit {stop.code}", "")
        except BaseException:
            told = ("traceback", traceback.format_exc()[-1500:])
        pipe.send(("done", *told))
    pipe.send(("end",))


def results(target: Target, good: Path, place: Path, seed: int) -> Iterator[tuple[int, str, str, str]]:
    """Yields (number, damage, outcome, details) of each case; stops if the process hangs or dies."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=outcomes, args=(target, good, place, seed, theirs))
    process.start()
    theirs.close()
    number, what = -1, "nothing"
    try:
        while True:
            if not ours.poll(SECONDS):
                yield number, what, "hang", ""
                return
            try:
                message = ours.recv()
            except EOFError:
                process.join()
                yield number, what, f"died with {process.exitcode}", ""
                return
            if message[0] == "end":
                return
            if message[0] == "try":
                _, number, what = message
            else:
                yield number, what, message[1], message[2]
    finally:
        if process.pid is not None and process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_inputs(target: Target, tmp_path, tmp_path_factory, report):
    base = tmp_path_factory.getbasetemp()
    BASE[:] = [base]
    (good := tmp_path / "good").mkdir()
    target.make(good, base)
    found: Counter[str] = Counter()
    wrong: list[str] = []
    whole = None
    seed = int(os.environ.get("FUZZ_SEED", "0"))
    for number, what, ended, more in results(target, good, tmp_path / "cases", seed):
        if number < 0:
            assert ended == "read", more
            whole = more
            continue
        outcome = ended if ended != "read" else "same" if more == whole else "changed"
        found[outcome] += 1
        if outcome not in ("refused", "same") and (target.hashed or outcome != "changed"):
            wrong.append(f"case {number}, {what}: {outcome} {more}")
    report(f"damaged {target.name:12} {sum(found.values())} cases: {dict(found)}")
    assert not wrong, f"{len(wrong)} of them\n" + "\n".join(wrong[:20])
    assert sum(found.values()) == target.num


def test_there_are_enough():
    assert sum(target.num for target in TARGETS) >= 2000
