"""The README and the pages in docs are true: code runs, links lead somewhere, commands and flags exist."""

import contextlib
import io
import re
import shlex
import shutil
import tomllib
from functools import cache
from pathlib import Path

import pytest

from atoll import __version__
from atoll.cli.main import VERBS, main

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [path for path in DOCS if path.name != "LOG.md"]  # the log quotes outdated commands
FIXTURES = Path(__file__).parent / "data" / "before_hashes"  # a tiny model and its data

every_page = pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
CODE = [
    pytest.param(code, id=f"{path.relative_to(ROOT)}-{number}")
    for path in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("code", CODE)
def test_code_runs(code, tmp_path, monkeypatch):
    shutil.copytree(FIXTURES / "model", tmp_path / "model")
    shutil.copytree(FIXTURES / "data", tmp_path / "data")
    shutil.copytree(FIXTURES / "model", tmp_path / "demo" / "model")
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("num=500", "num=8"), "page", "exec"), {})


def anchors_of(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@every_page
def test_links(path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text_of(path)):
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{path.name} links to {target}#{anchor}"


def test_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCS:
        for target in re.findall(r"(?:`|^ {4})make ([a-z-]+)", text_of(path), re.MULTILINE):
            assert target in targets, f"{path.name} says make {target}"


@cache
def help_of(*verb: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*verb, "--help"])
    return output.getvalue()


def test_help_lists_all_verbs_on_two_screens():
    for verb in VERBS:
        assert re.search(rf"• {verb} +[A-Z][a-z]", help_of())
    assert len(help_of().splitlines()) < 70
    assert len(help_of("federation").splitlines()) < 50


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples(verb):
    assert re.search(rf"^ +atoll {verb}", help_of(verb), re.MULTILINE)


def commands_of(path: Path) -> list[list[str]]:
    text = text_of(path).replace("\\\n", " ")
    lines = re.findall(r"^ {4,}(?:\.venv/bin/)?atoll (\S.*)$", text, re.MULTILINE)
    inline = re.findall(r"`atoll ([^`]+)`", text)
    return [shlex.split(line, comments=True) for line in lines + inline]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path):
    for verb, *arguments in commands_of(path):
        if verb.startswith("-"):
            continue
        own = arguments[:1] if verb == "federation" and arguments[:1] != ["VERB"] else []
        text, full = help_of(verb, *own), " ".join([verb, *own])
        assert f"usage: atoll {full} " in text, f"{path.name} says atoll {full}"
        for flag in [argument.split("=")[0] for argument in arguments if argument.startswith("--")]:
            assert re.search(rf"{flag}\b", text), f"{path.name} says atoll {full} {flag}"


@every_page
def test_functions_named_in_the_docs_exist(path):
    for module, names in re.findall(r"`([a-z/]+\.py): ([A-Za-z_.\[\]\"]+)`", text_of(path)):
        file = next(
            f
            for root in ("src/atoll", ".")
            for f in [ROOT / root / module, *(ROOT / root).glob(f"*/{module}")]
            if f.exists()
        )
        for name in re.findall(r"[A-Za-z_]{3,}", names):
            assert re.search(rf"\b{name}\b", text_of(file)), f"{path.name}: {module} has no {name}"


def test_packages_named_for_contributors_exist():
    packages = {
        path.parent.name for pattern in ("*.py", "*.toml") for path in (ROOT / "src" / "atoll").glob(f"*/{pattern}")
    }
    assert packages == set(re.findall(r"^  (\w+)/", text_of(ROOT / "CONTRIBUTING.md"), re.MULTILINE))


def test_citation():
    citation = text_of(ROOT / "CITATION.cff")
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    assert f"\nversion: {__version__}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    assert text_of(ROOT / "README.md").count("\n") <= 120
