"""The studio in a real browser: generate, watch, switch experts off, links, keyboard, phone, dark, accessibility."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.serving.settings import Limits
from atoll.serving.studio import page as studio_page
from serving import in_process
from test_assemble import parts

AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core")) / "axe.min.js"  # npm install axe-core
PROMPT = "a pink ghost with a yellow party hat"


@pytest.fixture(scope="module")
def url(served_model, tmp_path_factory) -> Iterator[str]:
    clusters = parts(tmp_path_factory.getbasetemp())[0] / "clusters"
    with in_process(f"tiny={served_model}", clusters=clusters, limits=Limits(steps=60)) as (url, _):
        yield url


@pytest.fixture
def visit(browser, url):
    """Opens the studio; afterwards checks that there were no console errors and no external requests."""
    told: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_(fragment: str = "", width: int = 1100, scheme: str = "light", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/{fragment}")
        page.wait_for_selector("#experts li")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [line for line in told if "400 (Bad Request)" not in line] == []  # which browsers always log
    assert [one for one in asked if not one.startswith((url, "data:", "blob:"))] == []


def done(page: Any) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#status")).to_have_text(re.compile("^Done"), timeout=120_000)


def paint(page: Any, prompt: str = PROMPT) -> None:
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")
    done(page)


def image(page: Any, stage: str = "live") -> str:
    return page.locator(f"#{stage} image.view").get_attribute("href")


def test_generate_watch_and_come_back_by_the_link(visit, url):
    page = visit()
    assert page.locator("h1").inner_text() == "Three models that never met paint together."
    paint(page)
    frames = page.locator("#frames img")
    assert frames.count() == 20
    sources = [frames.nth(i).get_attribute("src") for i in (0, 10, 19)]
    assert len(set(sources)) == 3  # the image forms
    assert page.locator("#live .arc").count() >= 20  # a piece of the ring per step
    first, place = image(page), page.evaluate("location.hash")
    assert first.startswith("data:image/png")
    again = visit(place)
    done(again)
    assert image(again) == first  # to the byte: alone, and the same prompt, seed and settings
    with page.expect_download() as download:
        page.click("#download")
    assert re.fullmatch(r"a-pink-ghost-with-a-yellow-party-hat-\d+\.png", download.value.suggested_filename)


def test_switch_an_expert_off_compare_and_look_back(visit):
    page = visit("#prompt=a+robot&seed=7&steps=6&routing=full")
    done(page)
    first = image(page)
    page.click("#pin")
    for k in (1, 2):
        page.click(f"label[for=expert-{k}]")
        page.locator("#live figcaption", has_text=re.compile(f"without expert .*{k}")).wait_for()
    assert image(page) != first
    assert image(page, "pinned") == first
    assert page.locator("#pinned figcaption").inner_text() == "all experts"  # how the two differ
    assert page.evaluate("location.hash").endswith(
        "off=1-2&model=tiny&hash=" + page.evaluate("model.atoll.hash.slice(0, 12)")
    )
    shares = [page.locator(".share i").nth(k).evaluate("bar => bar.style.width") for k in range(3)]
    assert shares == ["100%", "0%", "0%"]
    page.locator("#history button").last.click()
    page.locator("#live figcaption", has_text="the same settings").wait_for()
    assert image(page) == first


def test_each_alone(visit):
    """The same prompt and seed by each expert, next to their joint image."""
    page = visit("#prompt=a+robot&seed=7&steps=4")
    done(page)
    page.click("#each")
    page.locator("#status", has_text="by each expert alone").wait_for()
    solos = page.locator("#solos img")
    sources = [solos.nth(i).get_attribute("src") for i in range(solos.count())]
    assert len(set(sources[:3])) == 3
    assert sources[3:] == [image(page)]
    page.locator(".island image").nth(2).wait_for()  # each expert's training images
    page.click("#again")
    page.locator("#solo").wait_for(state="hidden")


def test_keyboard_alone(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type("a robot")
    page.keyboard.press("Enter")
    done(page)
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
        if page.evaluate("document.activeElement.id") == "expert-1":
            break
    assert {"paint", "again", "each", "pin", "link", "download", "expert-0", "expert-1"} <= seen
    page.keyboard.press("Space")
    page.locator("#live figcaption", has_text="without expert 1").wait_for()
    page.locator("#experts .thumb").first.focus()
    page.keyboard.press("Enter")
    page.locator("#sheet[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("#sheet[open]").wait_for(state="hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_on_any_screen(visit, width, scheme):
    page = visit("#prompt=a+robot&seed=7&steps=4", width, scheme)
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = (
        f"[...document.querySelectorAll('main > *')].filter(e => e.getBoundingClientRect().right > {width + 1}).length"
    )
    assert page.evaluate(wide) == 0
    light, dark = (_light(page, what) for what in ("backgroundColor", "color"))
    assert (light > dark) == (scheme == "light")
    page.click("#theme")
    assert (_light(page, "backgroundColor") > _light(page, "color")) == (scheme == "dark")
    if width < 400:  # touch targets
        small = (
            "[...document.querySelectorAll('.actions > *, #paint')].filter(e => e.getBoundingClientRect().height < 44)"
        )
        assert page.evaluate(f"{small}.length") == 0


def _light(page: Any, what: str) -> float:
    colour = page.evaluate(f"getComputedStyle(document.body).{what}")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.skipif(not AXE.is_file(), reason="npm install axe-core, and AXE_CORE names its folder")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(visit, scheme):
    page = visit("#prompt=a+robot&seed=7&steps=4&off=1", 390, scheme, bypass_csp=True)
    done(page)
    page.click("summary")
    page.click("#pin")
    page.click("#each")
    page.locator("#status", has_text="by each expert alone").wait_for()
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for opened in (False, True):
        if opened:
            page.locator("#experts .thumb").first.click()
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 15
        serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["html"][:100] for node in one["nodes"]]) for one in serious] == []


def test_a_mistake_is_told(visit):
    page = visit("#prompt=a+robot&seed=7&steps=61")
    page.locator("#status.bad", has_text="steps").wait_for()


def test_a_key_is_asked_for_once(browser, served_model, tmp_path):
    import hashlib
    import json

    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "sha256": hashlib.sha256(b"open sesame").hexdigest()}]}))
    with in_process(f"tiny={served_model}", keys=keys) as (url, _):
        page = browser.new_page()
        page.goto(f"{url}/#prompt=a+robot&seed=7&steps=3")
        page.fill("#key", "open sesame")
        page.keyboard.press("Enter")
        done(page)
        page.close()


def test_the_page_is_whole():
    html, policy = studio_page()
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html
    assert "unsafe" not in policy
