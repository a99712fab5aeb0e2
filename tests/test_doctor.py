"""`atoll doctor`: working parts are reported, a broken one is one line, and the other checks still run."""

import errno
import getpass
import importlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.cli.main import main
from atoll.errors import InputError
from atoll.experiments import children, device_checks, doctor
from atoll.experiments.children import in_children
from atoll.experiments.device_checks import (
    Check,
    Machine,
    all_reduce,
    benchmark,
    check_all_reduce,
    check_compile,
    check_numbers,
)
from atoll.experiments.doctor import (
    EXTRAS,
    SECTIONS,
    Section,
    check_disk,
    check_machine,
    check_packages,
    diagnose,
    find_machine,
    make_report,
    run_section,
)
from atoll.networks.dit import DiTConfig
from atoll.networks.presets import preset
from atoll.training.roofline import Device
from simulated_gpu import CUDA, simulated_gpu

CPU = torch.device("cpu")
GROUPS = ["machine", "packages", "numbers", "speed", "memory", "several devices", "disk"]
ALONE = [one for one in SECTIONS if one.name in ("machine", "packages", "numbers")]  # without processes or files


def lines_of(check, machine: Machine) -> dict[str, Check]:
    return {line.name: line for line in check(machine)}


def in_one_line(check: Check) -> bool:
    return "\n" not in check.text and "Traceback" not in check.text


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict]:
    """Runs the verb itself, in its own folder."""
    folder = tmp_path_factory.mktemp("doctor")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["doctor", "--quick", "--device", "cpu", "--json", "doctor.json"])  # exits if a check has failed
    return folder, json.loads((folder / "doctor.json").read_text())


@pytest.mark.slow
class TestAMachineThatWorks:
    def test_every_group_has_its_lines(self, run):
        _, report = run
        assert list(dict.fromkeys(check["group"] for check in report["checks"])) == GROUPS
        assert report["format"] == "atoll-doctor/1"
        assert report["quick"] is True
        assert sum(report["counts"].values()) == len(report["checks"])
        assert {check["verdict"] for check in report["checks"]} <= {"ok", "note", "warn"}

    def test_figures_are_numbers(self, run):
        _, report = run
        by_name = {(check["group"], check["name"]): check["values"] for check in report["checks"]}
        training = by_name["speed", "training"]
        assert training["share"] == pytest.approx(training["predicted"] / training["seconds"])
        assert by_name["memory", "training"]["measured"] > 1e8
        assert by_name["several devices", "all-reduce"]["right"] is True
        assert by_name["disk", "data"]["read"] > 0

    def test_nothing_is_left_behind(self, run):
        folder, _ = run
        assert [path.name for path in folder.iterdir()] == ["doctor.json"]

    def test_the_report_does_not_tell_whose_machine_it_is(self, run):
        folder, _ = run
        text = (folder / "doctor.json").read_text()
        for secret in (str(folder), str(Path.home()), socket.gethostname(), os.environ.get("PATH", "unset")):
            assert len(secret) < 2 or secret not in text


def test_what_a_report_hides(tmp_path, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "babbage.example.org")
    secret = f"{tmp_path} '/home/ada/x.py' ~/data ada on babbage.example.org (10.0.0.17) failed"
    report = make_report(Machine(CPU, tmp_path), [Check("disk", "write", "fail", secret, {"why": secret})], 1)
    [check] = report["checks"]
    assert check["text"] == check["values"]["why"] == "FOLDER 'PATH' PATH USER on HOST (ADDRESS) failed"


def test_what_a_report_keeps():
    text = "training xl/2: 12 samples/s, PyTorch 2.13.0+cpu, writing 226 MB/s, pytorch.org/get-started"
    [check] = make_report(Machine(CPU), [Check("speed", "training", "ok", text)], 1)["checks"]
    assert check["text"] == text


