"""The report of a demo: one HTML file that contains its images and loads nothing from the network.

report.html is a template with the names of figures and fragments in braces; this module makes the fragments.
"""

import base64
import math
import re
from collections.abc import Callable, Mapping, Sequence
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
from atoll.sampling.folder import png_of

Picture = NDArray[np.uint8]  # [S, S, 3]
Points = Sequence[tuple[int, float]]  # (step, loss)

HELDOUT_SHOWN, FEW_SHOWN = 24, 8
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


def render(
    results: Mapping[str, Any],
    samples: Snapshot,
    judged: Snapshot,
    curves: Sequence[Sequence[Points]],
    students: Mapping[str, Snapshot],
) -> str:
    """Returns the whole page. Its content security policy forbids scripts and external resources.

    `samples` and `judged` are the demo's samples and evaluation, `curves` the losses of each expert, in training and
    held out, `students` the evaluations of few-step students.
    """
    style, page = (files("atoll.experiments").joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "html"))
    experts, compare = results["experts"], results.get("compare", {})
    models = {"ensemble": results, **compare, "real": results["real"]}
    kinds = [expert["objective"] for expert in experts]
    wrong = judged.about["heldout_right"][:HELDOUT_SHOWN].count(False)
    marked = f"{_word(wrong).capitalize()} of them {'is' if wrong == 1 else 'are'} wrong somewhere, and marked."
    values = {
        **results,
        "style": style,
        "num": _word(len(experts)),
        "num_capital": _word(len(experts)).capitalize(),
        "kinds": " and ".join(f"{_word(kinds.count(key))} by {name}" for key, name in KINDS.items() if key in kinds),
        "chosen": "\n".join(_figures(samples, "chosen")),
        "heldout": "\n".join(_figures(judged, "heldout")[:HELDOUT_SHOWN]),
        "num_heldout": len(judged.about["heldout"][:HELDOUT_SHOWN]),
        "heldout_note": marked if wrong else "All of them are right.",
        "time": _time(results["seconds"]),
        "millions": results["parameters"] / 1e6,
        "batch": compare["monolith"]["batch"] if compare else None,
        "stages": " · ".join(f"{escape(name)} {seconds:.0f} s" for name, seconds in results["stages"].items()),
    }
    names = [*(f"expert_{k}" for k in range(len(experts))), "ensemble", *compare]
    lists: dict[str, list[Any]] = {
        "alone": [] if compare else [{}],
        "compared": [values] if compare else [],
        "expert": [_expert(k, expert, samples, *curves[k]) for k, expert in enumerate(experts)],
        "same": [_same(samples, i, names) for i in range(len(experts))],
        "trace": [_trace(samples, i, caption) for i, caption in enumerate(samples.about["traced"])],
        "model": [{"name": MODELS[name]} for name in models],
        "figure": [
            {"label": label, "cells": "".join(f"<td>{show(m[key]) if key in m else '-'}</td>" for m in models.values())}
            for label, key, show in TABLE
        ],
        "few": [{}] if students else [],
        "student": _students(results, samples, students),
        "aim": [_aim(aim) for aim in results["aims"]],
        "command": [{"command": escape(command)} for command in results["commands"]],
    }

    def repeat(match: re.Match[str]) -> str:
        key = f"piece {match.start()}"
        values[key] = "".join(match[2].format_map(item) for item in lists[match[1]])
        return f"{{{key}}}"

    return re.sub(r"<!--each (\w+)-->(.*?)<!--end-->", repeat, page, flags=re.DOTALL).format_map(values)


def _word(num: int) -> str:
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[num] if num < len(words) else str(num)


def _expert(k: int, expert: Mapping[str, Any], samples: Snapshot, train: Points, held_out: Points) -> dict[str, Any]:
    """Returns some of an expert's training images, and its losses on a logarithmic scale."""
    images = samples.arrays[f"cluster_{k}"]
    columns, size, gap = min(10, len(images)), 3 * images.shape[1], 6
    width, height = columns * (size + gap) - gap, math.ceil(len(images) / columns) * (size + gap) - gap
    sheet = Image.new("RGBA", (width, height))  # transparent between images
    paste_grid(sheet, images, 0, 0, size, gap, columns)
    steps, losses = np.array([*train, *held_out], np.float64).T
    heights = np.log(losses.clip(1e-6))
    low, span = heights.min(), max(np.ptp(heights), 1e-6)
    places = list(zip(34 + 398 * steps / steps.max(), 8 + 102 * (1 - (heights - low) / span), strict=True))
    return {
        **expert,
        "k": k,
        "kind": escape(KINDS.get(expert["objective"], expert["objective"])),
        "sheet": _uri(sheet),
        "time": _time(expert["training_seconds"]),
        "most": math.exp(low + span),
        "least": math.exp(low),
        "last": steps.max(),
        "line": " ".join(f"{x:.1f},{y:.1f}" for x, y in places[: len(train)]),
        "circles": "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places[len(train) :]),
    }


