"""`atoll demo` from end to end with tiny settings: its outputs, resuming, and reproducibility."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll.data.builtin.avatars import attributes_of, is_heldout
from atoll.data.shards import Dataset
from atoll.errors import InputError
from atoll.experiments import demo
from atoll.experiments.cache import Snapshot
from atoll.experiments.demo import CHOSEN, FULL, NUM_EXPERTS, QUICK, Judge, Stages, run_demo

COMMAND = [sys.executable, "-m", "atoll.cli.main", "demo", "--quick", "--compare", "--out"]
STAGES = ["prepare", "partition", "train", "assemble", "sample", "evaluate", "report"]
MOST = 240  # seconds that one run may take on a busy machine


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(out: Path) -> str:
    process = start(out)
    try:
        told, errors = process.communicate(timeout=MOST)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return told


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def without_times(values: Any) -> Any:
    if isinstance(values, dict):
        return {
            k: without_times(v) for k, v in values.items() if "seconds" not in k and k not in ("stages", "commands")
        }
    return [without_times(value) for value in values] if isinstance(values, list) else values


def processes_in(folder: Path) -> list[int]:
    """Returns the processes that were started for this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (path / "cmdline").read_text() and int(path.name) != os.getpid():
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, str]:
    """Returns an undisturbed demo and its output."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    return out, finish(out)


@pytest.mark.timeout(600)
@pytest.mark.slow
class TestDemo:
    def test_a_line_a_stage(self, first):
        _, told = first
        lines = told.splitlines()
        for stage, line in zip(STAGES, lines, strict=False):
            assert re.fullmatch(rf"{stage} +\d+\.\d s  .*", line)
        assert lines[len(STAGES)].startswith("in all")
        assert lines[-2].endswith("report.html")
        assert lines[-1].startswith("paint: atoll serve ")

    def test_results(self, first):
        results = results_of(first[0])
        assert list(results["stages"]) == STAGES
        assert results["seconds"] == pytest.approx(sum(results["stages"].values()), abs=0.1)
        for figures in (results, results["compare"]["monolith"], results["compare"]["homogeneous"]):
            for name in ("prompt_accuracy", "prompt_accuracy_heldout"):
                assert 0 <= figures[name] <= 1
            assert figures["num_prompts"] == QUICK.prompts
            assert figures["num_prompts_heldout"] == QUICK.prompts_heldout
            for name in ("frechet", "diversity", "parameters", "training_flops", "flops_an_image"):
                assert figures[name] > 0
            assert set(figures["attribute_accuracy"]) == set(attributes_of(CHOSEN[0]))
        assert {aim["reached"] for aim in results["aims"]} <= {True, False}
        assert len(results["aims"]) == 4

    def test_commands_tell_what_is_not_usual(self, first):
        commands = results_of(first[0])["commands"]
        (command,) = (command for command in commands if "--objective ddpm" in command)
        assert re.match(r"atoll train data --cluster [0-3] --", command)
        assert re.search(r"--steps 10 .*--out run/expert_[0-3]$", command)
        assert "--ema" not in command

    def test_one_ddpm_expert_of_the_smallest_cluster(self, first):
        experts = results_of(first[0])["experts"]
        ddpm = [expert for expert in experts if expert["objective"] == "ddpm"]
        assert len(experts) == NUM_EXPERTS
        assert [expert["pictures"] for expert in ddpm] == [min(expert["pictures"] for expert in experts)]

    def test_the_monolith_has_as_many_flops(self, first):
        results = results_of(first[0])
        monolith = results["compare"]["monolith"]
        picture = monolith["training_flops"] / monolith["batch"]  # one more in every step
        assert 0 <= monolith["training_flops"] - results["training_flops"] < picture

    def test_held_out_combinations_are_not_in_the_data(self, first):
        data = Dataset.open(first[0] / "data")
        assert not any(is_heldout(attributes_of(caption)) for caption in data.strings("caption"))
        prompts = Judge(data.folder, QUICK)
        assert all(is_heldout(attributes_of(caption)) for caption in prompts.heldout)
        assert not set(prompts.seen) & set(prompts.heldout)
        assert len(set(prompts.heldout)) == QUICK.prompts_heldout

    def test_a_second_run_skips_and_gives_the_same_numbers(self, first):
        out, _ = first
        before, content = results_of(out), (out / "report.html").read_bytes()
        begun = time.monotonic()
        told = finish(out)
        assert time.monotonic() - begun < 30
        assert [line.endswith("done before") for line in told.splitlines()[: len(STAGES)]] == [True] * len(STAGES)
        assert results_of(out) == before
        assert len((out / "report.html").read_bytes()) == pytest.approx(len(content), abs=100)  # its timings differ

    @pytest.mark.slow
    def test_images_drawn_by_several_processes(self, first, monkeypatch):
        """They equal those of one process, in order."""
        prompts = ([f"a {kind}" for kind in ("robot", "ghost", "cat", "owl", "frog")], ["a bear", "a blue bear"])
        alone, _, flops = demo._draw_all(first[0] / "model", prompts)
        monkeypatch.setattr(demo, "BATCH", 2)
        together, seconds, again = demo._draw_all(first[0] / "model", prompts)
        assert [len(images) for images in together] == [5, 2]
        assert seconds > 0
        assert again == flops > 0
        for ours, theirs in zip(together, alone, strict=True):
            assert np.abs(ours.astype(int) - theirs).max() <= 1, "a batch may round otherwise"

    @pytest.mark.slow
    def test_goes_on_after_kill_9(self, first, tmp_path):
        out = tmp_path / "demo"
        process = start(out)
        deadline = time.monotonic() + MOST
        while not any((out / "run").glob("*/run.json")):  # in the middle of training
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (out / "results.json").exists()
        while processes_in(out):  # the experts save checkpoints and exit
            assert time.monotonic() < deadline
            time.sleep(0.1)
        finish(out)
        assert without_times(results_of(out)) == without_times(results_of(first[0]))

    def test_the_report_needs_nothing_else(self, first):
        page = (first[0] / "report.html").read_text(encoding="utf-8")
        around = re.sub(r'"data:image/png;base64,[A-Za-z0-9+/=]+"', '""', page)
        assert not re.search(r"https?:|//|@import|url\(|<script|srcset|data:image", around)
        sources = re.findall(r'\b(?:src|href)="([^"]*)"', page)
        assert len(sources) > 40
        assert all(source.startswith("data:") for source in sources)
        assert page.count("<img") == page.count('src="data:image/png;base64,')

    def test_the_report_tells_what_was_missed(self, first):
        page, results = (first[0] / "report.html").read_text(encoding="utf-8"), results_of(first[0])
        assert page.count("class=missed") == sum(not aim["reached"] for aim in results["aims"]) > 0

    def test_students_of_few_steps_have_their_place(self, first, tmp_path):
        """Existing parts are not made again."""
        out = tmp_path / "demo"
        shutil.copytree(first[0], out)
        before = (out / "model" / "model_index.json").stat().st_mtime_ns
        figures = run_demo(out, QUICK, few_steps=True)["few_steps"]
        assert list(figures) == ["steps_4", "steps_2", "steps_1"]
        assert figures["steps_1"]["flops_an_image"] < figures["steps_4"]["flops_an_image"] / 3
        assert (out / "model" / "model_index.json").stat().st_mtime_ns == before
        page = (out / "report.html").read_text(encoding="utf-8")
        assert "In four steps, two, and one" in page
        assert "1 step: " in page
        assert "In four steps" not in (first[0] / "report.html").read_text(encoding="utf-8")

    def test_other_settings_are_refused(self, first):
        with pytest.raises(InputError, match="was begun with other settings"):
            run_demo(first[0], replace(QUICK, pictures=201))


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="letter.txt and no plan.json: choose another"):
        run_demo(tmp_path, QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "demo").write_text("")
    with pytest.raises(InputError, match="choose another --out"):
        run_demo(tmp_path / "demo", QUICK)


def test_times_add_up_over_runs(tmp_path, capsys):
    for _ in range(2):
        with Stages(tmp_path / "stages.json").stage("train") as told:
            told.append("half")
            time.sleep(0.06)
    with Stages(tmp_path / "stages.json").stage("train", done=True):
        pass
    assert 0.12 <= Stages(tmp_path / "stages.json").seconds["train"] < 5
    assert capsys.readouterr().out.splitlines()[-1].endswith("done before")


def test_what_was_kept_is_read_as_data(tmp_path):
    kept = Snapshot({"model": "a"}, {"figures": {}}, {"seen": np.arange(6).reshape(2, 3)})
    kept.write(tmp_path, "one")
    found = Snapshot.read(tmp_path, "one", {"model": "a"})
    assert found is not None
    assert found.arrays["seen"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert Snapshot.read(tmp_path, "one", {"model": "b"}) is None
    for content in ("", "[1]", '{"key": {"model": "a"}, "about": [1]}', '{"key": {"model": "a"}}'):
        save_file({"seen": np.arange(6)}, tmp_path / "one.safetensors", {"content": content})
        assert Snapshot.read(tmp_path, "one", {"model": "a"}) is None
    (tmp_path / "one.safetensors").unlink()
    os.mkfifo(tmp_path / "one.safetensors")
    with pytest.raises(InputError, match="it is a FIFO.*: remove it, and rerun the command"):
        Snapshot.read(tmp_path, "one", {"model": "a"})


def test_what_is_shown_was_seen():
    assert not any(is_heldout(attributes_of(caption)) for caption in CHOSEN)
    for name in attributes_of(CHOSEN[0]):
        assert len({attributes_of(caption)[name] for caption in CHOSEN}) > 2


def test_enough_prompts():
    assert FULL.prompts >= 400
    assert (FULL.expert.objective, FULL.ddpm.objective) == ("fm", "ddpm")
