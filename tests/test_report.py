"""The report in a real browser: light and dark, on a phone and on a desk, with no errors and no requests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.experiments.cache import Snapshot
from atoll.experiments.report import _time, render

WIDTHS = {"phone": 360, "desktop": 1280}


def results(compare: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "prompt_accuracy": 0.9725, "prompt_accuracy_heldout": 0.9, "frechet": 1.234, "diversity": 0.91,
        "num_prompts": 400, "num_prompts_heldout": 200, "parameters": 7_100_000, "training_flops": 2.1e13,
        "training_seconds": 430.0, "flops_an_image": 3.1e9, "seconds_an_image": 0.041,
    }  # fmt: skip
    expert = {"pictures": 1500, "steps": 500, "training_seconds": 100.0}
    found = {
        **figures,
        "seconds": 281.0,
        "stages": {"prepare": 5.0, "train": 240.0},
        "real": {"prompt_accuracy": 1.0, "frechet": 0.4, "diversity": 1.0},
        "experts": [
            {**expert, "objective": kind, "steps": 600 if kind == "ddpm" else 500} for kind in ("fm", "ddpm") * 2
        ],
        "aims": [
            {"what": "prompt accuracy of at least 0.95", "found": 0.9725, "wanted": 0.95, "reached": True},
            {"what": "a <distance>", "found": 1.234, "wanted": 1.1, "reached": False},
        ],
        "commands": [
            "atoll prepare a-folder-with-a-name-that-has-no-end/and-goes-on-and-on-and-on/pictures.tar --out data"
        ],
    }
    if compare:
        found["compare"] = {"homogeneous": figures, "monolith": {**figures, "batch": 131}}
        found["few_steps"] = {f"steps_{num}": figures for num in (4, 1)}
    return found


def page_of(found: dict[str, Any]) -> str:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (40, 32, 32, 3), np.uint8)
    names = [*(f"expert_{k}" for k in range(4)), "ensemble", *found.get("compare", ())]
    weights = rng.random((20, 4))
    caption = "a green robot with round glasses and a red cap on a yellow background"
    trace = {
        "times": np.linspace(1, 0.05, 20), "weights": weights / weights.sum(1, keepdims=True),
        "at": np.linspace(0.9, 0.1, 7), "images": pictures[:8],
    }  # fmt: skip
    arrays = {
        "chosen": pictures[:12],
        **{f"cluster_{k}": pictures for k in range(4)},
        **{f"same_{name}": pictures[i : i + 4] for i, name in enumerate(names)},
        **{f"trace_{i}_{key}": array for i in range(2) for key, array in trace.items()},
    }
    about = {
        "chosen": [caption] * 12, "chosen_right": [True] * 12, "captions": [caption] * 4, "painted_by": [0, 1, 2, 3],
        "traced": [caption, ""],
    }  # fmt: skip
    heldout = {"heldout": [caption] * 40, "heldout_right": [i % 5 > 0 for i in range(40)]}
    curves = [[(20 * i, 2 / i) for i in range(1, 30)], [(300, 0.5), (600, 0.4)]]
    samples, judged = Snapshot({}, about, arrays), Snapshot({}, heldout, {"heldout": pictures})
    return render(found, samples, judged, [curves] * 4, dict.fromkeys(found.get("few_steps", ()), samples))


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "compared"])
def page_file(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_of(results(request.param)), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_in_a_browser(browser, page_file, scheme, device):
    width = WIDTHS[device]
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    told: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert told == []
    assert [url for url in asked if not url.startswith("data:")] == [page_file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter(image => !image.complete || image.naturalWidth === 0).length"
    assert page.evaluate(broken) == 0
    beyond = (
        f"[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > {width + 1}).length"
    )
    assert page.evaluate(beyond) == 0
    shown = "[...document.images].filter(image => image.offsetParent)"
    smallest = f"Math.min(...{shown}.map(image => image.getBoundingClientRect().width))"
    assert page.evaluate(smallest) >= 30
    light = [
        _lightness(page.evaluate(f"getComputedStyle(document.body).{what}")) for what in ("backgroundColor", "color")
    ]
    assert (light[0] > light[1]) == (scheme == "light")
    assert abs(light[0] - light[1]) > 0.6
    context.close()


def _lightness(colour: str) -> float:
    return float(np.mean([int(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3]])) / 255


def test_what_users_write_is_text():
    page = page_of(results(False))
    assert "a &lt;distance&gt;" in page
    assert "<distance>" not in page
    told = results(False)
    evil = "<script>alert(1)</script>"
    for expert in told["experts"]:
        expert["objective"] = evil
    told["commands"], told["stages"] = [evil], {evil: 1.0}
    assert "<script" not in page_of(told)


def test_seconds_in_words():
    assert _time(59.4) == "59 s"
    assert _time(61) == "1 min 01 s"
