"""The report of a demo: one HTML file with its images inside, which asks nothing of any network.

report.html is the page, with the names of figures and pieces in braces; here the pieces are made.
"""

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.experiments.cache import Snapshot
from atoll.experiments.tables import format_value
from atoll.plots.canvas import paste_grid, scaled
from atoll.sampling.trace import png_of

Picture = NDArray[np.uint8]  # [S, S, 3]
Points = Sequence[tuple[int, float]]  # (step, loss)

HELDOUT_SHOWN = 24
KINDS = {"ddpm": "noise prediction (DDPM)", "fm": "flow matching"}
MODELS = {"ensemble": "ensemble", "homogeneous": "all FM", "monolith": "monolith", "real": "real"}


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


TABLE: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("every attribute right", "prompt_accuracy", "{:.1%}".format),
    ("the same, unseen combinations", "prompt_accuracy_heldout", "{:.1%}".format),
    ("Frechet distance, less is better", "frechet", "{:.3f}".format),
    ("diversity, 1 is the data's", "diversity", "{:.2f}".format),
    ("parameters", "parameters", lambda value: f"{value / 1e6:.2f}M"),
    ("FLOPs of training", "training_flops", partial(format_value, "flops_an_image")),
    ("core time of training", "training_seconds", _time),
    ("FLOPs per image", "flops_an_image", partial(format_value, "flops_an_image")),
    ("seconds per image, one core", "seconds_an_image", "{:.3f}".format),
)


def render(results: Mapping[str, Any], samples: Snapshot, judged: Snapshot, curves: Sequence[Sequence[Points]]) -> str:
    """Returns the whole page. Its policy forbids what it does not need: scripts, and anything from elsewhere.

    `samples` and `judged` are what the demo has drawn and read back, `curves` the losses of each expert, in training
    and held out.
    """
    style, page = (files("atoll.experiments").joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "html"))
    compare = results.get("compare", {})
    page = re.sub(rf"<!--if {'alone' if compare else 'compared'}-->.*?<!--end-->", "", page, flags=re.DOTALL)
    experts, heldout = results["experts"], _figures(judged, "heldout")[:HELDOUT_SHOWN]
    kinds = [expert["objective"] for expert in experts]
    wrong = judged.about["heldout_right"][:HELDOUT_SHOWN].count(False)
    marked = f"{_word(wrong).capitalize()} of them {'is' if wrong == 1 else 'are'}"
    models = {"ensemble": results, **compare, "real": results["real"]}
    names = [*(f"expert_{k}" for k in range(len(experts))), "ensemble", *compare]
    values = {
        "style": style,
        "num": _word(len(experts)),
        "num_capital": _word(len(experts)).capitalize(),
        "kinds": " and ".join(f"{_word(kinds.count(key))} by {name}" for key, name in KINDS.items() if key in kinds),
        "chosen": "\n".join(_figures(samples, "chosen")),
        "time": _time(results["seconds"]),
        "millions": results["parameters"] / 1e6,
        "experts": "".join(
            _expert(k, expert, samples.arrays[f"cluster_{k}"], *curves[k]) for k, expert in enumerate(experts)
        ),
        "num_heldout": len(heldout),
        "heldout_note": f"{marked} wrong somewhere, and marked." if wrong else "All of them are right.",
        "heldout": "\n".join(heldout),
        "same": "".join(_same(samples, i, names) for i in range(len(experts))),
        "legend": "".join(
            f'<li class="e{k}"><i class="dot"></i>expert {k}, {_kind(expert)}</li>' for k, expert in enumerate(experts)
        ),
        "traces": "".join(_trace(samples, i, caption) for i, caption in enumerate(samples.about["traced"])),
        "table_head": "".join(f"<th>{MODELS[name]}</th>" for name in models),
        "table_body": "".join(_table_row(*row, models.values()) for row in TABLE),
        "aims": "".join(map(_aim, results["aims"])),
        "batch": compare["monolith"]["batch"] if compare else None,
        "stages": " · ".join(f"{escape(name)} {seconds:.0f} s" for name, seconds in results["stages"].items()),
        "commands": "".join(f"<span>{escape(command)}</span>" for command in results["commands"]),
    }
    return page.format_map({**results, **values})


def _word(num: int) -> str:
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[num] if num < len(words) else str(num)


def _kind(expert: Mapping[str, Any]) -> str:
    return escape(KINDS.get(expert["objective"], expert["objective"]))


def _expert(k: int, expert: Mapping[str, Any], images: NDArray[np.uint8], train: Points, held_out: Points) -> str:
    columns, size, gap = min(10, len(images)), 3 * images.shape[1], 6
    width, height = columns * (size + gap) - gap, math.ceil(len(images) / columns) * (size + gap) - gap
    sheet = Image.new("RGBA", (width, height))  # what lies behind shines through between images
    paste_grid(sheet, images, 0, 0, size, gap, columns)
    return f"""<div class="card e{k}">
<h3><i class="dot"></i>Expert {k} · {_kind(expert)}</h3>
<img src="{_uri(sheet)}" alt="some of the images that expert {k} learned from">
<div class="note">{expert["pictures"]:,} images · {expert["steps"]:,} steps · \
{_time(expert["training_seconds"])} of one core</div>
{_loss_chart(train, held_out, k)}
</div>"""


