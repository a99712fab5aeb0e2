"""The report of a demo: one HTML file with its images inside, which asks nothing of any network."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.experiments.cache import write_text

Picture = NDArray[np.uint8]  # [S, S, 3]
Points = Sequence[tuple[int, float]]

LARGE = 4  # pixels of the file for one of an image: browsers blur what they enlarge
HELDOUT_SHOWN = 24
KINDS = {"fm": "flow matching", "ddpm": "noise prediction (DDPM)"}
MODELS = {"ensemble": "ensemble", "homogeneous": "all FM", "monolith": "monolith", "real": "real"}


class Curve(NamedTuple):
    """An expert's loss: (step, loss)."""

    train: Points
    held_out: Points


class Labelled(NamedTuple):
    """What each made of a caption: expert_0 ..., ensemble, and the models to compare with."""

    caption: str
    pictures: Mapping[str, Picture]


class Traced(NamedTuple):
    """Who painted an image, from noise to data."""

    caption: str
    times: NDArray[np.float64]
    weights: NDArray[np.float64]  # [evaluations, experts]
    at: NDArray[np.float64]  # the times of the previews
    previews: NDArray[np.uint8]
    final: Picture


@dataclass(frozen=True, eq=False)
class Gallery:
    """All images of a report."""

    clusters: Sequence[NDArray[np.uint8]]  # some images of each
    curves: Sequence[Curve]
    chosen: Sequence[tuple[str, Picture, bool]]  # caption, image, whether every attribute is right
    heldout: Sequence[tuple[str, Picture, bool]]
    same: Sequence[Labelled]
    painted_by: Sequence[int]  # the expert that the router chose, for each of `same`
    traces: Sequence[Traced]


def _flops(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} M"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


TABLE: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("every attribute right", "prompt_accuracy", "{:.1%}".format),
    ("the same, unseen combinations", "prompt_accuracy_heldout", "{:.1%}".format),
    ("Frechet distance, less is better", "frechet", "{:.3f}".format),
    ("diversity, 1 is the data's", "diversity", "{:.2f}".format),
    ("parameters", "parameters", lambda value: f"{value / 1e6:.2f}M"),
    ("FLOPs of training", "training_flops", _flops),
    ("core time of training", "training_seconds", _time),
    ("FLOPs per image", "flops_an_image", _flops),
    ("seconds per image, one core", "seconds_an_image", "{:.3f}".format),
)
COMPARE_NOTE = (
    "<p class=note><code>atoll demo --compare</code> adds one model trained with as many FLOPs, and the same ensemble "
    "with flow matching alone.</p>"
)
COMPARE_MEANING = Template(
    "<dt>Monolith</dt><dd>The same network trained on all images with as many FLOPs as the experts and the router "
    "together. As in the papers, it takes as many steps as an expert does, and each of them on $batch images. The same "
    "FLOPs in more steps of fewer images, one after the other, make a better one at this scale: docs/LOG.md has its "
    "figures.</dd><dt>All FM</dt><dd>The same ensemble, but in place of the DDPM expert one that learned flow matching "
    "on the same images, for as many steps.</dd>"
)


def write_report(path: Path, results: Mapping[str, Any], gallery: Gallery) -> None:
    write_text(path, render(results, gallery))