def _same(samples: Snapshot, i: int, names: Sequence[str]) -> dict[str, str]:
    """Returns each model's and expert's image of a caption, from the same noise; the router's choice is framed."""
    chosen, cells = f"expert_{samples.about['painted_by'][i]}", []
    for name in names:
        label = MODELS.get(name, name.replace("_", " "))
        kind = name.replace("expert_", "e") + " chosen" * (name == chosen)
        cells.append(_figure(samples.arrays[f"same_{name}"][i], label, label, kind))
    return {"caption": escape(samples.about["captions"][i]), "cells": "".join(cells)}


def _students(results: Mapping[str, Any], samples: Snapshot, students: Mapping[str, Snapshot]) -> list[dict[str, str]]:
    """Returns a row of images per few-step student below its teacher's: the same prompts from the same noise."""
    rows = {"20 steps, the ensemble": (results, samples)} if students else {}
    for name, snapshot in students.items():
        num = name.removeprefix("steps_")
        rows[f"{num} step{'s' * (num != '1')}"] = (results["few_steps"][name], snapshot)
    captions = samples.about["chosen"][:FEW_SHOWN]
    return [
        {
            "title": f"{title}: {figures['prompt_accuracy']:.1%} right, Frechet distance {figures['frechet']:.2f}, "
            f"diversity {figures['diversity']:.2f}, {format_value('flops_an_image', figures['flops_an_image'])} FLOPs",
            "cells": "".join(map(_figure, snapshot.arrays["chosen"][:FEW_SHOWN], captions)),
        }
        for title, (figures, snapshot) in rows.items()
    ]


def _trace(samples: Snapshot, i: int, caption: str) -> dict[str, str]:
    """Returns the experts' weights from noise to data as stacked areas; the last weights hold until t = 0."""
    times, weights, at, images = (samples.arrays[f"trace_{i}_{key}"] for key in ("times", "weights", "at", "images"))
    labels = [*(f"where it was heading at t = {t:.2f}" for t in at), "the image"]
    tops = weights.cumsum(1).clip(0, 1)
    xs, heights = [0.0, *((1 - times) * 1000), 1000.0], [tops[0], *tops, tops[-1]]
    areas = []
    for k in reversed(range(tops.shape[1])):
        line = " ".join(f"{x:.1f},{(1 - row[k]) * 56:.1f}" for x, row in zip(xs, heights, strict=True))
        areas.append(f'<polygon class="area e{k}" points="0,56 {line} 1000,56"/>')
    return {
        "caption": escape(caption) or "No words at all.",
        "cells": "".join(map(_figure, images, labels)),
        "shares": ", ".join(f"expert {k} {share:.0%}" for k, share in enumerate(weights.mean(0)) if share >= 0.005),
        "areas": "".join(areas),
    }


def _aim(aim: Mapping[str, Any]) -> dict[str, Any]:
    missed = "" if aim["reached"] else f", missed by {abs(aim['found'] - aim['wanted']):.3f}"
    return {**aim, "what": escape(aim["what"]), "missed": missed, "class": "missed" if missed else "reached"}


def _figures(snapshot: Snapshot, name: str) -> list[str]:
    """Returns images with their captions, the wrong ones marked."""
    about = snapshot.about
    return [
        _figure(image, caption, caption, "" if right else "wrong")
        for image, caption, right in zip(snapshot.arrays[name], about[name], about[f"{name}_right"], strict=True)
    ]


def _figure(image: Picture, alt: str, caption: str = "", kind: str = "") -> str:
    """Returns an image, enlarged fourfold here because browsers blur when they enlarge."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    uri = _uri(scaled(image, 4 * len(image)))
    return f'<figure class="{kind}"><img src="{uri}" alt="{escape(alt)}">{below}</figure>'


def _uri(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_of(image)).decode()}"