def _same(samples: Snapshot, i: int, names: Sequence[str]) -> str:
    """Returns what each has made of a caption, from the same noise; the router's choice is framed."""
    chosen, cells = f"expert_{samples.about['painted_by'][i]}", []
    for name in names:
        label = MODELS.get(name, name.replace("_", " "))
        kind = name.replace("expert_", "e") + " chosen" * (name == chosen)
        cells.append(_figure(samples.arrays[f"same_{name}"][i], label, label, kind))
    return (
        f'<div class="same"><p>{escape(samples.about["captions"][i])}</p><div class="row">{"".join(cells)}</div></div>'
    )


def _trace(samples: Snapshot, i: int, caption: str) -> str:
    """Returns who painted an image, from noise to data."""
    times, weights, at, images = (samples.arrays[f"trace_{i}_{key}"] for key in ("times", "weights", "at", "images"))
    labels = [*(f"where it was heading at t = {t:.2f}" for t in at), "the image"]
    return f"""<div class="trace">
<p>{escape(caption) or "No words at all."}</p>
<div class="row">{"".join(map(_figure, images, labels))}</div>
<div class="band">{_areas(times, weights)}</div>
<div class="ends"><span>noise</span><span>image</span></div>
</div>"""


def _table_row(label: str, key: str, show: Callable[[float], str], models: Iterable[Mapping[str, Any]]) -> str:
    cells = (f"<td>{show(model[key]) if key in model else '-'}</td>" for model in models)
    return f"<tr><th>{label}</th>{''.join(cells)}</tr>\n"


def _aim(aim: Mapping[str, Any]) -> str:
    missed = "" if aim["reached"] else f", missed by {abs(aim['found'] - aim['wanted']):.3f}"
    return f"<li{' class=missed' * bool(missed)}>{escape(aim['what'])}: it is {aim['found']:.3f}{missed}</li>"


def _loss_chart(train: Points, held_out: Points, k: int) -> str:
    """Draws the training loss as a line, the held-out loss as circles, over the steps; the height is logarithmic."""
    wide, high, left, top, base = 440, 130, 34, 8, 110
    steps, losses = np.array([*train, *held_out], np.float64).T
    heights = np.log(losses.clip(1e-6))
    low, span = heights.min(), max(np.ptp(heights), 1e-6)
    xs = left + (wide - left - 8) * steps / steps.max()
    ys = top + (base - top) * (1 - (heights - low) / span)
    points = [f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True)]
    circles = [f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in zip(xs, ys, strict=True)]
    most, least = f"{math.exp(low + span):.2f}", f"{math.exp(low):.2f}"
    return f"""<svg viewBox="0 0 {wide} {high}" role="img" aria-label="loss of expert {k}, from {most} to {least}">
<path class="axis" d="M{left} {top}V{base}H{wide - 8}"/>
<text x="{left - 6}" y="{top + 8}" text-anchor="end">{most}</text>
<text x="{left - 6}" y="{base}" text-anchor="end">{least}</text>
<text x="{left}" y="{high - 4}">step 0</text>
<text x="{wide - 8}" y="{high - 4}" text-anchor="end">{steps.max():.0f}</text>
<polyline class="curve" points="{" ".join(points[: len(train)])}"/>{"".join(circles[len(train) :])}
</svg>"""


def _areas(times: NDArray[np.float64], weights: NDArray[np.float64]) -> str:
    """Draws the weights of the experts as areas on one another; the last stand until t = 0."""
    wide, high = 1000, 56
    tops = weights.cumsum(1).clip(0, 1)
    xs, heights = [0.0, *((1 - times) * wide), float(wide)], [tops[0], *tops, tops[-1]]
    areas = []
    for k in reversed(range(tops.shape[1])):
        line = " ".join(f"{x:.1f},{(1 - row[k]) * high:.1f}" for x, row in zip(xs, heights, strict=True))
        areas.append(f'<polygon class="area e{k}" points="0,{high} {line} {wide},{high}"/>')
    shares = ", ".join(f"expert {k} {share:.0%}" for k, share in enumerate(weights.mean(0)) if share >= 0.005)
    return (
        f'<svg viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" aria-label="{shares}">'
        f"{''.join(areas)}</svg>"
    )


def _figures(snapshot: Snapshot, name: str) -> list[str]:
    """Returns images with their captions; wrong ones are marked."""
    about = snapshot.about
    return [
        _figure(image, caption, caption, "" if right else "wrong")
        for image, caption, right in zip(snapshot.arrays[name], about[name], about[f"{name}_right"], strict=True)
    ]


def _figure(image: Picture, alt: str, caption: str = "", kind: str = "") -> str:
    """Returns an image, enlarged fourfold, for browsers blur what they enlarge."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    uri = _uri(scaled(image, 4 * len(image)))
    return f'<figure class="{kind}"><img src="{uri}" alt="{escape(alt)}">{below}</figure>'


def _uri(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_of(image)).decode()}"