class TestPackages:
    def test_the_extras_are_those_of_the_project(self):
        project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
        assert EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev"}

    def test_one_that_is_not_installed_is_a_note(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        for extra, line in lines_of(check_packages, Machine(CPU)).items():
            assert line.verdict == "note"
            assert f"pip install 'atoll[{extra}]'" in line.text

    def test_one_that_cannot_be_imported_is_a_warning(self, monkeypatch):
        def broken(name):
            raise ImportError("libarrow.so.23: cannot open shared object file\nmore of it")

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(importlib, "import_module", broken)
        line = lines_of(check_packages, Machine(CPU))["parquet"]
        assert line.verdict == "warn"
        assert in_one_line(line)
        assert "libarrow.so.23" in line.text


class TestNumbers:
    def test_a_dtype_that_is_not_supported(self, monkeypatch):
        product = torch.Tensor.__matmul__

        def without_bf16(a, b):
            if a.dtype is torch.bfloat16:
                raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'BFloat16'")
            return product(a, b)

        monkeypatch.setattr(torch.Tensor, "__matmul__", without_bf16)
        lines = lines_of(check_numbers, Machine(CPU))
        assert lines["bf16 matrix products"].verdict == "warn"
        assert "not implemented for 'BFloat16'" in lines["bf16 matrix products"].text
        assert "--precision fp32" in lines["bf16 matrix products"].text
        assert lines["DiT in float32"].verdict == "ok"

    @pytest.mark.parametrize("fault", [1.01, float("nan")])
    def test_wrong_results_are_a_failure(self, monkeypatch, fault):
        run_network = device_checks.run_network

        def wrong(network, inputs, device, bf16=False):
            output, gradient = run_network(network, inputs, device, bf16)
            return output, gradient if gradient.dtype is torch.float64 else gradient * fault

        monkeypatch.setattr(device_checks, "run_network", wrong)
        lines = lines_of(check_numbers, Machine(CPU))
        assert lines["DiT in float32"].verdict == "fail"
        assert "do not trust" in lines["DiT in float32"].text
        assert lines["float32 matrix products"].verdict == lines["self-attention"].verdict == "ok"
        json.dumps([line.values for line in lines.values()], allow_nan=False)

    def test_a_device_that_does_nothing(self, monkeypatch):
        def broken(*_):
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

        monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
        line = lines_of(check_numbers, Machine(CPU))["float32 matrix products"]
        assert line.verdict == "fail"
        assert "no kernel image" in line.text


class TestDevices:
    def test_one_that_is_not_here(self, capsys, tmp_path):
        """A missing device gives a failed line that says why, and the CPU is checked instead."""
        machine = find_machine("cuda:63", tmp_path, True)
        assert machine.device == CPU
        assert not diagnose(machine, tmp_path / "doctor.json", ALONE)
        out = capsys.readouterr().out
        assert "  fail  GPU: there is no cuda:63: " in out
        assert "  ok    DiT in float32" in out
        assert "1 check failed" in out

    def test_a_name_that_no_device_has(self, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["doctor", "--device", "gpu7"])
        assert stop.value.code == 2
        assert "there is no device 'gpu7' here: give auto, cpu, cuda or cuda:N" in capsys.readouterr().err

    def test_the_verb_exits_with_1(self, monkeypatch):
        monkeypatch.setattr(doctor, "diagnose", lambda *_: False)
        with pytest.raises(SystemExit) as stop:
            main(["doctor", "--device", "cpu"])
        assert stop.value.code == 1

    @pytest.mark.parametrize(
        ("build", "driver", "verdict", "words"),
        [
            (None, None, "note", "built for CPUs alone; training and sampling run on the CPU"),
            (None, "/usr/bin/nvidia-smi", "warn", "install PyTorch for CUDA"),
            ("12.8", None, "note", "PyTorch finds none"),
            ("12.8", "/usr/bin/nvidia-smi", "warn", "(CUDA initialization: the driver is too old)"),
        ],
    )
    def test_why_there_is_none(self, monkeypatch, build, driver, verdict, words):
        faults = ["CUDA initialization: the driver is too old\nsee https://nvidia.com"] if driver else []

        def is_available():
            if faults:  # warned once, as in torch
                warnings.warn(faults.pop(), stacklevel=2)
            return False

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(doctor.shutil, "which", lambda _: driver)
        monkeypatch.setattr(doctor.Path, "exists", lambda _: False)
        line = lines_of(check_machine, find_machine("auto", Path(), True))["GPU"]
        assert (line.verdict, in_one_line(line)) == (verdict, True)
        assert words in line.text


class TestDisk:
    @pytest.mark.parametrize("name", ["nowhere", "file"])
    def test_a_folder_that_is_none(self, tmp_path, name):
        (tmp_path / "file").touch()
        [line] = check_disk(Machine(CPU, tmp_path / name))
        assert line.verdict == "fail"
        assert "choose another --folder" in line.text

    def test_a_full_disk(self, tmp_path, monkeypatch):
        def full(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        line = lines_of(check_disk, Machine(CPU, tmp_path, quick=True))["write"]
        assert line.verdict == "fail"
        assert "(No space left on device): free the disk, or choose another --folder" in line.text
        assert not list(tmp_path.iterdir())

    def test_little_space(self, tmp_path, monkeypatch):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        lines = lines_of(check_disk, Machine(CPU, tmp_path, quick=True))
        assert lines["space"].verdict == "note"
        assert "29.09 GB" in lines["space"].text
        assert lines["write"].values["size"] <= 10**9 / 4

    def test_no_codec_is_trained_to_measure_a_disk(self, tmp_path, monkeypatch):
        def train(*_, **__):
            raise AssertionError("a refiner takes half a minute")

        monkeypatch.setattr("atoll.encoders.pca.fit_refiner", train)
        assert lines_of(check_disk, Machine(CPU, tmp_path, quick=True))["data"].verdict == "ok"

    def test_a_folder_that_may_not_be_written(self, tmp_path, monkeypatch):
        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

        monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
        line = lines_of(check_disk, Machine(CPU, tmp_path))["write"]
        assert line.verdict == "fail"
        assert "(Permission denied)" in line.text

    def test_a_report_that_cannot_be_written_is_refused_at_once(self, tmp_path, capsys):
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match="cannot write"):
            diagnose(Machine(CPU, tmp_path), tmp_path / "file" / "doctor.json")
        assert capsys.readouterr().out == ""


class TestRunner:
    def run(self, check, limit: float = 60) -> list[Check]:
        return list(run_section(Section("speed", "it", check, limit), Machine(CPU)))

    def test_a_crash_keeps_the_lines_before_it(self, capsys):
        def crash(_):
            yield Check("speed", "first", "ok", "fine")
            raise KeyError("something\nwith more lines")

        first, last = self.run(crash)
        assert first.verdict == "ok"
        assert last.verdict == "fail"
        assert in_one_line(last)
        assert capsys.readouterr().err == ""

    def test_one_that_hangs_is_cut_off(self):
        release = threading.Event()

        def hang(_):
            yield Check("speed", "first", "ok", "fine")
            release.wait(60)

        first, last = self.run(hang, limit=0.2)
        assert not release.is_set()
        release.set()
        assert first.verdict == "ok"
        assert (last.verdict, last.text) == (
            "fail",
            "it: cannot be checked (it had not ended after 0.2 s, and was left)",
        )

    def test_others_go_on(self, capsys):
        sections = [
            Section("speed", "a", lambda _: 1 / 0, 9),
            Section("disk", "b", lambda _: [Check("disk", "b", "ok", "b")], 9),
        ]
        assert not diagnose(Machine(CPU), sections=sections)
        out = capsys.readouterr().out
        assert "  fail  a: cannot be checked (ZeroDivisionError: division by zero)\n" in out
        assert "  ok    b\n" in out


def sleep(_rank: int) -> Iterator[int]:
    yield 1
    time.sleep(600)


def crash(_rank: int) -> Iterator[int]:
    os.abort()
    yield 1


def refuse(_rank: int) -> Iterator[int]:
    raise ValueError("no such thing\nat all")
    yield 1


class TestChildren:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("function", "words"),
        [(crash, "its process crashed (SIGABRT)"), (refuse, "ValueError: no such thing")],
    )
    def test_what_happens_to_one_is_an_error_here(self, function, words):
        with pytest.raises(RuntimeError) as error:
            list(in_children(function, limit=300))
        assert str(error.value) == words

    @pytest.mark.slow
    def test_one_that_hangs_is_ended(self, monkeypatch):
        found = in_children(sleep, limit=300)
        assert next(found) == 1
        [child] = multiprocessing.active_children()
        monkeypatch.setattr(children, "wait", lambda *_: [])  # as after a timeout
        with pytest.raises(RuntimeError, match="no result within 300 s"):
            next(found)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL

    def test_all_reduce_that_fails_is_a_warning_with_one_gpu_or_none(self, monkeypatch):
        def broken(*_, **__):
            raise RuntimeError("gloo cannot find an address")

        monkeypatch.setattr(device_checks, "in_children", broken)
        [line] = check_all_reduce(Machine(CPU))
        assert line.verdict == "warn"
        assert "gloo cannot find an address" in line.text
        [line] = check_compile(Machine(CPU))
        assert (line.verdict, line.values) == ("note", {"works": False})

    def test_all_reduce_alone(self, tmp_path):
        [line] = all_reduce(str(tmp_path / "store"), "gloo", 1, 0)
        assert line.verdict == "ok"


