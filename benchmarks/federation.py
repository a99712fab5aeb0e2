"""The costs of a federation, and what its gate accepts.

python benchmarks/federation.py status           # 1,000 slots and 10,000 submissions, in a folder
python benchmarks/federation.py status --url s3://bucket/large
python benchmarks/federation.py train DATA       # CPU time of `atoll federation train` over that of `atoll train`
python benchmarks/federation.py gate DEMO        # the default gate, and the experts of an `atoll demo`
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import resource
import secrets
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import tyro

from atoll.data.shards import Dataset
from atoll.federation.charter import FORMAT, Blob, Charter, Slot
from atoll.federation.gate import Gate
from atoll.federation.keys import Identity
from atoll.federation.lease import Held, Lease
from atoll.federation.quality import QualityError, check_quality
from atoll.federation.roles import Federation, found, url_of
from atoll.federation.status import read_status, render_text
from atoll.federation.submission import Key
from atoll.federation.verify import VerdictKey
from atoll.networks.expert import Expert
from atoll.object_store import Store
from atoll.training.expert import ExpertTask
from atoll.training.settings import ExpertSettings

METHODS = ("get", "read", "head", "get_range", "modified", "put", "delete", "list", "list_modified")


def status(url: str | None = None, slots: int = 1000, submissions: int = 10_000, rounds: int = 3) -> None:
    """Times `status` on a store with `slots` slots, half of them accepted, a quarter leased."""
    with TemporaryDirectory() as place:
        os.environ |= {"ATOLL_HOME": f"{place}/home", "XDG_CACHE_HOME": f"{place}/cache"}
        federation = fill(url_of(url or f"{place}/store"), slots, submissions)
        for name in ("first", *(["again"] * rounds)):
            if name == "first":
                os.environ["ATOLL_HOME"] = f"{place}/other"
            calls: Counter[str] = Counter()
            originals = {method: getattr(Store, method) for method in METHODS}
            for method, original in originals.items():
                setattr(Store, method, _counting(calls, method, original))
            start = time.perf_counter()
            now = read_status(Federation.open(federation.url))
            text = render_text(now)
            seconds = time.perf_counter() - start
            for method, original in originals.items():
                setattr(Store, method, original)
            pages = -(-submissions // 1000) * 2 + 2 * -(-slots // 1000)
            total = sum(calls.values())
            print(f"status, {name}: {seconds:.2f} s, {total} calls {dict(calls)}, about {pages} pages of lists")
        print(text[0])


def _counting(calls: Counter[str], name: str, original: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return original(*arguments, **options)

    return call


def fill(url: str, num_slots: int, num_submissions: int) -> Federation:
    """Returns a federation that is complete except for the files of its experts."""
    from tuf.api.metadata import Metadata

    identity = Identity.load_or_make("anna")
    blob = Blob(sha256="0" * 64, size=1)
    charter = Charter(
        format=FORMAT, name="large", created=datetime.now(UTC).date().isoformat(), license="CC0-1.0", gate=Gate(),
        people=[identity.person], files={"dataset.json": blob}, router={},
        slots=[
            Slot(number=n, name=f"cluster {n}", images=5000, files={f"clusters/{n:02d}/00000.safetensors": blob})
            for n in range(num_slots)
        ],
    )  # fmt: skip
    federation = found(url, identity, charter, [identity.person], 1)
    ids = [secrets.token_hex(32) for _ in range(num_submissions)]
    versions, objects = {}, dict[str, bytes]()
    about = {
        "name": "anna",
        "author": identity.key,
        "objective": "fm",
        "steps": 4000,
        "samples": 256000,
        "license": "CC0-1.0",
    }
    for n in range(0, num_slots, 2):
        role = federation._bin(n)
        metadata = federation.next_bin(n, (ids[n], 1000), about)
        if role in versions:  # two slots in one bin
            metadata.signed.targets |= Metadata.from_bytes(objects[f"metadata/1.{role}.json"]).signed.targets  # type: ignore[attr-defined]
        metadata.sign(identity.signer)
        objects[f"metadata/1.{role}.json"], versions[role] = metadata.to_bytes(), 1
    for i, name in enumerate(ids):
        objects[str(Key(name, i % num_slots))] = b"{}"
        objects[str(VerdictKey(name, i % num_slots, identity.key[:16], "0" * 16, i % num_slots % 2 == 0))] = b"{}"
    for n in range(1, num_slots, 4):
        held = [Held(person=identity.person, step=0)]
        lease = Lease(slot=n, holder=identity.person, nonce="0" * 32, beat=9, run="r", step=1000, steps=4000, held=held)
        objects[f"leases/{n:04d}.json"] = lease.model_dump_json().encode()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda pair: federation.store.put(*pair), objects.items()))
    federation.sign_snapshot(identity, versions)
    return federation


def train(data: Path, steps: int = 400, rounds: int = 3, model: str = "mini", batch: int = 32, every: int = 50) -> None:
    """Compares CPU time of the same training alone and for a federation in a folder, in turns.

    Args:
        data: A data set in clusters, such as `atoll prepare avatars --num 4000 --out data` and `atoll partition` make.
        steps: Steps per run.
        rounds: Number of runs of each kind.
        model: Size of the model.
        batch: With 1, steps are cheap, and the overhead of a federation shows more clearly.
        every: Steps between published checkpoints, like the gate's segment_steps.
    """
    ratios = []
    with TemporaryDirectory() as place:
        for round_ in range(rounds):
            folder = Path(place) / str(round_)
            environment = {**os.environ, "ATOLL_HOME": f"{folder}/home", "XDG_CACHE_HOME": f"{folder}/cache"}
            flags = [f"--steps={steps}", f"--model={model}", f"--batch={batch}", "--sample-every=0"]
            url = str(folder / "store")
            run(
                environment,
                "federation",
                "create",
                url,
                f"--data={data}",
                "--gate",
                f"segment_steps={every}",
                *flags[:3],
            )
            plain = run(environment, "train", str(data), "--cluster=0", f"--out={folder / 'plain'}", *flags)
            federated = run(environment, "federation", "train", url, "--slot=0")
            ratios.append(federated / plain)
            print(
                f"round {round_}: train {plain:.1f} s of CPU, federation train {federated:.1f} s: "
                f"{federated - plain:+.1f} s, {ratios[-1]:.3f}", flush=True,
            )  # fmt: skip
    print(f"federation train over train: median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def gate(demo: Path) -> None:
    """Measures errors with the default gate: of each slot's expert, of the next slot's, and of random weights.

    Args:
        demo: The output folder of `atoll demo`.
    """
    torch.set_num_threads(1)
    experts = sorted((demo / "run").glob("expert_*"))
    for slot, own in enumerate(experts):
        task = ExpertTask(Dataset.open(demo / "data", slot), ExpertSettings("8x1", sample_every=0), torch.device("cpu"))
        random = Expert.load(own)
        torch.manual_seed(slot)
        for p in random.network.parameters():
            p.data = p.data.std(correction=0) * torch.randn_like(p)
        next_one = experts[(slot + 1) % len(experts)]
        for name, expert in {"its own": Expert.load(own), "next": Expert.load(next_one), "random": random}.items():
            try:
                errors = check_quality(expert, None, task, Gate())
                said = "passes"
            except QualityError as error:
                errors, said = error.figures, str(error)
            ratios = [e / b for e, b in zip(errors["expert"], errors["baseline"], strict=True)]
            print(f"slot {slot}, {name} expert: {min(ratios):.2f} to {max(ratios):.2f}: {said}", flush=True)


def run(environment: dict[str, str], *arguments: str) -> float:
    """Returns the CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "atoll", *arguments], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    Data = Annotated[Path, tyro.conf.Positional]
    train.__annotations__["data"] = gate.__annotations__["demo"] = Data
    tyro.extras.subcommand_cli_from_dict({"status": status, "train": train, "gate": gate})
