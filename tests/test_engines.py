"""Many processes on one machine, small scripts here: what happens when they end, crash or are stopped."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.diffusion.objective import OBJECTIVES, get_objective
from atoll.engines import engine as engines
from atoll.engines.engine import Job, Resources, Run, latest_metrics
from atoll.engines.local import Local, find_slots, in_order
from atoll.engines.train_all import parse_by_number, parse_objectives
from atoll.errors import InputError

CHILD = """
import json, os, signal, sys, time
folder = sys.argv[1] + "/"

def tell(step):
    with open(folder + "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step, "samples_per_second": 350.1, "seconds": 1.0}) + "\\n")

def finish(step=100):
    tell(step)
    with open(folder + "run.json", "w") as file:
        json.dump({"complete": True, "steps_done": step}, file)

def wait_and_save():
    def save(*_):
        open(folder + "saved", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    open(folder + "ready", "w").close()
    time.sleep(60)

with open(folder + "starts.jsonl", "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "time": time.time(), "env": dict(os.environ)}) + "\\n")
with open(folder + "starts.jsonl") as file:
    num_starts = len(file.readlines())
"""

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(engines, "LOOK_EVERY", 0.02)


@pytest.fixture
def job(tmp_path) -> MakeJob:
    """Returns a job whose process runs the given lines."""

    def make(number: int, *lines: str) -> Job:
        script = tmp_path / f"{number}.py"
        script.write_text(CHILD + "\n".join(lines))
        folder = tmp_path / f"{number:02d}"
        return Job(f"expert {number}", [sys.executable, "-I", "-S", str(script), str(folder)], folder, 100)

    return make


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.cluster])])
def run(request) -> Callable[..., list[Run]]:
    """Runs jobs, so many at once, on either engine."""
    if request.param == "local":
        return lambda jobs, num=1: Local("cpu", num).run(jobs, progress=False)
    from atoll.engines.ray import Ray

    engine = Ray(request.getfixturevalue("cluster").address, "cpu")

    def on_ray(jobs: list[Job], num: int = 1) -> list[Run]:
        engine.at_a_time = num
        return engine.run(jobs, progress=False)

    return on_ray


def starts(job: Job) -> list[dict]:
    path = job.folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(*paths: Path) -> None:
    for _ in range(4000):
        if all(path.exists() for path in paths):
            return
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {paths}")


def is_alive(pid: int) -> bool:
    """Returns whether a process is alive; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def outcomes(runs: list[Run]) -> list[tuple[str, str, int, int]]:
    return [(run.job.name, run.status, run.step, run.restarts) for run in runs]


def refused(text: str, num_experts: int = 8) -> str:
    with pytest.raises(InputError) as error:
        parse_objectives(text, num_experts)
    return str(error.value)


class TestObjectives:
    def test_forms(self):
        assert parse_objectives("fm", 3) == ["fm"] * 3
        assert parse_objectives("2ddpm:6fm", 8) == ["ddpm"] * 2 + ["fm"] * 6
        assert parse_objectives("2fm-logit-normal:2v", 4) == ["fm-logit-normal"] * 2 + ["v"] * 2
        assert parse_objectives("1x0:0v:2fm", 3) == ["x0", "fm", "fm"]
        assert parse_objectives("1ddpm: 2 fm :1ddpm:1fm", 5) == ["ddpm", "fm", "fm", "ddpm", "fm"]

    @given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(sorted(OBJECTIVES))), min_size=1))
    def test_counts(self, counts):
        text = ":".join(f"{num}{name}" for num, name in counts)
        total = sum(num for num, _ in counts)
        assert parse_objectives(text, total) == [name for num, name in counts for _ in range(num)]
        assert f"do not give each of {total + 1} experts one" in refused(text, total + 1)

    @given(st.text("0123=*,:fmdpx- \n²", max_size=12))
    def test_anything_else_is_refused(self, text):
        try:
            names = parse_objectives(text, 4)
        except InputError:
            return
        assert len(names) == 4
        assert set(names) <= set(OBJECTIVES)

    def test_refused(self):
        assert "unknown objective 'dppm': did you mean 'ddpm'?" in refused("dppm")
        assert "unknown objective 'dpm'" in refused("2dpm:6fm")
        for text in ("2ddpm:5fm", "2ddpm:fm", "8", "0=ddpm,*=fm", ":"):
            assert "do not give each of 8 experts one: give one name for all, or counts that add up" in refused(text)
        assert "unknown objective '-1=fm'" in refused("-1=fm")
        assert "unknown objective ''" in refused("")


