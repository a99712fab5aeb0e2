"""Settings of training runs, from recipe files and flags; the docstrings of the fields are the `--help` text."""

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
RECIPES = Path(__file__).parents[1] / "recipes"  # those that ship with atoll


@dataclass(frozen=True)
class Settings:
    """Settings that all runs share: an expert's, the monolith's, the router's and a student's."""

    model: str = "mini"
    """Size: xs, mini, s, b, l, xl, 3b or WIDTHxDEPTH, optionally followed by /PATCH (xl/2 is the paper's) and by any of
    :local (convolutions in the blocks, which help short runs on 8 x 8 tokens or more), :zero (AdaLN-Zero instead of
    AdaLN-Single), :norm (the norm of Eq. 17), :blind (no text) and, for a router, :mlp (an MLP head)."""
    steps: int = 5000
    """Number of weight updates."""
    batch: int = 64
    """Samples per update, in total over all processes and micro-batches."""
    micro_batch: int | None = None
    """Samples per forward and backward pass on one device, with gradient accumulation; by default its whole share of
    the batch."""
    lr: float | None = None
    """Peak learning rate; by default 0.1152 / width, which is 1e-4 at the paper's width of 1152."""
    lr_schedule: str = "constant"
    """constant, so that more --steps can extend the run later; or cosine decay to 0, whose --steps are final."""
    optimizer: str = "adamw"
    """adamw, or muon: Muon for the matrices within blocks, AdamW for all other weights. Muon learns more per step, but
    a step takes 20 to 50% longer."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon, for any width; warmup and decay are the same as for --lr."""
    warmup: int | None = None
    """Steps of linear warmup; by default a twentieth of all steps, at most 1000."""
    weight_decay: float = 0.0
    """Weight decay of AdamW, applied to all its weights."""
    beta2: float = 0.99
    """AdamW's beta2, the decay rate of the second moment."""
    clip: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    ema: float = 0.9999
    """Decay rate of the EMA weights; lower in the first steps."""
    text_dropout: float = 0.1
    """Fraction of captions replaced by the null text, for classifier-free guidance."""
    checkpointing: bool = False
    """Recompute the activations within blocks instead of storing them: less memory, a third more time."""
    shard: bool = False
    """Shard weights, gradients and moments over the processes (FSDP2), for models too large for one GPU."""
    precision: str = "auto"
    """fp32, bf16 (autocast), or auto: bf16 on GPUs that support it, otherwise fp32."""
    compile: bool = False
    """Compile the network with torch.compile, which pays off on GPUs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int = 1
    """CPU threads; more than one pays off for models wider than about 512 on an idle machine."""
    seed: int = 0
    """Seed of initial weights, data order, noise and dropout."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    save_every: int = 500
    """Steps between checkpoints."""
    eval_every: int = 500
    """Steps between evaluations on held-out data."""
    sample_every: int = 1000
    """Steps between sample grids; 0 for none."""
    keep_last: int = 2
    """Number of latest checkpoints to keep."""
    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this."""

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
        """Returns the learning rate of the update that follows `step` updates."""
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
        """Returns all intervals, in steps, at which something is due."""
        every = (self.log_every, self.save_every, self.eval_every, self.sample_every)
        return [steps for steps in every if steps]

    def ema_at(self, step: int) -> float:
        """Returns the EMA decay at `step`: it averages over about the last tenth of the run until `ema` is reached."""
        return min(self.ema, (1 + step) / (10 + step))

    @property
    def resolved_objective(self) -> "Objective":
        """Returns the objective of an expert or a student; for a router, flow matching, whose times it draws."""
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
    """Settings of an expert's run, or the monolith's."""

    objective: str = "fm"
    """fm, fm-logit-normal (samples t near the middle more often), fm-high-noise (for photographs), ddpm, ddpm-min-snr
    (better in short runs), x0 or v."""
    schedule: str | None = None
    """Overrides the objective's noise schedule: linear, cosine, ddpm, ddpm-scaled or ddpm-cosine."""
    weighting: str | None = None
    """Overrides the objective's loss weighting: plain or min-snr."""


@dataclass(frozen=True)
class RouterSettings(Settings):
    """Settings of the router's run."""

    text: bool = True
    """Condition the router on the text. Without it, as in the paper, the router can only guess at high noise."""


