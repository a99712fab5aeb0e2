"""The report of a demo: one HTML file with its pictures inside, which asks nothing of any network."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.storage import write_whole

Picture = NDArray[np.uint8]  # [S, S, 3]
Points = Sequence[tuple[int, float]]

LARGE = 4  # pixels of the file for one of a picture: browsers blur what they enlarge
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
    """Who painted a picture, from noise to data."""

    caption: str
    times: NDArray[np.float64]
    weights: NDArray[np.float64]  # [evaluations, experts]
    at: NDArray[np.float64]  # the times of the previews
    previews: NDArray[np.uint8]
    final: Picture


@dataclass(frozen=True, eq=False)
class Gallery:
    """All pictures of a report."""

    clusters: Sequence[NDArray[np.uint8]]  # some pictures of each
    curves: Sequence[Curve]
    chosen: Sequence[tuple[str, Picture, bool]]  # caption, picture, whether every attribute is right
    heldout: Sequence[tuple[str, Picture, bool]]
    same: Sequence[Labelled]
    painted_by: Sequence[int]  # the expert that the router chose, for each of `same`
    traces: Sequence[Traced]


def write_report(path: Path, results: Mapping[str, Any], gallery: Gallery) -> None:
    content = render(results, gallery)
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8"))


def render(results: Mapping[str, Any], gallery: Gallery) -> str:
    """The whole page. Its policy forbids what it does not need: scripts, and anything from elsewhere."""
    style = files("atoll.experiments").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(
        (
            _opening(results, gallery),
            _experts(results, gallery),
            _heldout(results, gallery),
            _same(results, gallery),
            _traces(results, gallery),
            _table(results),
            _meaning(results),
            _repeat(results),
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Atoll: {len(gallery.clusters)} experts, one model</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
<footer>Made by <code>atoll demo</code>. This file needs no network, and no other file.</footer>
</main>
</body>
</html>
"""


# --- sections --------------------------------------------------------------------------------------------------------


def _opening(results: Mapping[str, Any], gallery: Gallery) -> str:
    num = len(gallery.clusters)
    shown = "\n".join(_picture(picture, caption, right) for caption, picture, right in gallery.chosen)
    boxes = [
        (_percent(results["prompt_accuracy"]), f"of {results['num_prompts']} pictures have every attribute right"),
        (
            _percent(results["prompt_accuracy_heldout"]),
            f"of {results['num_prompts_heldout']}, for combinations that nobody has seen",
        ),
        (
            f"{results['frechet']:.2f}",
            f"Frechet distance to the data; real pictures have {results['real']['frechet']:.2f}",
        ),
        (_time(results["seconds"]), f"for all of it, on a CPU; {results['parameters'] / 1e6:.1f}M parameters"),
    ]
    figures = "\n".join(f"<div><b>{value}</b><span>{escape(what)}</span></div>" for value, what in boxes)
    kinds = [expert["objective"] for expert in results["experts"]]
    names = dict.fromkeys(sorted(kinds))
    told = escape(_join([f"{_word(kinds.count(kind))} by {KINDS.get(kind, kind)}" for kind in names]))
    return f"""<header>
<h1>{_word(num).capitalize()} experts that never met, one model</h1>
<p class="lede">Each expert is a small diffusion model. It was trained in a process of its own, on its own part of the
pictures, and saw nothing of the others: {told}. Afterwards a router learned to tell which of them to ask. These
pictures are what they paint together, from the words below each.</p>
</header>
<div class="pictures">
{shown}
</div>
<div class="figures">
{figures}
</div>"""


def _experts(results: Mapping[str, Any], gallery: Gallery) -> str:
    cards = []
    for k, (expert, sheet, curve) in enumerate(zip(results["experts"], gallery.clusters, gallery.curves, strict=True)):
        kind = escape(KINDS.get(expert["objective"], expert["objective"]))
        spent = _time(expert["training_seconds"])
        told = f"{expert['pictures']:,} pictures · {expert['steps']:,} steps · {spent} of one core"
        cards.append(
            f"""<div class="card e{k}">
<h3><i class="dot"></i>Expert {k} · {kind}</h3>
<img src="{_uri(_sheet(sheet))}" alt="some of the pictures that expert {k} learned from">
<div class="note">{told}</div>
{_loss_chart(curve, k)}
</div>"""
        )
    steps = {expert["objective"]: expert["steps"] for expert in results["experts"]}
    apart = ""
    if "ddpm" in steps and "fm" in steps:
        took = "" if steps["ddpm"] == steps["fm"] else f", and takes {steps['ddpm']:,} steps, not {steps['fm']:,}"
        apart = (
            " Every owner decides alone how to train: noise prediction is slow to learn the first strokes of a "
            f"picture, so the DDPM expert has the smallest part and weighs its errors by min-SNR{took}."
        )
    return f"""<section>
<h2>What each expert saw, and how it learned</h2>
<p>The pictures were sorted into {_word(len(cards))} parts by how they look. The line is the loss in training, the
circles are the loss on pictures kept aside. Losses of different objectives cannot be compared: one guesses a velocity,
the other the noise.{apart}</p>
<div class="experts">
{"".join(cards)}
</div>
</section>"""


