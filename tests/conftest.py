"""Fixtures shared by all tests."""

import os
import shutil
import signal
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CACHE_HOME"] = (_cache := TemporaryDirectory(prefix="atoll-tests-")).name  # not the user's own

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from atoll.encoders import conv, refiner
from atoll.tensors import WITHOUT_AMX, runs_bf16

if not runs_bf16():
    os.environ[WITHOUT_AMX[0]] = WITHOUT_AMX[1]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests send it to processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
pytest_plugins = ["tiny_models"]
settings.register_profile("atoll", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("atoll")
torch.set_num_threads(1)
refiner.STEPS = conv.STEPS = 2  # codecs are fitted quickly; tests of what they learn ask for more


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an assembled model of three tiny experts and a router."""
    from atoll.sampling.assemble import assemble
    from test_assemble import parts

    data, run = parts(tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("served") / "model"
    assemble([run], None, folder, data)
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Yields three nodes of two logical CPUs each, with Ray's default token authentication."""
    from clusters import ray_cluster

    assert os.environ.get("RAY_AUTH_MODE") != "disabled"
    with ray_cluster(3) as nodes:
        yield nodes


@pytest.fixture(scope="module")  # not per session: while it is open, asyncio.run cannot be called
def browser() -> Iterator[Any]:
    """Yields a real Chromium, run by playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no page is seen: playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no page is seen: there is no chromium (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Returns a function that takes a line with a measured figure, to be shown after the tests."""
    return lambda line: request.node.user_properties.append(("measured", line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = [report for reports in terminalreporter.stats.values() for report in reports]
    kept = [pair for report in found for pair in getattr(report, "user_properties", ())]
    if lines := sorted({line for name, line in kept if name == "measured"}):
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)
