"""Draw the pictures of the docs, and print the figures that stand in them: `make figures`."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import matplotlib as mpl
import torch
from PIL import Image
from torch import Tensor

from atoll.data.builtin import make
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.diffusion.objective import Objective
from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.prediction import Prediction, x0_weight
from atoll.diffusion.schedules import LINEAR, SCHEDULES
from atoll.diffusion.solvers import EVALUATIONS, SOLVERS, Step, euler, uniform_times
from atoll.diffusion.transfer import Conversion, Safeguards, Transfer
from atoll.partition.partition import partition

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "figures"
COLOURS = ["#0f7173", "#e4572e", "#f0b429", "#5b4b9a"]
INK, GRID = "#22313f", "#d9dee3"
mpl.rcParams.update(
    {
        "font.size": 10, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6,
        "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white", "savefig.dpi": 160,
        "axes.titlesize": 11, "axes.titleweight": "bold", "legend.frameon": False,
    }
)  # fmt: skip

KINDS = [
    (Prediction.VELOCITY, "linear"),
    (Prediction.EPS, "cosine"),
    (Prediction.X0, "ddpm"),
    (Prediction.V, "ddpm-scaled"),
]
CONVERSIONS = {
    "exact": (Conversion.EXACT, Safeguards()),
    "the paper's Eq. 8": (Conversion.PAPER, Safeguards(equation=8)),
    "the paper's Eq. 7": (Conversion.PAPER, Safeguards(equation=7)),
}


def transfers_of(label: str) -> list[Transfer]:
    conversion, safeguards = CONVERSIONS[label]
    everywhere = (-math.inf, math.inf)  # perfect experts know the noise levels outside a table, too
    return [
        Transfer(kind, SCHEDULES[name], conversion, safeguards=safeguards, log_snr_range=everywhere)
        for kind, name in KINDS
    ]


def nearest_distance(x: Tensor, data: Tensor) -> float:
    """Root mean square distance from each sample to the nearest of many data points."""
    return float(torch.cdist(x, data).min(1).values.square().mean().sqrt())


def draw_islands() -> None:
    """Paths from noise to data: perfect experts of four kinds, each on its own island."""
    data = ClusteredGaussians.islands()
    g = torch.Generator().manual_seed(3)
    land, _ = data.sample(6000, g)
    noise = torch.randn(1500, 2, generator=g, dtype=torch.float64)
    columns = {
        "four velocity experts": [Transfer(Prediction.VELOCITY, LINEAR)] * 4,
        "four kinds of expert, exact": transfers_of("exact"),
        "the same, the paper's Eq. 8": transfers_of("the paper's Eq. 8"),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 5.1), sharex=True, sharey=True)
    names = [f"{kind.value} on {name}" for kind, name in KINDS]
    reference = None
    for axis, (title, transfers) in zip(axes, columns.items(), strict=True):
        points = paths(data, transfers, noise)
        owner = data.posterior(points[-1], LINEAR(torch.tensor(0.02, dtype=torch.float64))).argmax(1)
        axis.scatter(*land.T, s=5, color="#e9e4d8", zorder=0, linewidths=0)
        for k, colour in enumerate(COLOURS):
            mine = points[:, owner == k]
            axis.plot(mine[:, :70, 0], mine[:, :70, 1], color=colour, linewidth=0.5, alpha=0.35, zorder=1)
            axis.scatter(*mine[-1].T, s=5, color=colour, zorder=2, linewidths=0, label=names[k])
        axis.set(title=title, xlim=(-2.7, 2.7), ylim=(-2.7, 2.7), aspect="equal", xticks=[], yticks=[])
        axis.grid(visible=False)
        for spine in axis.spines.values():
            spine.set_visible(False)
        reference = points if reference is None else reference
        apart, off = float((points - reference).norm(dim=2).max()), nearest_distance(points[-1], land)
        note = f"samples {off:.3f} from the data"
        if points is not reference:
            note += f", paths {apart:.0e} apart" if apart < 1e-3 else f", paths up to {apart:.1f} apart"
        axis.text(0.5, 0, note, ha="center", va="top", fontsize=8.5, transform=axis.transAxes)
        print(f"islands, {title}: {note}")
    handles, labels = axes[1].get_legend_handles_labels()
    title = "middle and right: what each island's expert predicts, and on which schedule"
    figure.legend(handles, labels, loc="lower center", ncols=4, markerscale=4, title=title)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.94, bottom=0.2, wspace=0.02)
    save(figure, "islands")


def paths(data: ClusteredGaussians, transfers: list[Transfer], noise: Tensor) -> Tensor:
    """Where each sample is after each of 50 Euler steps: [51, num, 2]."""
    points = [noise]

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return data.ensemble_velocity(transfers, x, t)

    def keep(step: Step) -> None:
        points.append(step.x)

    euler(velocity, noise, uniform_times(50), keep)
    return torch.stack(points)


def draw_conversion_error() -> None:
    """Relative error of the mixed velocity over time, for two dimensions of the data."""
    times = torch.cat(
        [torch.tensor([0.001, 0.003]), torch.linspace(0.01, 0.99, 99), torch.tensor([0.997, 0.999])]
    ).double()
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.7), sharey=True)
    for axis, dim in zip(axes, (2, 64), strict=True):
        data = ClusteredGaussians.random(4, 3, dim)
        for (label, _), colour in zip(CONVERSIONS.items(), COLOURS, strict=False):
            middle, worst = [], []
            for t in times:
                g = torch.Generator().manual_seed(7)
                x0, _ = data.sample(256, g)
                x = (1 - t) * x0 + t * torch.randn(x0.shape, generator=g, dtype=torch.float64)
                true = data.velocity(x, t)
                error = (data.ensemble_velocity(transfers_of(label), x, t) - true).norm(dim=1) / true.norm(dim=1)
                middle.append(float(error.median()))
                worst.append(float(error.max()))
            axis.semilogy(times, middle, color=colour, label=label, linewidth=2)
            axis.fill_between(times, middle, worst, color=colour, alpha=0.15, linewidth=0)
            print(f"conversion, {dim} dimensions, {label}: median {median(middle):.1e}, worst {max(worst):.1e}")
        axis.set(title=f"{dim} dimensions", xlabel="t (0 data, 1 noise)", ylim=(1e-17, 1e3), xlim=(0, 1))
    axes[0].set_ylabel("relative error of the velocity\n(line: median, shade: up to the worst)")
    axes[1].legend(loc="center right")
    figure.tight_layout()
    save(figure, "conversion_error")


def draw_weights() -> None:
    """Proposition 1: what weight each prediction puts on the error of x0, and how often each noise level is seen."""
    t = torch.linspace(0.01, 0.99, 400, dtype=torch.float64)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7))
    for axis, name in zip(axes, ("cosine", "linear"), strict=False):
        at = SCHEDULES[name](t)
        for kind, colour in zip(Prediction, COLOURS, strict=True):
            if name == "linear" or kind is not Prediction.VELOCITY:
                axis.semilogy(t, x0_weight(kind, at), color=colour, label=kind.value, linewidth=2)
        capped = Objective(Prediction.EPS, name, weighting="min-snr").weight(t) * x0_weight(Prediction.EPS, at)
        axis.semilogy(t, capped, color=INK, linestyle=":", label="any, min-SNR 5", linewidth=1.5)
        axis.set(title=f"{name} schedule", xlabel="t (0 data, 1 noise)", ylim=(1e-4, 1e4), xlim=(0, 1))
        axis.legend()
    axes[0].set_ylabel("weight of |x0 error|²")
    log_snr = torch.linspace(-12, 12, 400, dtype=torch.float64)
    experts = {
        "DDPM (noise, cosine)": Objective(Prediction.EPS, "cosine"),
        "flow matching (velocity, linear)": Objective(Prediction.VELOCITY, "linear"),
    }
    for (label, objective), colour in zip(experts.items(), (COLOURS[0], COLOURS[3]), strict=True):
        at_t = objective.path.time_of(log_snr)
        density = -torch.gradient(at_t, spacing=(log_snr,))[0]  # how much training time falls on each level
        weight = density * x0_weight(objective.prediction, objective.path(at_t))
        axes[2].semilogy(log_snr, weight, color=colour, label=label, linewidth=2)
    axes[2].set(title="the paper's two kinds of expert", xlabel="log-SNR (noise to the left)", ylim=(1e-4, 1e4))
    axes[2].set_ylabel("weight times share of training")
    axes[2].legend()
    figure.tight_layout()
    save(figure, "weights")


def draw_solvers() -> None:
    """Error of every solver against the number of evaluations, on a mixture in 64 dimensions."""
    data = ClusteredGaussians.random(4, 3, 64)
    noise = torch.randn(256, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reference = SOLVERS["midpoint"](data.velocity, noise, uniform_times(2000), None)
    figure, axis = plt.subplots(figsize=(5.6, 3.9))
    budgets = [8, 16, 32, 64, 128, 256]
    for (name, solve), colour, marker in zip(SOLVERS.items(), [*COLOURS, "#8a8f98"], "osd^v", strict=True):
        errors = []
        for budget in budgets:
            found = solve(data.velocity, noise, uniform_times(budget // EVALUATIONS[name]), None)
            errors.append(float((found - reference).norm(dim=1).median()) / math.sqrt(64))
        axis.loglog(budgets, errors, color=colour, marker=marker, markersize=4, label=name, linewidth=1.8)
        print(f"solvers, {name}: error at {budgets[2]} evaluations {errors[2]:.1e}")
    axis.set(xlabel="evaluations of the velocity", ylabel="error of the sample (median, rms)")
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.minorticks_off()
    axis.legend()
    figure.tight_layout()
    save(figure, "solvers")


def draw_avatars() -> None:
    """The built-in data set, and the clusters that `atoll partition` makes of it."""
    columns, rows, scale = 16, 5, 3
    avatars = make("avatars", columns * rows, 32, 1)
    sheet = Image.new("RGB", (columns * 32, rows * 32))
    for i in range(len(avatars)):
        sheet.paste(avatars[i].image, (i % columns * 32, i // columns * 32))
    sheet.resize((scale * sheet.width, scale * sheet.height), Image.Resampling.NEAREST).save(FOLDER / "avatars.png")
    with TemporaryDirectory() as folder:
        prepare(Source("avatars", num=4000), folder, PrepareSettings(), num_workers=0, progress=False)
        for line in partition(folder, 4, progress=False)[1:6]:
            print(line.replace(folder, "avatars"))
        Image.open(Path(folder) / "clusters" / "map.png").save(FOLDER / "clusters.png")


def draw_federation() -> None:
    """Who writes what into the store, and who reads it."""
    figure, axis = plt.subplots(figsize=(9.6, 5.0))
    axis.set(xlim=(0, 96), ylim=(0, 50))
    axis.axis("off")

    def box(x: float, y: float, wide: float, high: float, title: str, lines: str, colour: str) -> None:
        patch = mpl.patches.FancyBboxPatch(
            (x, y),
            wide,
            high,
            boxstyle="round,pad=0,rounding_size=1.2",
            facecolor="white",
            edgecolor=colour,
            linewidth=1.8,
        )
        axis.add_patch(patch)
        axis.text(x + 1.4, y + high - 1.4, title, va="top", fontsize=10, fontweight="bold", color=colour)
        axis.text(x + 1.4, y + high - 4.4, lines, va="top", fontsize=8, linespacing=1.5, color=INK)

    def arrow(
        start: tuple[float, float], end: tuple[float, float], label: str, colour: str, shift: float = 0.9
    ) -> None:
        axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + shift
        axis.text(*middle, label, ha="center", va="bottom", fontsize=7.6, color=INK, bbox=behind)

    teal, orange, _, violet = COLOURS
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
    axis.add_patch(
        mpl.patches.FancyBboxPatch(
            (36, 2),
            24,
            46,
            boxstyle="round,pad=0,rounding_size=1.6",
            facecolor="#f4f6f7",
            edgecolor=GRID,
            linewidth=1.4,
        )
    )
    axis.text(48, 46.4, "object store", ha="center", va="top", fontsize=10, fontweight="bold")
    axis.text(48, 43.6, "trusted with nothing", ha="center", va="top", fontsize=8, color="#5c6a77")
    box(38, 31.5, 20, 9, "charter and slots", "frozen encoders, images\nof each slot, gate, roles", teal)
    box(38, 20.5, 20, 9, "leases, submissions", "weights, card, checkpoints;\nnamed by content, signed", orange)
    box(38, 12, 20, 6.5, "verdicts", "signed, with figures", violet)
    box(38, 3.5, 20, 6.5, "accepted experts", "signed by enough verifiers", violet)
    box(2, 33, 21, 10, "founders", "write and sign the charter,\nname verifiers", teal)
    box(
        2,
        19,
        21,
        11,
        "contributors",
        "lease a slot, train alone,\nkeep a heartbeat, submit;\nown images stay at home",
        orange,
    )
    box(
        73,
        17,
        21,
        15,
        "verifiers",
        "static: files, card, sizes\nquality: held-out error\n   at each noise level\nreplay: redo some steps",
        violet,
    )
    box(73, 3.5, 21, 7.5, "anyone", 'atoll sample URL "a prompt"', "#5c6a77")
    arrow((23, 38), (38, 36.5), "root key", teal)
    arrow((38, 32.5), (23, 28.5), "one slot's images", teal, 1.8)
    arrow((23, 23), (38, 24.5), "expert", orange, -3.0)
    arrow((58, 25), (73, 26.5), "pending", orange)
    arrow((73, 20.5), (58, 15.5), "verdict", violet, 0.8)
    arrow((73, 18.0), (58, 8.0), "signatures", violet, -1.0)
    arrow((58, 5.4), (73, 5.4), "verified by TUF", "#5c6a77", -2.6)
    figure.tight_layout()
    save(figure, "federation")


def save(figure: Figure, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    # No dates or versions inside: the same picture is the same file.
    figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_islands()
    draw_conversion_error()
    draw_weights()
    draw_solvers()
    draw_avatars()
    draw_federation()