class TestInits:
    def test_forms(self):
        assert parse_by_number(None, 2) == [None, None]
        assert parse_by_number("runs/b=2", 2) == ["runs/b=2"] * 2
        assert parse_by_number("0=a,*=runs/b=2", 3) == ["a", "runs/b=2", "runs/b=2"]
        assert parse_by_number(" 1 = a ", 3) == [None, "a", None]

    @pytest.mark.parametrize("text", ["0=a,0=b", "5=a", "0=a,b"])
    def test_refused(self, text):
        part = text.split(",")[-1]
        with pytest.raises(InputError, match=f"'{part}' in '{text}' must be NUMBER=NAME, with a number from 0 to 2"):
            parse_by_number(text, 3)


class TestSlots:
    def test_cores(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        assert find_slots() == find_slots("cpu") == [{}] * len(os.sched_getaffinity(0))

    def test_gpus(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert find_slots() == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        assert find_slots("cuda") == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}]
        assert find_slots("cuda:1") == [{}]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
        assert find_slots("auto", Resources(gpus=2)) == [
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            {"CUDA_VISIBLE_DEVICES": "2,3"},
        ]

    def test_too_few(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(InputError, match="a job asks for 4 GPUs, and this machine has 2: ask for fewer, or use a"):
            find_slots("auto", Resources(gpus=4))
        with pytest.raises(InputError, match="a job asks for 9999 CPUs, and this machine has"):
            find_slots("cpu", Resources(9999))
        with pytest.raises(InputError, match="a job needs at least one CPU"):
            Resources(0)


class TestRuns:
    def test_all_done(self, job, monkeypatch):
        """No more run at once than there are slots, one thread each, on the slot's GPU."""
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        jobs = [job(k, "time.sleep(0.2)", "finish()", "print(time.time())") for k in range(5)]
        jobs = [replace(each, environment={"EXTRA": "yes"}) for each in jobs]
        results = Local().run(jobs, progress=False)
        assert outcomes(results) == [(f"expert {k}", "done", 100, 0) for k in range(5)]
        spans = []
        for each in jobs:
            (start,) = starts(each)
            for name, value in (("OMP_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1"), ("EXTRA", "yes")):
                assert start["env"][name] == value
            spans.append((start["time"], float((each.folder / "log.txt").read_text()), start["env"]))
        assert {env["CUDA_VISIBLE_DEVICES"] for *_, env in spans} == {"0", "1"}
        for begin, *_ in spans:
            others = [env["CUDA_VISIBLE_DEVICES"] for first, last, env in spans if first <= begin < last]
            assert len(others) == len(set(others)) <= 2

    def test_a_crash_disturbs_no_other(self, run, job):
        kill = "os.kill(os.getpid(), signal.SIGKILL)"
        jobs = [
            job(0, "time.sleep(0.5)", "finish()"),
            job(1, "tell(50 * num_starts)", f"finish() if num_starts > 1 else {kill}"),
            job(2, "time.sleep(0.5)", "finish()"),
        ]
        results = run(jobs, 3)
        assert [(each.status, each.restarts) for each in results] == [("done", 0), ("done", 1), ("done", 0)]
        assert [len(starts(each)) for each in jobs] == [1, 2, 1]
        log = (jobs[1].folder / "log.txt").read_text()
        assert "[Killed (signal 9, most likely for lack of memory): restart 1]" in log
        assert (jobs[0].folder / "log.txt").read_text() == ""

    def test_a_crash_in_a_loop(self, run, job):
        jobs = [job(0, "tell(7)", "raise RuntimeError('out of luck')"), job(1, "finish()")]
        with pytest.raises(InputError) as error:
            run(jobs, 1)
        assert str(error.value) == (
            "expert 0 failed (RuntimeError: out of luck, exit code 1, also when restarted 3 times; "
            f"its log is {jobs[0].folder / 'log.txt'}): "
            "the others have ended, so fix the cause and rerun the same command to resume"
        )
        assert len(starts(jobs[0])) == 4
        assert len(starts(jobs[1])) == 1

    def test_steps_reset_the_count(self, run, job):
        """A run may crash any number of times as long as it progresses."""
        each = job(0, "tell(10 * num_starts)", "finish() if num_starts == 8 else os.kill(os.getpid(), signal.SIGSEGV)")
        assert outcomes(run([each], 1)) == [("expert 0", "done", 100, 7)]

    def test_steps_made_again_do_not(self, run, job):
        """A run that always crashes at the same step makes no progress, however many steps it repeats."""
        rewrite = 'open(folder + "metrics.jsonl", "w").close()'
        each = job(0, rewrite, "tell(10)", "time.sleep(0.1)", "tell(20)", "sys.exit(1)")
        with pytest.raises(InputError, match=r"expert 0 failed \(exit code 1, also when restarted 3 times"):
            run([each], 1)
        assert len(starts(each)) == 4

    def test_mistakes_are_not_restarted(self, run, job):
        jobs = [
            job(0, "finish()"),
            job(1, "print('atoll: unknown size xxl: give s', file=sys.stderr)", "sys.exit(2)"),
            Job("expert 2", ["/nowhere/python"], job(2).folder, 100),
        ]
        with pytest.raises(InputError) as error:
            run(jobs, 1)
        assert "expert 1 failed (unknown size xxl: give s; its log is " in str(error.value)
        assert "; expert 2 failed (cannot start /nowhere/python (No such file or directory)" in str(error.value)
        assert "expert 0" not in str(error.value)
        assert len(starts(jobs[1])) == 1

    def test_a_folder_that_cannot_be_made(self, run, job, tmp_path):
        (tmp_path / "file").touch()
        jobs = [Job("expert 0", ["true"], tmp_path / "file" / "00", 100), job(1, "finish()")]
        with pytest.raises(InputError, match=r"expert 0 failed \(cannot be started: Not a directory"):
            run(jobs, 1)
        assert len(starts(jobs[1])) == 1

    def test_a_log_that_is_none(self, run, job, tmp_path):
        """A FIFO would hang, and a link would write to somebody else's file."""
        jobs = [job(0, "finish()"), job(1, "finish()")]
        for each in jobs:
            each.folder.mkdir()
        os.mkfifo(jobs[0].folder / "log.txt")
        (tmp_path / "precious").write_text("mine")
        (jobs[1].folder / "log.txt").symlink_to(tmp_path / "precious")
        with pytest.raises(InputError, match=r"it is a FIFO.*it is a link that leaves its folder"):
            run(jobs, 1)
        assert (tmp_path / "precious").read_text() == "mine"

    def test_what_a_process_says_last_does_not_reach_the_terminal_raw(self, job, capsys):
        each = job(0, "print('atoll: \\x1b]0;title\\x07 is wrong', file=sys.stderr)", "sys.exit(2)")
        with pytest.raises(InputError):
            Local("cpu", 1).run([each])
        assert "\x1b" not in capsys.readouterr().err

    def test_complete_jobs_are_skipped(self, run, job):
        jobs = [job(0, "finish()"), job(1, "finish(60)"), job(2, "finish()")]
        for each in jobs[:2]:
            each.folder.mkdir()
        (jobs[0].folder / "run.json").write_text('{"complete": true}')
        (jobs[1].folder / "run.json").write_text('{"complete": true, "steps_done": 50}')  # of fewer steps than now
        results = run(jobs, 1)
        assert [len(starts(each)) for each in jobs] == [0, 1, 1]
        assert [each.status for each in results] == ["done", "stopped", "done"]

    def test_one_that_was_stopped(self, run, job):
        results = run([job(0, "tell(40)")], 1)
        assert outcomes(results) == [("expert 0", "stopped", 40, 0)]


class TestMap:
    @pytest.mark.slow
    def test_results_are_in_order_and_mistakes_are_raised(self):
        engine = Local("cpu", 2)
        assert list(engine.map(abs, range(-9, 0))) == [9, 8, 7, 6, 5, 4, 3, 2, 1]
        with pytest.raises(InputError, match="unknown objective 'fn'"):
            list(engine.map(get_objective, ["fm", "fn"]))

    def test_a_process_that_is_killed(self):
        with pytest.raises(InputError, match="a process was killed, perhaps for lack of memory: rerun"):
            list(Local("cpu", 1).map(os._exit, [9]))

    def test_few_are_read_ahead(self):
        """Items may come without end."""
        read = []

        def endless() -> Iterator[int]:
            for number in itertools.count():
                read.append(number)
                yield number

        results = in_order(lambda item: item, lambda item: item, endless(), 4)
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        assert len(read) <= 7


class TestStopping:
    def test_ctrl_c(self, run, job):
        """Running experts save a checkpoint; waiting ones are not started."""
        jobs = [job(k, "wait_and_save()") for k in range(3)]
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

        def interrupt() -> None:
            wait_for(*(each.folder / "ready" for each in jobs[:2]))
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(jobs, 2)
        thread.join()
        assert [(each.folder / "saved").exists() for each in jobs] == [True, True, False]
        assert not starts(jobs[2])
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def test_one_that_does_not_listen_is_killed(self, run, job, monkeypatch):
        monkeypatch.setattr(engines, "GRACE", 0.3)
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        each = job(0, ignore, "open(folder + 'ready', 'w').close()", "time.sleep(60)")

        def interrupt() -> None:
            wait_for(each.folder / "ready")
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run([each], 1)
        thread.join()
        assert not is_alive(starts(each)[0]["pid"])

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
    def test_parent(self, number, job, tmp_path):
        """However the parent ends, its processes save a checkpoint and end."""
        if number == signal.SIGKILL and sys.platform != "linux":
            pytest.skip("only Linux tells a process that its parent is gone")
        jobs = [job(k, "wait_and_save()") for k in range(2)]
        program = "from pathlib import Path\nfrom atoll.engines.local import *\n"
        program += f"Local('cpu', 2).run([{', '.join(map(repr, jobs))}])"
        program = program.replace("PosixPath", "Path")
        parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
        wait_for(*(each.folder / "ready" for each in jobs))
        pids = [starts(each)[0]["pid"] for each in jobs]
        parent.send_signal(number)
        told = parent.communicate()[1]
        wait_for(*(each.folder / "saved" for each in jobs))
        for _ in range(2000):
            if not any(map(is_alive, pids)):
                break
            time.sleep(0.02)
        assert not any(map(is_alive, pids))
        if number == signal.SIGTERM:
            assert "KeyboardInterrupt" in told
            assert "expert 1  stopped       0/100" in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestTable:
    def test_few_lines(self, job, monkeypatch, capsys):
        monkeypatch.setattr(engines, "TELL_EVERY", 0.5)
        steps = ["for step in range(1, 101):", "    tell(step)", "    time.sleep(0.01)", "finish()"]
        jobs = [job(0, *steps), job(1, *steps), job(2, "sys.exit(2)")]
        with pytest.raises(InputError):
            Local("cpu", 2).run(jobs)
        lines = capsys.readouterr().err.splitlines()
        assert 7 <= len(lines) < 100
        assert lines[0] == "expert 0  running       0/100"
        assert any("  loss 0." in line and "  350 samples/s  00:" in line and " left" in line for line in lines)
        assert "expert 1  done          100/100  loss 0.0100" in lines
        assert lines[-1] == "expert 2  failed        0/100  exit code 2"

    def test_bars(self, job, monkeypatch):
        """All jobs are always shown, also at the end."""
        monkeypatch.setattr(engines.sys, "stderr", Terminal())
        jobs = [job(0, "finish()"), job(1, "sys.exit(0 if num_starts > 1 else 1)"), job(2, "finish()")]
        Local("cpu", 1).run(jobs)
        shown = engines.sys.stderr.getvalue()
        for part in ("expert 2   0%|", " 0/100, waiting", "0/100, running", "0/100, restarted 1x", "100/100, done"):
            assert part in shown
        last = [line.split("\r")[-1].split() for line in shown.split("\n")[-4:-1]]
        assert [line[:2] for line in last] == [["expert", str(k)] for k in range(3)]
        assert [word for line in last for word in line if word in ("done", "stopped")] == ["done", "stopped", "done"]

    def test_a_pipe_that_is_gone(self, job, monkeypatch):
        class Gone(io.StringIO):
            def write(self, text: str) -> int:
                raise BrokenPipeError

        monkeypatch.setattr(engines.sys, "stderr", Gone())
        assert Local("cpu", 1).run([job(0, "finish()")])[0].status == "done"


class TestMetrics:
    def test_what_may_be_in_the_file(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        assert latest_metrics(tmp_path) == {}

        def after(text: str, mode: str = "a") -> tuple[float | None, ...]:
            with path.open(mode) as file:
                file.write(text)
            return tuple(latest_metrics(tmp_path).get(name) for name in ("step", "loss", "samples_per_second"))

        assert after('{"step": 20, "loss": 0.5, "samples_per_second": 350.1}\n{"st') == (20, 0.5, 350.1)
        assert after('ep": 40, "loss": 0.4}\n') == (40, 0.4, 350.1)
        assert after('{"step": 50, "held_out": 0.31}\n') == (50, 0.4, 350.1)
        assert after('[]\n\n7\n{"step": "x"}\nnonsense\n{"loss": 9}\n\xff\n') == (50, 0.4, 350.1)
        assert after('{"step": 6{"step": 60, "loss": 0.3}\n{"step": 70, "loss": null}\n') == (70, 0.4, 350.1)
        assert after('{"step": 20, "loss": 0.5}\n', "w") == (20, 0.5, None)  # cut to the step of the last checkpoint
        assert after('{"step": 30, "loss": 0.25}\n') == (30, 0.25, None)
        assert after("", "w") == (None, None, None)
        assert after("[" * 10**5 + '\n{"step": 1, "loss": 1' + "0" * 400 + "}\n", "w") == (1, None, None)
        path.unlink()
        os.mkfifo(path)
        assert latest_metrics(tmp_path) == {}  # without waiting for a writer