def render(results: Mapping[str, Any], gallery: Gallery) -> str:
    """Returns the whole page. Its policy forbids what it does not need: scripts, and anything from elsewhere."""
    style, page = (files("atoll.experiments").joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "html"))
    num, experts, real = len(gallery.clusters), results["experts"], results["real"]
    heldout = gallery.heldout[:HELDOUT_SHOWN]
    models = {"ensemble": results, **results.get("compare", {}), "real": real}
    compare = results.get("compare")
    return Template(page).substitute(
        style=style,
        num=_word(num),
        num_capital=_word(num).capitalize(),
        kinds=_kinds([expert["objective"] for expert in experts]),
        chosen=_pictures(gallery.chosen),
        accuracy=f"{results['prompt_accuracy']:.1%}",
        accuracy_heldout=f"{results['prompt_accuracy_heldout']:.1%}",
        accuracy_real=f"{real['prompt_accuracy']:.1%}",
        num_prompts=results["num_prompts"],
        num_prompts_heldout=results["num_prompts_heldout"],
        frechet=f"{results['frechet']:.2f}",
        frechet_real=f"{real['frechet']:.2f}",
        time=_time(results["seconds"]),
        parameters=f"{results['parameters'] / 1e6:.1f}",
        ddpm_note=_ddpm_note({expert["objective"]: expert["steps"] for expert in experts}),
        experts="".join(
            _expert(*each) for each in zip(range(num), experts, gallery.clusters, gallery.curves, strict=True)
        ),
        num_heldout=len(heldout),
        heldout_note=_heldout_note(sum(not right for _, _, right in heldout)),
        heldout=_pictures(heldout),
        same="".join(_same(*each, num) for each in zip(gallery.same, gallery.painted_by, strict=True)),
        legend="".join(
            f'<li class="e{k}"><i class="dot"></i>expert {k}, {_kind(expert)}</li>' for k, expert in enumerate(experts)
        ),
        traces="".join(map(_trace, gallery.traces)),
        table_head="".join(f"<th{_ours(name)}>{MODELS[name]}</th>" for name in models),
        table_body="".join(_table_row(*row, models) for row in TABLE),
        compare_note="" if compare else COMPARE_NOTE,
        aims="".join(map(_aim, results["aims"])),
        compare_meaning=COMPARE_MEANING.substitute(batch=compare["monolith"]["batch"]) if compare else "",
        flag=" --compare" if compare else "",
        stages=" · ".join(f"{escape(name)} {seconds:.0f} s" for name, seconds in results["stages"].items()),
        commands="".join(f"<span>{escape(command)}</span>" for command in results["commands"]),
    )


# --- pieces of the page ----------------------------------------------------------------------------------------------


def _kind(expert: Mapping[str, Any]) -> str:
    return escape(KINDS.get(expert["objective"], expert["objective"]))


def _kinds(kinds: Sequence[str]) -> str:
    """Returns such as "one by noise prediction (DDPM) and three by flow matching"."""
    *others, last = (f"{_word(kinds.count(kind))} by {_kind({'objective': kind})}" for kind in sorted(set(kinds)))
    return f"{', '.join(others)} and {last}" if others else last


def _ddpm_note(steps: Mapping[str, int]) -> str:
    if not {"ddpm", "fm"} <= set(steps):
        return ""
    other = "" if steps["ddpm"] == steps["fm"] else f", and takes {steps['ddpm']:,} steps, not {steps['fm']:,}"
    return (
        " Every owner decides alone how to train: noise prediction is slow to learn the first strokes of an image, so "
        f"the DDPM expert has the smallest part and weighs its errors by min-SNR{other}."
    )


def _heldout_note(wrong: int) -> str:
    if not wrong:
        return "All of them are right."
    return f"{_word(wrong).capitalize()} of them {'is' if wrong == 1 else 'are'} wrong somewhere, and marked."


def _expert(k: int, expert: Mapping[str, Any], sheet: NDArray[np.uint8], curve: Curve) -> str:
    spent = _time(expert["training_seconds"])
    return f"""<div class="card e{k}">
<h3><i class="dot"></i>Expert {k} · {_kind(expert)}</h3>
<img src="{_uri(_sheet(sheet))}" alt="some of the images that expert {k} learned from">
<div class="note">{expert["pictures"]:,} images · {expert["steps"]:,} steps · {spent} of one core</div>
{_loss_chart(curve, k)}
</div>"""


def _same(labelled: Labelled, chosen: int, num: int) -> str:
    labels = {**{f"expert_{k}": f"expert {k}" for k in range(num)}, **MODELS}
    kinds = {f"expert_{k}": f"e{k} chosen" if k == chosen else f"e{k}" for k in range(num)}
    cells = (
        f'<figure class="{kinds.get(name, "")}"><img src="{_uri(_enlarged(labelled.pictures[name]))}" alt="{label}">'
        f"<figcaption>{label}</figcaption></figure>"
        for name, label in labels.items()
        if name in labelled.pictures
    )
    return f'<div class="same"><p>{escape(labelled.caption)}</p><div class="row">{"".join(cells)}</div></div>'


def _trace(trace: Traced) -> str:
    steps = [
        f'<figure><img src="{_uri(_enlarged(picture))}" alt="where it was heading at t = {t:.2f}"></figure>'
        for t, picture in zip(trace.at, trace.previews, strict=True)
    ]
    steps.append(f'<figure><img src="{_uri(_enlarged(trace.final))}" alt="the image"></figure>')
    return f"""<div class="trace">
<p>{escape(trace.caption) or "No words at all."}</p>
<div class="row">{"".join(steps)}</div>
<div class="band">{_areas(trace)}</div>
<div class="ends"><span>noise</span><span>image</span></div>
</div>"""


def _ours(name: str) -> str:
    return " class=ours" if name == "ensemble" else ""


