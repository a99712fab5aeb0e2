"""How a training run goes: what one can set by a recipe file or by flags."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from atoll.config import build
from atoll.errors import InputError, shown, unknown
from atoll.storage import read_bytes, reason_of, resolved

if TYPE_CHECKING:  # imported when they are needed: `atoll --help` must not wait for torch
    import torch

    from atoll.diffusion.objective import Objective

PRECISIONS = ("auto", "fp32", "bf16")
LR_SCHEDULES = ("constant", "cosine")
TEACHERS = ("label", "router", "top1", "top2")
PAPER_LR, PAPER_WIDTH = 1e-4, 1152
LEAST = dict.fromkeys(("steps", "batch", "threads", "log_every", "save_every", "eval_every", "keep_last"), 1)
LEAST |= {"micro_batch": 1, "keep_every": 1, "max_resident": 1, "sample_every": 0, "seed": 0, "warmup": 0}
LARGEST = 1e30  # of numbers that may be as large as one likes: whole numbers beyond 1e308 are no floats
MAX_RECIPE = 1 << 16  # bytes
RECIPES = Path(__file__).parents[1] / "recipes"
"""Where those that come with atoll are."""


@dataclass(frozen=True)
class Settings:
    """What every run has, be it an expert's, the monolith's or the router's."""

    model: str = "mini"
    """Size: xs, mini, s, b, l, xl or WIDTHxDEPTH, with /PATCH after it: xl/2 is the paper's."""
    steps: int = 5000
    """Updates of the weights."""
    batch: int = 64
    """Samples per update, over all processes and micro-batches."""
    micro_batch: int | None = None
    """Samples at a time on one device, whose gradients are added up; all of them by default."""
    lr: float | None = None
    """Learning rate; by default 1e-4 at the paper's width of 1152, and more for narrower models: 0.1152 / width."""
    lr_schedule: str = "constant"
    """constant, which more --steps extend later; or cosine down to 0, which ends where it was planned to."""
    warmup: int | None = None
    """Steps over which the learning rate rises; a twentieth of all, at most 1000, by default."""
    weight_decay: float = 0.0
    """Of AdamW, on all weights."""
    beta2: float = 0.99
    """Of AdamW."""
    clip: float = 1.0
    """Gradients longer than this are scaled down to it."""
    ema: float = 0.9999
    """How slowly the EMA weights follow; early on they follow faster."""
    text_dropout: float = 0.1
    """Share of captions replaced by the null text, for guidance."""
    checkpointing: bool = False
    """Keep no activations within blocks, and compute them again: less memory, a third more time."""
    precision: str = "auto"
    """fp32, bf16 (autocast), or auto: bf16 where the GPU has it."""
    compile: bool = False
    """Compile the blocks with torch.compile: pays on GPUs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int = 1
    """Of a CPU; more than one pays for models wider than about 512 on an idle machine."""
    seed: int = 0
    """Of weights, order, noise and dropout."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    save_every: int = 500
    """Steps between checkpoints to resume from."""
    eval_every: int = 500
    """Steps between measurements on held-out data."""
    sample_every: int = 1000
    """Steps between grids of samples; 0 for none."""
    keep_last: int = 2
    """Checkpoints to keep, counted from the last."""
    keep_every: int | None = None
    """Also keep the checkpoints of steps that this divides."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if (value := getattr(self, name, None)) is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} must be a whole number of at least {least}, but is {shown(value)}")
        for name, most in (("steps", 10**9), ("batch", 2**20), ("threads", 1024)):
            if getattr(self, name) > most:
                raise InputError(f"{name} must be at most {most}, but is {shown(getattr(self, name))}")
        for name, low, high in (("weight_decay", 0, 10), ("beta2", 0, 1), ("ema", 0, 1), ("text_dropout", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} must lie in [{low}, {high}], but is {shown(getattr(self, name))}")
        if self.beta2 == 1:
            raise InputError("beta2 must be below 1: 0.99 and 0.999 are usual")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < LARGEST:
                raise InputError(f"{name} must be above 0 and finite, but is {shown(value)}")
        if self.lr_schedule not in LR_SCHEDULES:
            raise unknown("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    def lr_at(self, step: int, width: int) -> float:
        """Returns the learning rate of the update after `step` of them."""
        peak = PAPER_LR * PAPER_WIDTH / width if self.lr is None else self.lr
        warmup = self.resolved_warmup
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        if self.lr_schedule == "constant":
            return peak
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    @property
    def resolved_warmup(self) -> int:
        return min(1000, self.steps // 20) if self.warmup is None else self.warmup

    def ema_at(self, step: int) -> float:
        """Returns the decay of the EMA at `step`: about the last tenth of the run, until that is longer than `ema`."""
        return min(self.ema, (1 + step) / (10 + step))

    @property
    def torch_device(self) -> "torch.device":
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise InputError(f"unknown device {self.device!r}: give auto, cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"device {self.device!r} is not one to train on: give auto, cpu, cuda or cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"there is no {self.device} here: use --device cpu, or auto")
        return device

    @property
    def uses_bf16(self) -> bool:
        import torch

        if self.precision == "auto":
            return self.torch_device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return self.precision == "bf16"


@dataclass(frozen=True)
class ExpertSettings(Settings):
    """An expert's run, or the monolith's."""

    objective: str = "fm"
    """fm, fm-logit-normal, ddpm, ddpm-min-snr (better in short runs), x0 or v."""
    schedule: str | None = None
    """Instead of the objective's own: linear, cosine, ddpm or ddpm-scaled."""
    weighting: str | None = None
    """Instead of the objective's own: plain or min-snr."""

    @property
    def resolved_objective(self) -> "Objective":
        from atoll.diffusion.objective import get_objective

        objective = get_objective(self.objective)
        changes = {name: value for name in ("schedule", "weighting") if (value := getattr(self, name)) is not None}
        return replace(objective, **changes)