def _heldout(results: Mapping[str, Any], gallery: Gallery) -> str:
    shown = "\n".join(_picture(picture, caption, right) for caption, picture, right in gallery.heldout[:HELDOUT_SHOWN])
    wrong = sum(not right for _, _, right in gallery.heldout[:HELDOUT_SHOWN])
    told = (
        f"{_word(wrong).capitalize()} of them {'is' if wrong == 1 else 'are'} wrong somewhere, and marked."
        if wrong
        else ("All of them are right.")
    )
    return f"""<section>
<h2>Combinations that nobody has seen</h2>
<p>A tenth of all combinations of character, colour, glasses, hat and background was kept from the data altogether.
These are the first {min(HELDOUT_SHOWN, len(gallery.heldout))} such prompts that were tried, not the best. {told}</p>
<div class="pictures small">
{shown}
</div>
</section>"""


def _same(results: Mapping[str, Any], gallery: Gallery) -> str:
    experts = {f"expert_{k}": k for k in range(len(gallery.clusters))}
    rows = []
    for labelled, chosen in zip(gallery.same, gallery.painted_by, strict=True):
        cells = []
        for name in (name for name in (*experts, *MODELS) if name in labelled.pictures):
            k = experts.get(name)
            kind = "" if k is None else f"e{k} chosen" if k == chosen else f"e{k}"
            label = MODELS[name] if k is None else f"expert {k}"
            cells.append(
                f'<figure class="{kind}"><img src="{_uri(_enlarged(labelled.pictures[name]))}" alt="{label}">'
                f"<figcaption>{label}</figcaption></figure>"
            )
        rows.append(f'<div class="same"><p>{escape(labelled.caption)}</p><div class="row">{"".join(cells)}</div></div>')
    return f"""<section>
<h2>The same noise through each expert</h2>
<p>One prompt from each part of the data. Every picture of a row starts from the same noise. An expert that knows little
of what is asked paints what it knows. The framed one is the router's choice.</p>
{"".join(rows)}
</section>"""


def _traces(results: Mapping[str, Any], gallery: Gallery) -> str:
    legend = "".join(
        f'<li class="e{k}"><i class="dot"></i>expert {k}, {escape(KINDS.get(kind, kind))}</li>'
        for k, kind in enumerate(expert["objective"] for expert in results["experts"])
    )
    return f"""<section>
<h2>Who painted what, and when</h2>
<p>From noise on the left to the picture on the right. The small pictures show where it was heading at that time. The
band below shows how much say each expert had. Here all experts are mixed by the router's probabilities
(<code>--routing full</code>), so that its doubts can be seen; all other pictures of this page use the most probable
expert alone.</p>
<ul class="legend">{legend}</ul>
{"".join(_trace(trace) for trace in gallery.traces)}
</section>"""


def _trace(trace: Traced) -> str:
    steps = [
        f'<figure><img src="{_uri(_enlarged(picture))}" alt="where it was heading at t = {t:.2f}"></figure>'
        for t, picture in zip(trace.at, trace.previews, strict=True)
    ]
    steps.append(f'<figure><img src="{_uri(_enlarged(trace.final))}" alt="the picture"></figure>')
    return f"""<div class="trace">
<p>{escape(trace.caption) or "No words at all."}</p>
<div class="row">{"".join(steps)}</div>
<div class="band">{_areas(trace)}</div>
<div class="ends"><span>noise</span><span>picture</span></div>
</div>"""