def _table_row(label: str, key: str, show: Callable[[float], str], models: Mapping[str, Mapping[str, Any]]) -> str:
    cells = (f"<td{_ours(name)}>{show(model[key]) if key in model else '-'}</td>" for name, model in models.items())
    return f"<tr><th>{label}</th>{''.join(cells)}</tr>\n"


def _aim(aim: Mapping[str, Any]) -> str:
    kind, end = (
        ("", "") if aim["reached"] else (" class=missed", f", missed by {abs(aim['found'] - aim['wanted']):.3f}")
    )
    return f"<li{kind}>{escape(aim['what'])}: it is {aim['found']:.3f}{end}</li>"


def _loss_chart(curve: Curve, k: int) -> str:
    """The training loss as a line, the held-out loss as circles, over the steps; the height is logarithmic."""
    points = [*curve.train, *curve.held_out]
    if not points:
        return ""
    wide, high, left, top, bottom = 440, 130, 34, 8, 20
    last = max(step for step, _ in points)
    values = [math.log(max(loss, 1e-6)) for _, loss in points]
    low, span = min(values), max(max(values) - min(values), 1e-6)

    def place(step: int, loss: float) -> tuple[float, float]:
        x = left + (wide - left - 8) * step / last
        return x, top + (high - top - bottom) * (1 - (math.log(max(loss, 1e-6)) - low) / span)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve.train))
    circles = "".join(
        f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in (place(*p) for p in curve.held_out)
    )
    base = high - bottom
    label = f"loss of expert {k}, from {math.exp(low + span):.2f} to {math.exp(low):.2f}"
    return f"""<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{label}">
<path class="axis" d="M{left} {top}V{base}H{wide - 8}"/>
<text x="{left - 6}" y="{top + 8}" text-anchor="end">{math.exp(low + span):.2f}</text>
<text x="{left - 6}" y="{base}" text-anchor="end">{math.exp(low):.2f}</text>
<text x="{left}" y="{high - 4}">step 0</text>
<text x="{wide - 8}" y="{high - 4}" text-anchor="end">{last}</text>
<polyline class="curve" points="{line}"/>{circles}
</svg>"""


def _areas(trace: Traced) -> str:
    """The weights of the experts as areas on one another; the last stand until t = 0."""
    wide, high = 1000, 56
    tops = trace.weights.cumsum(1).clip(0, 1)
    xs = [0.0, *((1 - t) * wide for t in trace.times), float(wide)]
    heights = [tops[0], *tops, tops[-1]]
    areas = []
    for k in reversed(range(tops.shape[1])):
        line = " ".join(f"{x:.1f},{(1 - row[k]) * high:.1f}" for x, row in zip(xs, heights, strict=True))
        areas.append(f'<polygon class="area e{k}" points="0,{high} {line} {wide},{high}"/>')
    shares = ", ".join(f"expert {k} {share:.0%}" for k, share in enumerate(trace.weights.mean(0)) if share >= 0.005)
    return (
        f'<svg viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" aria-label="{shares}">'
        f"{''.join(areas)}</svg>"
    )


def _pictures(triples: Sequence[tuple[str, Picture, bool]]) -> str:
    return "\n".join(_picture(picture, caption, right) for caption, picture, right in triples)


def _picture(picture: Picture, caption: str, right: bool) -> str:
    mark = "" if right else "<b>not as asked:</b> "
    return (
        f'<figure{"" if right else " class=wrong"}><img src="{_uri(_enlarged(picture))}" alt="{escape(caption)}">'
        f"<figcaption>{mark}{escape(caption)}</figcaption></figure>"
    )


def _enlarged(picture: Picture) -> Image.Image:
    image = Image.fromarray(picture)
    return image.resize((image.width * LARGE, image.height * LARGE), Image.Resampling.NEAREST)


def _sheet(pictures: NDArray[np.uint8], columns: int = 10, gap: int = 2) -> Image.Image:
    """Pictures side by side, with nothing between them: what lies behind shines through."""
    num, size = len(pictures), pictures.shape[1]
    columns = min(columns, num)
    rows, step = math.ceil(num / columns), size + gap
    sheet = Image.new("RGBA", (columns * step - gap, rows * step - gap))
    for i, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (i % columns * step, i // columns * step))
    return sheet.resize((sheet.width * 3, sheet.height * 3), Image.Resampling.NEAREST)


def _uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# --- words -----------------------------------------------------------------------------------------------------------


def _word(num: int) -> str:
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[num] if num < len(words) else str(num)