@pytest.mark.slow
def test_compile():
    [line] = check_compile(Machine(CPU))
    assert line.verdict in ("ok", "note")
    assert in_one_line(line)


class TestGpu:
    """On a simulated GPU (simulated_gpu.py)."""

    @pytest.fixture
    def gpu(self, monkeypatch):
        about = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0)
        answers = {
            "get_device_properties": about, "get_device_name": about.name, "mem_get_info": (79 * 10**9, 80 * 10**9),
            "synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": 10**7,
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(device_checks, "PEAK_SIZES", {"cuda": (64, 1 << 10)})
        monkeypatch.setattr(device_checks, "SENT", 1 << 10)
        monkeypatch.setattr(device_checks, "_benchmarked", lambda _: ("xs/8", 4))
        with simulated_gpu():
            yield Machine(CUDA, quick=True)

    def test_machine(self, gpu):
        line = lines_of(check_machine, gpu)["GPU 0"]
        assert line.verdict == "ok"
        assert "A100-SXM4-80GB, 80.00 GB of memory, 79.00 GB free" in line.text

    def test_another_process_on_it(self, gpu, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (40 * 10**9, 80 * 10**9))
        line = lines_of(check_machine, gpu)["GPU 0"]
        assert line.verdict == "warn"
        assert "nvidia-smi" in line.text

    def test_numbers(self, gpu):
        lines = lines_of(check_numbers, gpu)
        assert {line.verdict for line in lines.values()} <= {"ok", "warn"}
        assert lines["DiT in float32"].verdict == lines["DiT in bf16"].verdict == "ok"

    @pytest.mark.slow
    def test_benchmark(self, gpu):
        """A CPU is slow for an A100, and the lines report that."""
        lines = {(line.group, line.name): line for line in benchmark(gpu)}
        assert ("speed", "copies to the GPU") in lines
        products = lines["speed", "products"]
        assert products.verdict == "warn"
        assert "of the published peak of the A100 80 GB; usual causes: another process on the GPU" in products.text
        assert lines["memory", "training"].verdict == "ok"


@pytest.mark.parametrize(("device", "verdict"), [(CPU, "ok"), (CUDA, "warn")])
def test_a_slow_device_is_a_warning_unless_it_is_a_cpu(device, verdict):
    line = device_checks._against_best(Machine(device), "training", "training s/2: 1 s", 1.0, 0.1)
    assert line.verdict == verdict
    assert "10% of the best possible here" in line.text


@pytest.mark.slow
def test_the_papers_expert_on_a_small_machine(monkeypatch):
    monkeypatch.setattr(device_checks, "PAPERS", DiTConfig(**preset("xs/2")))
    line = device_checks._check_room(Machine(CPU), 10**7)
    assert line.verdict == "note"
    assert "train a smaller model" in line.text
    assert device_checks._check_room(Machine(CPU), 10**12).verdict == "ok"


def test_a_cpu_launches_nothing(monkeypatch):
    monkeypatch.setattr(device_checks, "PEAK_SIZES", {"cpu": (32, 1 << 10)})
    peak = device_checks.measure_peak(Machine(CPU), 0)
    assert isinstance(peak, Device)
    assert peak.launch == 0