@dataclass(frozen=True)
class DistillSettings(Settings):
    """Settings of a student's run: it learns flow matching, whatever the objectives of its teachers."""

    model: Annotated[str, tyro.conf.arg(name="student", aliases=("--model",))] = "mini"
    """Size: xs, mini, s, b, l, xl, 3b or WIDTHxDEPTH, optionally followed by /PATCH: b/2 is a fifth of the paper's
    expert."""
    objective: str = "fm"
    """fm, or fm-logit-normal, which samples t near the middle more often."""
    teacher: str | None = None
    """Which experts teach an image: that of its cluster (label), all with the router's weights (router), top1 or top2.
    By default label; with --steps-out top1, as in sampling, unless --cluster is given."""
    guidance: float | None = None
    """Guidance scale to distil into the student, so that sampling needs one pass per step instead of two; 1 is none.
    By default 1; with --steps-out 2, as in sampling."""
    steps_out: int | None = None
    """Train a student that samples in exactly this many steps, from 1 to 16 (usually 4, 2 or 1). By default the student
    samples in any number."""
    teacher_steps: int = 20
    """With --steps-out: sampling steps of the teacher."""
    trajectories: int = 4096
    """With --steps-out: number of trajectories that the teacher samples; the student trains on them repeatedly."""
    max_resident: int | None = None
    """Maximum number of the teacher's experts in memory at once; all by default."""

    choices: ClassVar = {
        **Settings.choices,
        "objective": ("fm", "fm-logit-normal"),
        "teacher": ("label", "router", "top1", "top2"),
    }


MAY_CHANGE = (
    *("steps", "device", "threads", "micro_batch", "checkpointing", "shard", "compile", "max_resident"),
    *("log_every", "save_every", "eval_every", "sample_every", "keep_last", "keep_every"),
)
"""Settings that may change when a run is resumed (steps only with a constant learning rate); any other change would
make it a different run. Other micro-batches or numbers of processes change results only by rounding."""

# Tables of a recipe; OTHER_TABLES are for `atoll reproduce` alone.
TABLES: dict[str, type[Settings]] = {"expert": ExpertSettings, "router": RouterSettings, "student": DistillSettings}
PREPARE, OTHER_TABLES = "prepare", ("study", "data", "pretrain")
S = TypeVar("S", bound=Settings | PrepareSettings)


def recipe_names() -> list[str]:
    """Returns the names of the recipes that ship with atoll."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(given: str | Path, cls: type[S]) -> S:
    """Returns a recipe's settings: from [prepare], or from the top-level keys and [expert], [router] or [student]."""
    return read_settings(read_toml(given), cls, str(given))


def read_toml(given: str | Path) -> dict[str, Any]:
    """Returns the parsed content of a recipe: one that ships with atoll, by name, or any other by path."""
    names = recipe_names()
    path = RECIPES / f"{given}.toml" if str(given) in names else Path(given)
    if not path.exists():
        raise unknown("recipe", given, [*names, "the path of a TOML file"])
    try:
        content = read_bytes(resolved(path), MAX_RECIPE)  # follows a link, since the user named it
        return tomllib.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the recipe {path} ({reason_of(error)}): give a TOML file") from error


def read_settings(content: Mapping[str, Any], cls: type[S], where: str) -> S:
    """Returns the settings in a parsed recipe, whose tables are all validated; `where` names it in messages."""
    shared = {name: value for name, value in content.items() if name not in (*TABLES, PREPARE, *OTHER_TABLES)}
    settings: dict[type, object] = {}
    for name, kind in {**TABLES, PREPARE: PrepareSettings}.items():
        table = content.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{name} in {where} must be a table: write [{name}]")
        settings[kind] = build(kind, table if name == PREPARE else {**shared, **table}, f"[{name}] of {where}")
    return cast(S, settings[cls])


def as_flags(settings: "Settings | Sampling", usual: "Settings | Sampling | None" = None) -> list[str]:
    """Returns the settings as command-line flags, without those equal to `usual`."""
    flags = []
    for name, value in asdict(settings).items():
        if value is not None and (usual is None or value != getattr(usual, name)):
            flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
            flags += [flag] if isinstance(value, bool) else [flag, str(value)]
    return flags


def refuse_another(folder: Path, before: object, now: Settings) -> None:
    """Raises an InputError if the run in `folder` was started with settings that `now` must not change."""
    if not isinstance(before, Mapping):
        raise InputError(f"{folder} was begun with settings that cannot be read: choose another --out")
    for f in fields(now):
        old, new = before.get(f.name, f.default), getattr(now, f.name)  # runs older than a setting used its default
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
