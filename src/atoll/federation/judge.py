"""Judges a submission by static checks, quality on held-out data and replayed training, in a process with limits.

`judge` starts `python -m atoll.federation.judge`, which sets its own limits before it reads any of the submission, and
answers with JSON of bounded size. So no submission can take its verifier down: if the process hangs, crashes or uses
too much memory, the submission is refused.
"""

import json
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from atoll.cards import CONFIG, Card, hash_of
from atoll.errors import InputError, printable
from atoll.federation.gate import Gate, Limits
from atoll.processes import dying_with_parent
from atoll.storage import parse_json, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.networks.expert import Expert
    from atoll.training.expert import ExpertTask
    from atoll.training.settings import ExpertSettings

MAX_ANSWER = 1 << 20  # bytes
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "XDG_CACHE_HOME", "HOME")
KEPT_PREFIXES = ("ATEN_", "MKL_", "ONEDNN_", "OMP_")  # and none with credentials
STARTED = b"started"
STARTING = 120  # seconds of wall-clock time
BY_CLOCK = 4  # wall-clock limit over CPU limit: the machine may be busy
CLAIMED = 1e-2  # relative tolerance between claimed and remeasured figures


class Judgement(Card):
    accepted: bool
    reason: str  # one sentence
    figures: dict[str, Any]  # static, quality, replay: as far as the checks got


def judge(
    submission: Path,
    *,
    slot: int,
    gate: Gate,
    data: Path,
    present: Path | None = None,
    others: Sequence[Path] = (),
    limits: Limits | None = None,
    seed: int | None = None,
    private: bool = False,
    like: int | None = None,
) -> Judgement:
    """Returns the judgement of the folder `submission`, an expert of `slot`; never raises because of its content.

    `data` is a data set with the slot's cluster; `present` is the folder of the slot's current expert; `others` are
    folders of experts that it must not be a copy of. `seed` selects what is replayed; by default it is unpredictable.
    An expert of `private` data is judged without a replay, by the slot's held-out data alone.
    If nobody else has images of the slot at all, `like` is another slot, which defines latents and texts: then files,
    card and run are checked, and nothing is measured.
    """
    limits = limits or Limits()
    request = {
        "submission": str(submission.absolute()),
        "slot": slot,
        "gate": gate.model_dump(),
        "data": str(Path(data).absolute()),
        "present": None if present is None else str(present.absolute()),
        "others": [str(folder.absolute()) for folder in others],
        "seed": secrets.randbits(48) if seed is None else seed,
        "private": private,
        "like": like,
    }
    command = dying_with_parent([sys.executable, "-m", "atoll.federation.judge", limits.model_dump_json()])
    with TemporaryDirectory(prefix="atoll-judge-") as place, (Path(place) / "answer").open("w+b") as answer:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL, env=child_environment(),
            start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(json.dumps(request).encode(), timeout=BY_CLOCK * limits.seconds + STARTING)
        except subprocess.TimeoutExpired:
            return _refusal(f"judging it took more than {BY_CLOCK * limits.seconds:g} seconds by the clock")
        finally:
            _end(process)
        answer.seek(0)
        return _read_answer(answer.read(MAX_ANSWER + 1), process.returncode, limits)