@dataclass(frozen=True)
class RouterSettings(Settings):
    """The router's run."""

    text: bool = True
    """Whether the router sees the text; without, it is the paper's, which can only guess at high noise."""


@dataclass(frozen=True)
class DistillSettings(Settings):
    """A student's run: it learns flow matching, whatever its teachers have learned."""

    model: Annotated[str, tyro.conf.arg(name="student", aliases=("--model",))] = "mini"
    """Size: xs, mini, s, b, l, xl or WIDTHxDEPTH, with /PATCH after it: b/2 is a fifth of the paper's expert."""
    objective: str = "fm"
    """fm, or fm-logit-normal for more times in the middle."""
    teacher: str = "label"
    """Who teaches an image: the expert of its cluster (label), all by the router's weights (router), top1 or top2."""
    guidance: float = 1.0
    """The guidance to learn with the velocity, so that sampling needs one pass per step instead of two; 1 is none."""
    max_resident: int | None = None
    """How many experts of the teacher may be in memory at a time; all by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in ("fm", "fm-logit-normal"):
            raise unknown("objective of a student", self.objective, ("fm", "fm-logit-normal"))
        if self.teacher not in TEACHERS:
            raise unknown("teacher", self.teacher, TEACHERS)
        if not 0 < self.guidance < LARGEST:
            raise InputError(f"guidance must be above 0 and finite, but is {shown(self.guidance)}")

    @property
    def resolved_objective(self) -> "Objective":
        from atoll.diffusion.objective import get_objective

        return get_objective(self.objective)


MAY_CHANGE = frozenset(
    (
        *("steps", "device", "threads", "micro_batch", "checkpointing", "compile", "max_resident"),
        *("log_every", "save_every", "eval_every", "sample_every", "keep_last", "keep_every"),
    )
)
"""What may differ when a run is resumed, steps only at a constant rate; all else would make it another run.
Micro-batches round otherwise, no more."""

TABLES: dict[str, type[Settings]] = {"expert": ExpertSettings, "router": RouterSettings, "student": DistillSettings}
"""Of a recipe."""

OTHER_TABLES = ("study", "data")
"""Of a recipe too, for `atoll reproduce` alone."""

S = TypeVar("S", bound=Settings)


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with atoll."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(given: str | Path) -> Path:
    """Returns the file of a recipe: by the name of one that comes with atoll, or by its path."""
    names, path = recipe_names(), Path(given)
    if str(given) in names:
        return resolved(RECIPES / f"{given}.toml")
    if path.exists():
        return resolved(path)  # a link is followed, for the user has named it
    hint = f"did you mean {path.stem!r}? " if path.stem in names else ""
    raise InputError(
        f"there is no recipe {shown(str(given))}: {hint}give the path of a TOML file, or one of those that come with "
        f"atoll: {', '.join(names)}"
    )


def read_recipe(given: str | Path, cls: type[S]) -> S:
    """Returns the settings in a recipe: of its table [expert], [router] or [student], and the keys above, for all."""
    return read_settings(read_toml(given), cls, str(given))


def read_toml(given: str | Path) -> dict[str, Any]:
    path = find_recipe(given)
    try:
        return tomllib.loads(read_bytes(path, MAX_RECIPE).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the recipe {path} ({reason_of(error)}): give a TOML file") from error


def read_settings(content: Mapping[str, Any], cls: type[S], where: str) -> S:
    """Returns the settings in what a recipe holds; `where` names it in messages."""
    tables: dict[str, dict[str, Any]] = {name: content.get(name, {}) for name in TABLES}
    shared = {name: value for name, value in content.items() if name not in tables and name not in OTHER_TABLES}
    for name, known in TABLES.items():
        if not isinstance(tables[name], dict):
            raise InputError(f"{name} in {where} must be a table: write [{name}]")
        build(known, {**shared, **tables[name]}, f"[{name}] of {where}")  # a wrong key is found, whoever reads
    table = next(name for name, known in TABLES.items() if known is cls)
    return build(cls, {**shared, **tables[table]}, f"[{table}] of {where}")


def as_flags(settings: Settings, usual: Settings | None = None) -> list[str]:
    """Returns the settings as they are written on a command line, without those that are as in `usual`."""
    flags = []
    for f in fields(settings):
        value, name = getattr(settings, f.name), f.name.replace("_", "-")
        if usual is not None and value == getattr(usual, f.name):
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags


def refuse_another(folder: Path, before: object, now: Settings) -> None:
    """Refuses to resume a run in `folder` that was begun with settings which `now` would make another run of."""
    if not isinstance(before, Mapping):
        raise InputError(f"{folder} was begun with settings that cannot be read: choose another --out")
    for f in fields(now):
        old, new = before.get(f.name), getattr(now, f.name)
        if f.name in MAY_CHANGE or old == new:
            continue
        raise InputError(
            f"{folder} was begun with {f.name} {shown(old)}, not {shown(new)}: "
            "rerun the same command to resume, or choose another --out"
        )
    if now.lr_schedule != "constant" and before.get("steps") != now.steps:
        weights = "" if isinstance(now, RouterSettings) else f", with --init {folder} to begin from its weights"
        raise InputError(
            f"{folder} was begun with {shown(before.get('steps'))} steps of {now.lr_schedule} decay, whose rate at a "
            f"step depends on their number, so it cannot be resumed with {now.steps}: give the same --steps, or "
            f"another --out{weights}"
        )
