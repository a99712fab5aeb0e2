"""How a training run goes: what one can set by a recipe file or by flags."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast

import tyro

from atoll.config import build, check_choices
from atoll.data.settings import PrepareSettings
from atoll.errors import InputError, shown, unknown
from atoll.storage import read_bytes, reason_of, resolved

if TYPE_CHECKING:  # imported when they are needed: `atoll --help` must not wait for torch
    import torch

    from atoll.diffusion.objective import Objective
    from atoll.sampling.settings import Sampling

PAPER_LR, PAPER_WIDTH = 1e-4, 1152
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("steps", "log_every", "save_every", "eval_every", "keep_last", "keep_every"), (1, 10**9)),
    **dict.fromkeys(("batch", "micro_batch", "max_resident"), (1, 2**20)),
    **dict.fromkeys(("sample_every", "warmup"), (0, 10**9)),
    **{"steps_out": (1, 16), "teacher_steps": (1, 1000), "trajectories": (1, 10**8)},
    **dict.fromkeys(("lr", "muon_lr", "clip", "guidance"), (1e-12, 1e12)),
    **dict.fromkeys(("ema", "text_dropout"), (0, 1)),
    **{"beta2": (0, 0.999999), "weight_decay": (0, 10), "threads": (1, 1024), "seed": (0, 2**63)},
}
MAX_RECIPE = 1 << 16  # bytes
RECIPES = Path(__file__).parents[1] / "recipes"  # those that come with atoll


@dataclass(frozen=True)
class Settings:
    """What every run has, be it an expert's, the monolith's or the router's."""

    model: str = "mini"
    """Size: xs, mini, s, b, l, xl, 3b or WIDTHxDEPTH, with /PATCH after it: xl/2 is the paper's. Options may follow:
    :local (convolutions in blocks, which help in short runs on 8 x 8 tokens and more), :zero (AdaLN-Zero in place of
    AdaLN-Single), :norm (the norm of Eq. 17), :blind (no text), and for a router :mlp (its head)."""
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
    optimizer: str = "adamw"
    """adamw, or muon for the matrices within blocks and AdamW for all else: learns more per step, and a step takes a
    fifth to a half longer."""
    muon_lr: float = 0.02
    """Learning rate of Muon, at any width; it rises and falls with the other."""
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
    shard: bool = False
    """Share out weights, gradients and moments to the processes (FSDP2), for models that do not fit one GPU."""
    precision: str = "auto"
    """fp32, bf16 (autocast), or auto: bf16 where the GPU has it."""
    compile: bool = False
    """Compile the network with torch.compile: pays on GPUs."""
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

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "optimizer": ("adamw", "muon"),
        "lr_schedule": ("constant", "cosine"),
        "precision": ("auto", "fp32", "bf16"),
    }

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name, None)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name} must be from {low:g} to {high:g}, but is {shown(value)}")
        check_choices(self, **self.choices)
        if self.shard and (self.compile or self.optimizer == "muon"):
            raise InputError("--shard is for AdamW without torch.compile: leave --compile and --optimizer muon out")

    def lr_at(self, step: int, width: int) -> float:
        """Returns the learning rate of the update after `step` of them."""
        peak, warmup = self.peak_lr(width), self.resolved_warmup
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        if self.lr_schedule == "constant":
            return peak
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def peak_lr(self, width: int) -> float:
        return PAPER_LR * PAPER_WIDTH / width if self.lr is None else self.lr

    @property
    def resolved_warmup(self) -> int:
        return min(1000, self.steps // 20) if self.warmup is None else self.warmup

    @property
    def intervals(self) -> list[int]:
        """Returns the steps between what is due from time to time."""
        every = (self.log_every, self.save_every, self.eval_every, self.sample_every)
        return [steps for steps in every if steps]

    def ema_at(self, step: int) -> float:
        """Returns the decay of the EMA at `step`: about the last tenth of the run, until that is longer than `ema`."""
        return min(self.ema, (1 + step) / (10 + step))

    @property
    def resolved_objective(self) -> "Objective":
        """Returns what an expert or a student learns; the router's times are drawn as those of flow matching."""
        from atoll.diffusion.objective import get_objective

        changes = {
            name: value for name in ("schedule", "weighting") if (value := getattr(self, name, None)) is not None
        }
        return replace(get_objective(getattr(self, "objective", "fm")), **changes)

    @property
    def torch_device(self) -> "torch.device":
        from atoll.tensors import get_device

        return get_device(self.device)

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
    """fm, fm-logit-normal (more times in the middle), fm-high-noise (for photographs), ddpm, ddpm-min-snr (better in
    short runs), x0 or v."""
    schedule: str | None = None
    """Instead of the objective's own: linear, cosine, ddpm, ddpm-scaled or ddpm-cosine."""
    weighting: str | None = None
    """Instead of the objective's own: plain or min-snr."""


@dataclass(frozen=True)
class RouterSettings(Settings):
    """The router's run."""

    text: bool = True
    """Whether the router sees the text; without, it is the paper's, which can only guess at high noise."""


@dataclass(frozen=True)
class DistillSettings(Settings):
    """A student's run: it learns flow matching, whatever its teachers have learned."""

    model: Annotated[str, tyro.conf.arg(name="student", aliases=("--model",))] = "mini"
    """Size: xs, mini, s, b, l, xl, 3b or WIDTHxDEPTH, with /PATCH after it: b/2 is a fifth of the paper's expert."""
    objective: str = "fm"
    """fm, or fm-logit-normal for more times in the middle."""
    teacher: str | None = None
    """Who teaches an image: the expert of its cluster (label), all by the router's weights (router), top1 or top2. By
    default label; with --steps-out top1, as one samples, but for a --cluster."""
    guidance: float | None = None
    """The guidance to learn with the velocity, so that sampling needs one pass per step instead of two; 1 is none. By
    default 1; with --steps-out 2, as one samples."""
    steps_out: int | None = None
    """Teach to make an image in this many steps, from 1 to 16: 4, 2 or 1 are usual. In any number by default."""
    teacher_steps: int = 20
    """With --steps-out: the steps in which the teacher makes an image."""
    trajectories: int = 4096
    """With --steps-out: how many images the teacher makes, from which the student learns again and again."""
    max_resident: int | None = None
    """How many experts of the teacher may be in memory at a time; all by default."""

    choices: ClassVar = {
        **Settings.choices,
        "objective": ("fm", "fm-logit-normal"),
        "teacher": ("label", "router", "top1", "top2"),
    }


MAY_CHANGE = (
    *("steps", "device", "threads", "micro_batch", "checkpointing", "shard", "compile", "max_resident"),
    *("log_every", "save_every", "eval_every", "sample_every", "keep_last", "keep_every"),
)
"""What may differ when a run is resumed, steps only at a constant rate; all else would make it another run.
Micro-batches and processes round otherwise, no more."""

# Of a recipe; the others are for `atoll reproduce` alone.
TABLES: dict[str, type[Settings]] = {"expert": ExpertSettings, "router": RouterSettings, "student": DistillSettings}
PREPARE, OTHER_TABLES = "prepare", ("study", "data", "pretrain")
S = TypeVar("S", bound=Settings | PrepareSettings)


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with atoll."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(given: str | Path, cls: type[S]) -> S:
    """Returns the settings in a recipe: of [prepare], or of [expert], [router] or [student] and the keys above them."""
    return read_settings(read_toml(given), cls, str(given))


def read_toml(given: str | Path) -> dict[str, Any]:
    """Returns what a recipe holds: one that comes with atoll, by its name, or any other by its path."""
    names = recipe_names()
    path = RECIPES / f"{given}.toml" if str(given) in names else Path(given)
    if not path.exists():
        raise unknown("recipe", given, [*names, "the path of a TOML file"])
    try:
        content = read_bytes(resolved(path), MAX_RECIPE)  # a link is followed, for the user has named it
        return tomllib.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the recipe {path} ({reason_of(error)}): give a TOML file") from error


def read_settings(content: Mapping[str, Any], cls: type[S], where: str) -> S:
    """Returns the settings in what a recipe holds; `where` names it in messages. All its tables are checked."""
    shared = {name: value for name, value in content.items() if name not in (*TABLES, PREPARE, *OTHER_TABLES)}
    settings: dict[type, object] = {}
    for name, kind in {**TABLES, PREPARE: PrepareSettings}.items():
        table = content.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{name} in {where} must be a table: write [{name}]")
        settings[kind] = build(kind, table if name == PREPARE else {**shared, **table}, f"[{name}] of {where}")
    return cast(S, settings[cls])


def as_flags(settings: "Settings | Sampling", usual: "Settings | Sampling | None" = None) -> list[str]:
    """Returns the settings as they are written on a command line, without those that are as in `usual`."""
    flags = []
    for name, value in asdict(settings).items():
        if value is not None and (usual is None or value != getattr(usual, name)):
            flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
            flags += [flag] if isinstance(value, bool) else [flag, str(value)]
    return flags


def refuse_another(folder: Path, before: object, now: Settings) -> None:
    """Refuses to resume a run in `folder` that was begun with settings which `now` would make another run of."""
    if not isinstance(before, Mapping):
        raise InputError(f"{folder} was begun with settings that cannot be read: choose another --out")
    for f in fields(now):
        old, new = before.get(f.name, f.default), getattr(now, f.name)  # a run of before there was a choice took it
        if f.name not in MAY_CHANGE and old != new:
            raise InputError(
                f"{folder} was begun with {f.name} {shown(old)}, not {shown(new)}: "
                "rerun the same command to resume, or choose another --out"
            )
    if now.lr_schedule != "constant" and before.get("steps") != now.steps:
        raise InputError(
            f"{folder} was begun with {shown(before.get('steps'))} steps of {now.lr_schedule} decay, so it cannot be "
            f"resumed with {now.steps}: give the same --steps, or another --out"
        )