def child_environment() -> dict[str, str]:
    """Returns the environment of a process that reads a submission, without credentials of a store."""
    kept = {name: os.environ[name] for name in os.environ if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process, and any that it may have started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _refusal(reason: str) -> Judgement:
    return Judgement(accepted=False, reason=reason, figures={})


def _read_answer(answer: bytes, code: int, limits: Limits) -> Judgement:
    started, _, said = answer.partition(b"\n")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    if started != STARTED:  # it has read nothing of the submission
        raise InputError(f"the process that judges did not start ({how}): check the installation, and its limits")
    if -code == signal.SIGXCPU:
        return _refusal(f"judging it took more than {limits.seconds:g} seconds of CPU time")
    try:
        if len(answer) > MAX_ANSWER:
            raise ValueError("it is too long")
        values = parse_json(said)
        fault = values.get("fault")
    except (ValueError, AttributeError):
        return _refusal(f"the process that judged it ended without an answer ({how}), within {limits.memory:,} bytes")
    if isinstance(fault, str):
        raise InputError(fault)  # in the verifier's own files
    return Judgement.parse(values, "what the judging process has said")


# --- in the process with limits ---------------------------------------------------------------------------------------


def main() -> None:
    """Reads a request from standard input, and writes the judgement to standard output."""
    import torch  # noqa: F401 - imported before the limits, which then do not count it

    import atoll.federation.quality
    import atoll.federation.replay
    import atoll.federation.static  # noqa: F401

    limits = Limits.model_validate_json(sys.argv[1])
    request = parse_json(sys.stdin.buffer.read())
    with os.fdopen(os.dup(1), "wb", buffering=0) as answer:
        os.dup2(2, 1)  # other output must not mix with the answer
        set_limits(limits)
        answer.write(STARTED + b"\n")
        answer.write(json.dumps(answer_to(request, limits), allow_nan=False).encode())


def answer_to(request: Mapping[str, Any], limits: Limits) -> Mapping[str, Any]:
    """Returns a judgement for JSON, or the fault in the verifier's own files."""
    try:
        return judge_here(**{**request, "gate": Gate.model_validate(request["gate"])}).model_dump()
    except InputError as error:
        return {"fault": str(error)}
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        return _refusal(f"judging it needs more than {limits.memory:,} bytes of memory").model_dump()


def set_limits(limits: Limits) -> None:
    """Limits this process irrevocably; the CPU time of its start does not count."""
    seconds = math.ceil(time.process_time() + limits.seconds)
    for kind, most in {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_FSIZE: limits.written,
        resource.RLIMIT_NOFILE: limits.files,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # too large a file is an error, and does not kill the process


def judge_here(
    submission: str,
    slot: int,
    gate: Gate,
    data: str,
    present: str | None = None,
    others: Sequence[str] = (),
    seed: int = 0,
    private: bool = False,
    like: int | None = None,
) -> Judgement:
    """Judges within this process; raises InputError for faults in the verifier's own files."""
    import torch

    from atoll.data.shards import Dataset
    from atoll.federation.quality import QualityError
    from atoll.networks.expert import Expert
    from atoll.training.expert import ExpertTask
    from atoll.training.settings import ExpertSettings

    torch.set_num_threads(1)
    folder = Path(submission)
    dataset = Dataset.open(data, slot if like is None else like)
    ours = ExpertTask(dataset, ExpertSettings(model="8x1", sample_every=0), torch.device("cpu"))
    current = None if present is None else Path(present)
    for own in filter(None, (current, *map(Path, others))):
        Expert.load(own)  # raises here, since a fault in it is not the submission's
    figures: dict[str, Any] = {}
    try:
        with torch.random.fork_rng(devices=[]):
            paths = [Path(other) for other in others]
            _judge(folder, slot, gate, ours, current, paths, seed, private, like is None, figures)
    except InputError as error:
        if isinstance(error, QualityError):
            figures["quality"] = error.figures
        reason = printable(str(error).replace(f"{folder}/", "").replace(f"{folder}", "the submission"), 600)
        return Judgement(accepted=False, reason=reason, figures=figures)
    checked = "its card, held-out errors and replayed training agree"
    if private:
        checked = "its card and held-out errors pass" if like is None else "its files and card, and nothing else, agree"
    return Judgement(accepted=True, reason=f"{checked} with the gate", figures=figures)


def _judge(
    folder: Path, slot: int, gate: Gate, ours: "ExpertTask", present: Path | None, others: Sequence[Path],
    seed: int, private: bool, measures: bool, figures: dict[str, Any],
) -> None:  # fmt: skip
    """Raises InputError with what is wrong; `figures` collects what was measured until then."""
    from atoll.federation.quality import check_quality, check_samples
    from atoll.federation.replay import Replay, choose, describe, for_replay, segments_of
    from atoll.federation.static import CHECKPOINTS, check_expert, check_files
    from atoll.networks.expert import Expert

    sizes = check_files(folder, gate)
    expert, static = check_expert(folder, slot, gate, ours.view, private)
    figures["static"] = {**static, "bytes": sum(sizes.values())}
    settings, task = _check_run(folder, expert, ours, gate, private)
    segments = [] if private else segments_of(folder / CHECKPOINTS, settings, gate.segment_steps)
    start = task.network.state_dict() if task is not None and gate.init is None else None
    figures["static"]["nearest"] = _refuse_copy(expert, start, others, gate)
    if task is not None:
        _check_claims(folder, expert, task, settings, segments[-1].end)
    if measures:
        current = None if present is None else Expert.load(present)
        figures["quality"] = check_quality(expert, current, ours, gate)
    if measures and gate.samples:
        figures["samples"] = check_samples(folder, present, others, slot, ours, gate)
    if task is None or not gate.segments:
        return
    figures["replay"] = {"seed": seed, "of": len(segments), "segments": []}
    task.network.train()
    replay = Replay(task, for_replay(settings))
    replay.check_kind(segments)
    if gate.init is None:
        replay.check_start(segments[0].start)
    for segment in choose(segments, settings, task.network.config.hidden_size, gate.segments, seed):
        errors = replay.redo(segment)
        first, last = segment.steps
        figures["replay"]["segments"].append({"from": first, "to": last, **describe(errors)})
        if not max(errors.values()) <= gate.tolerance:
            raise InputError(
                f"{segment}, redone, lead elsewhere: the update differs by {max(errors.values()):.2g} of its length, "
                f"and the gate allows {gate.tolerance:g}"
            )


def _check_run(
    folder: Path, expert: "Expert", ours: "ExpertTask", gate: Gate, private: bool
) -> tuple["ExpertSettings", "ExpertTask | None"]:
    """Returns the run's settings and, unless its data are private, its task; refuses a run of another expert."""
    from atoll.config import build
    from atoll.federation.replay import for_replay
    from atoll.federation.static import RUN
    from atoll.networks.dit import DiTConfig
    from atoll.networks.presets import preset, size_of
    from atoll.training.expert import ExpertTask
    from atoll.training.settings import ExpertSettings

    run = read_json(folder / RUN, "submit what training has written", folder)
    if run.pop("sha256", None) != hash_of(run):
        raise InputError(f"{RUN} was altered: its hash is another")
    settings = build(ExpertSettings, run.get("settings"), f"the settings in {RUN}")
    warmup = run.get("warmup_steps")
    settings = replace(settings, warmup=warmup if type(warmup) is int else settings.resolved_warmup)
    if run.get("complete") is not True or run.get("steps_done") != settings.steps:
        raise InputError(f"{RUN} says that the run ended at step {run.get('steps_done')!r} of {settings.steps}")
    config, (channels, size, _) = expert.network.config, ours.view.shape
    model = settings.model if gate.init is None else size_of(config)
    if DiTConfig(**preset(model, input_size=size, in_channels=channels, text_dim=ours.text.dim)) != config:
        raise InputError(f"{RUN} is of a network of size {settings.model}, and {CONFIG} of {size_of(config)}")
    if settings.resolved_objective != expert.objective:
        raise InputError(f"{RUN} trains {settings.objective}, which is not the objective in {CONFIG}")
    if private:
        return settings, None
    if run.get("data") != ours.view.identity():
        raise InputError(f"{RUN} is of other data than those of the slot")
    task = ExpertTask(ours.view.data, replace(for_replay(settings), model=model), ours.device)
    task.init = expert.network.card.get("init")
    task.license = expert.network.card.get("license", task.license) if gate.init is not None else task.license
    return settings, task


def _refuse_copy(
    expert: "Expert", start: "dict[str, Tensor] | None", others: Sequence[Path], gate: Gate
) -> dict[str, Any] | None:
    from atoll.federation.static import nearest_copy
    from atoll.networks.stored import WEIGHTS
    from atoll.tensors import read_tensors

    weights = {folder.name: read_tensors(folder / WEIGHTS, "the verifier's own copy is damaged") for folder in others}
    nearest = nearest_copy(expert, start, weights)
    if nearest is None:
        return None
    name, distance = nearest
    if distance < gate.copy_distance:
        raise InputError(
            f"it is a copy of {name}: their weights are {distance:.2g} of its own update apart, and the gate asks for "
            f"{gate.copy_distance:g}"
        )
    return {"name": name, "distance": float(f"{distance:.3g}")}


def _check_claims(folder: Path, expert: "Expert", task: "ExpertTask", settings: "ExpertSettings", last: Path) -> None:
    """Recomputes card, calibration and statistics from the weights; refuses what training would not have written."""
    import torch

    from atoll.federation.replay import ADVICE, read_progress
    from atoll.networks.expert import CALIBRATION
    from atoll.networks.stored import WEIGHTS
    from atoll.tensors import TensorFile, read_tensors
    from atoll.training.loop import describe_training

    names = [name for name, p in task.network.named_parameters() if p.requires_grad]
    submitted = read_tensors(folder / WEIGHTS, ADVICE, folder)
    with TensorFile(last, ADVICE, folder) as file:
        for name in names:
            key = f"averaged.{name}"
            if key not in file.entries or not torch.equal(file.read([key])[key], submitted[name]):
                raise InputError(f"its weights are not the EMA weights of its last checkpoint: {name} differs")
    for name, own in task.network.state_dict().items():
        if name not in names and not torch.allclose(own, submitted[name], rtol=CLAIMED, atol=CLAIMED):
            raise InputError(f"its weights have a {name} that no training gives it")
    progress = read_progress(last)
    if progress.step != settings.steps or progress.updates + progress.skipped != progress.step:
        raise InputError(
            f"its last checkpoint is of step {progress.step} after {progress.updates} updates, not a run's end"
        )
    card = read_json(folder / CONFIG, ADVICE, folder)
    claimed = card.get("training") or {}
    first = {name: p.detach().clone() for name, p in task.network.state_dict().items()}
    task.network.load_state_dict(submitted)
    task.network.eval()
    training = describe_training(settings, progress, task.network, claimed.get("processes", 1))
    with TemporaryDirectory(prefix="atoll-claims-") as place, torch.no_grad():
        task.finish(Path(place), {**training, "settings": {**asdict(settings), "model": settings.model}})
        made = read_json(Path(place) / CONFIG, ADVICE)
        for about in (card, made):
            about.pop("sha256", None)
        _require_equal(card, made, "")
        theirs, again = (read_tensors(where / CALIBRATION, ADVICE) for where in (folder, Path(place)))
    for name in again:
        if name not in theirs or theirs[name].shape != again[name].shape:
            raise InputError(f"{CALIBRATION} lacks {name}, or it has another shape than training gives it")
        off, length = float((theirs[name] - again[name]).norm()), float(again[name].norm())
        if not off <= CLAIMED * max(length, 1e-6):
            raise InputError(f"{CALIBRATION} has a {name} that is not what the slot's images and these weights give")
    task.network.load_state_dict(first)


def _require_equal(card: object, made: object, where: str) -> None:
    """Refuses a card that differs from the recomputed one; numbers may differ by rounding."""
    if isinstance(card, dict) and isinstance(made, dict):
        for key in sorted(card.keys() | made.keys(), key=str):
            _require_equal(card.get(key), made.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(card, list) and isinstance(made, list) and len(card) == len(made):
        for own, other in zip(card, made, strict=True):
            _require_equal(own, other, where)
    elif isinstance(made, float) and isinstance(card, int | float):
        if not math.isclose(card, made, rel_tol=CLAIMED, abs_tol=1e-6):
            raise InputError(f"its card claims {where} {card:.4g}, but it is {made:.4g}")
    elif card != made:
        raise InputError(f"its card claims {where} {printable(str(card), 60)}, but it is {printable(str(made), 60)}")


if __name__ == "__main__":
    main()