def _table(results: Mapping[str, Any]) -> str:
    models = {"ensemble": results, **results.get("compare", {}), "real": results["real"]}
    rows = [
        ("every attribute right", "prompt_accuracy", _percent),
        ("the same, unseen combinations", "prompt_accuracy_heldout", _percent),
        ("Frechet distance, less is better", "frechet", lambda value: f"{value:.3f}"),
        ("diversity, 1 is the data's", "diversity", lambda value: f"{value:.2f}"),
        ("parameters", "parameters", lambda value: f"{value / 1e6:.2f}M"),
        ("FLOPs of training", "training_flops", _flops),
        ("core time of training", "training_seconds", _time),
        ("FLOPs per image", "flops_an_image", _flops),
        ("seconds per image, one core", "seconds_an_image", lambda value: f"{value:.3f}"),
    ]
    head = "".join(f"<th{' class=ours' if name == 'ensemble' else ''}>{MODELS[name]}</th>" for name in models)
    body = "".join(
        f"<tr><th>{what}</th>"
        + "".join(
            f"<td{' class=ours' if name == 'ensemble' else ''}>{show(model[key]) if key in model else '-'}</td>"
            for name, model in models.items()
        )
        + "</tr>\n"
        for what, key, show in rows
    )
    aims = "".join(
        f"<li{'' if aim['reached'] else ' class=missed'}>{escape(aim['what'])}: it is {aim['found']:.3f}"
        + ("" if aim["reached"] else f", missed by {abs(aim['found'] - aim['wanted']):.3f}")
        + "</li>"
        for aim in results["aims"]
    )
    more = (
        ""
        if "compare" in results
        else (
            "<p class=note><code>atoll demo --compare</code> adds one model trained with as many FLOPs, and the same "
            "ensemble with flow matching alone.</p>"
        )
    )
    return f"""<section>
<h2>In numbers</h2>
<table>
<thead><tr><th></th>{head}</tr></thead>
<tbody>
{body}</tbody>
</table>
{more}
<h3>What we aimed at</h3>
<ul class="aims">{aims}</ul>
</section>"""


def _meaning(results: Mapping[str, Any]) -> str:
    compared = "compare" in results
    meanings = {
        "Every attribute right": "A program reads each picture back: character, colour, glasses, hat, its colour and "
        f"the background. Only if all six are as the prompt says, the picture counts. Of real pictures it reads "
        f"{_percent(results['real']['prompt_accuracy'])} right. Prompts are captions of the training data, "
        f"{results['num_prompts']} of them, each with a seed of its own.",
        "Unseen combinations": "The same for combinations that were kept from the data, though each attribute alone "
        "was in it.",
        "Frechet distance": "How far the samples as a whole are from the data as a whole, measured on colours and "
        "edges (features simple). It says whether one row is better than another here, and nothing beyond this page. "
        "Real ones are other pictures like the data, through the codec: no model can do much better.",
        "Diversity": "How different pictures of one prompt are from each other (the eyes, the mouth, the light), as a "
        "share of how different real ones are.",
        "FLOPs": "Counted by torch in a step of training or a picture: multiplications and additions of matrix "
        "products. Those of the router are among the ensemble's.",
        "Core time": "Seconds of one core. Experts run side by side, so the clock shows less.",
    }
    if compared:
        meanings["Monolith"] = (
            "The same network trained on all pictures with as many FLOPs as the experts and the router together. As "
            "in the papers, it takes as many steps as an expert does, and each of them on "
            f"{results['compare']['monolith']['batch']} pictures. The same FLOPs in more steps of fewer pictures, "
            "one after the other, make a better one at this scale: docs/LOG.md has its figures."
        )
        meanings["All FM"] = (
            "The same ensemble, but in place of the DDPM expert one that learned flow matching on the same pictures, "
            "for as many steps."
        )
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in meanings.items())
    return f"<section>\n<h2>What the numbers mean</h2>\n<dl>{listed}</dl>\n</section>"


def _repeat(results: Mapping[str, Any]) -> str:
    flag = " --compare" if "compare" in results else ""
    commands = "".join(f"<span>{escape(command)}</span>" for command in results["commands"])
    stages = " · ".join(f"{escape(name)} {seconds:.0f} s" for name, seconds in results["stages"].items())
    return f"""<section>
<h2>Do it again</h2>
<p>All of it, with the same numbers to the last digit on the same machine. Interrupted, the same command resumes.</p>
<pre><span>atoll demo{flag}</span></pre>
<p class="note">It took {_time(results["seconds"])} here: {stages}.</p>
<p>Or step by step, as one would with other pictures:</p>
<pre>{commands}</pre>
</section>"""


# --- drawings --------------------------------------------------------------------------------------------------------


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


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _flops(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} M"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _word(num: int) -> str:
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[num] if num < len(words) else str(num)


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
