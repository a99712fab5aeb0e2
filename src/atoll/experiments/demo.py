"""All of it with one command, on avatars: `atoll demo`.

Each stage leaves its outputs in OUT and is skipped where they are there, so the same command resumes after any end:

OUT/pictures.tar         what the data set is made of, without a tenth of all combinations of attributes
OUT/data/                prepared and partitioned
OUT/run/                 the experts and the router, each trained by a process of its own
OUT/model/               assembled
OUT/samples/             pictures of chosen prompts
OUT/evaluation/          pictures of many prompts, and what was read in them
OUT/compare/             with --compare: the monolith, the flow matching twin of the DDPM expert, and their models
OUT/results.json, report.html
"""

import io
import json
import math
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.cards import INDEX, ModelIndex
from atoll.data.builtin import make
from atoll.data.prepare import Settings as DataSettings
from atoll.data.prepare import prepare
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.data.view import decode_rows
from atoll.diffusion.guidance import Guidance
from atoll.diffusion.solvers import uniform_times
from atoll.encoders.codecs import load_codec
from atoll.engines.local import Job, find_slots, run_jobs
from atoll.engines.train_all import job_of
from atoll.errors import InputError, shown
from atoll.experiments.flops import flops_of_step
from atoll.experiments.judge import BATCH, SIZE, Asked, Judge, Kept, are_right, bytes_of
from atoll.experiments.report import Curve, Gallery, Labelled, Traced, write_report
from atoll.partition.partition import partition
from atoll.plots.contact_sheet import draw_grid, save_picture
from atoll.sampling import defaults
from atoll.sampling.assemble import assemble
from atoll.sampling.ensemble import generate
from atoll.sampling.expert import Prompts
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import get_routing
from atoll.storage import alone, make_folder, read_json, write_json, write_whole
from atoll.training.expert import ExpertTask
from atoll.training.metrics_log import read_metrics
from atoll.training.router import RouterTask
from atoll.training.settings import ExpertSettings, RouterSettings, Settings

NUM_EXPERTS = 4
BALANCE = 1.3
LICENSE = "Apache-2.0"
PREVIEWS = 7
ON_A_SHEET = 40
CPU = torch.device("cpu")

# Every attribute has its turn, and none of these combinations is held out.
CHOSEN = (
    "a green robot with round glasses and a red cap on a yellow background",
    "a pink ghost with a yellow party hat on a blue background",
    "an orange cat with sunglasses and a blue crown on a green background",
    "a purple owl with a white top hat on a pink background",
    "a blue bear with round glasses and a yellow crown on a black background",
    "a yellow frog with a green cap on a purple background",
    "an orange robot with sunglasses and a black top hat on a blue background",
    "a pink bear with a red crown on a green background",
    "a green frog with sunglasses and a white party hat on a pink background",
    "a blue ghost with round glasses on a yellow background",
    "a purple cat with a green party hat on a yellow background",
    "a yellow owl with sunglasses on a black background",
)
TRACED = (CHOSEN[0], CHOSEN[2], "")

AIMS = {"prompt_accuracy": 0.95, "prompt_accuracy_heldout": 0.85}
NEAR = 1.1  # times the homogeneous ensemble's Frechet distance


@dataclass(frozen=True)
class Plan:
    """How large a demo is."""

    pictures: int
    expert: ExpertSettings  # of those that learn flow matching
    ddpm: ExpertSettings
    router: RouterSettings
    prompts: int  # with combinations that were seen in training
    prompts_heldout: int
    varied: int  # prompts of which several pictures are made
    seeds: int  # so many

    def experts(self, ddpm: int) -> list[ExpertSettings]:
        """Each expert's settings, the DDPM one's at its place."""
        return [self.ddpm if k == ddpm else self.expert for k in range(NUM_EXPERTS)]


_SHARED: dict[str, Any] = {"lr_schedule": "cosine", "save_every": 200, "sample_every": 0}
FULL = Plan(
    pictures=6000,
    expert=ExpertSettings("mini", steps=640, batch=32, lr=3e-3, eval_every=320, **_SHARED),
    ddpm=ExpertSettings(
        "mini", steps=640, batch=32, lr=2e-3, eval_every=320, objective="ddpm", weighting="min-snr", **_SHARED
    ),
    router=RouterSettings("64x3", steps=300, batch=64, lr=2e-3, eval_every=300, **_SHARED),
    prompts=400,
    prompts_heldout=200,
    varied=20,
    seeds=6,
)
_TINY: dict[str, Any] = {"steps": 10, "batch": 16, "lr": 1e-3, "log_every": 2, "save_every": 5, "sample_every": 0}
QUICK = Plan(
    pictures=200,
    expert=ExpertSettings("xs", **_TINY),
    ddpm=ExpertSettings("xs", objective="ddpm", **_TINY),
    router=RouterSettings("xs", **_TINY),
    prompts=24,
    prompts_heldout=12,
    varied=3,
    seeds=3,
)


def run_demo(out: Path, plan: Plan = FULL, compare: bool = False) -> dict[str, Any]:
    """All stages, a line each; returns what results.json says."""
    torch.set_num_threads(1)  # two would round otherwise, and on pictures of this size they are slower
    make_folder(out)
    with alone(out):
        _check_same(out, plan)
        return _Demo(out, plan, compare).go()


def _check_same(out: Path, plan: Plan) -> None:
    """A folder holds one demo; what else lies in it is not ours."""
    path, wanted = out / "plan.json", json.loads(json.dumps(asdict(plan)))
    if not path.exists():
        found = sorted(p.name for p in out.iterdir() if not p.name.startswith("."))
        if found:
            raise InputError(f"{out} holds {found[0]} and is not a demo: choose another --out")
        write_json(path, wanted)
    elif read_json(path, f"remove {out}, or choose another --out") != wanted:
        raise InputError(f"{out} was begun with other settings (is it --quick?): remove it, or choose another --out")


class Stages:
    """A line a stage, and what each has taken, over all runs that it took."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = read_json(path, "remove it") if path.exists() else {}
        self.seconds: dict[str, float] = {
            name: value for name, value in found.items() if type(value) in (int, float) and value >= 0
        }

    @contextmanager
    def stage(self, name: str, done: bool = False) -> Iterator[list[str]]:
        """What is put into the list is told in the stage's line; `done`: its outputs are there already."""
        told: list[str] = []
        begun = time.perf_counter()
        try:
            yield told
        finally:
            if not done:
                self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - begun, 2)
                write_json(self.path, self.seconds)
        spent = self.seconds.get(name, 0.0)
        print(f"{name:10}{spent:6.1f} s  {'; '.join([*told, *(['done before'] if done else [])])}", flush=True)


class _Demo:
    def __init__(self, out: Path, plan: Plan, compare: bool) -> None:
        self.out, self.plan = out, plan
        self.data, self.run, self.model = out / "data", out / "run", out / "model"
        self.others = {name: out / "compare" / f"{name}-model" for name in ("homogeneous", "monolith")}
        self.compare = compare or all((out / "evaluation" / f"{name}.json").exists() for name in self.others)
        self.stages = Stages(out / "stages.json")

    def go(self) -> dict[str, Any]:
        self._prepare()
        self._partition()
        self.sizes = self._read_sizes()
        # A DDPM expert learns more slowly at high noise, so it gets the smallest cluster, with the least to tell apart.
        self.ddpm = min(range(NUM_EXPERTS), key=lambda k: self.sizes[k])
        self.objectives = [settings.objective for settings in self.plan.experts(self.ddpm)]
        self.flops = self._count_flops()
        self._train()
        self._assemble()
        samples = self._sample()
        judged = self._evaluate()
        results = self._results(judged)
        report = self.out / "report.html"
        with self.stages.stage("report", report.exists()) as told:  # written anew each time, it is quick
            write_report(report, results, self._gallery(samples, judged))
            told.append(str(report))
        results |= self._times()
        write_json(self.out / "results.json", results)
        self._tell(results)
        return results

    # --- data -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        about = self.data / "dataset.json"
        done = about.exists() and read_json(about, f"remove {self.data}").get("complete") is True
        with self.stages.stage("prepare", done) as told:
            if not done:
                tar = self.out / "pictures.tar"
                if not tar.exists():
                    write_whole(tar, self._draw_pictures)
                settings = DataSettings(SIZE, near_duplicates="keep", license=LICENSE)
                # Without workers: pictures this small are read sooner than another process has started.
                prepare(Source(str(tar)), self.data, settings, 0, progress=sys.stderr.isatty())
            found = read_json(about, f"remove {self.data}")
            shape = "x".join(map(str, found["latent_shape"]))
            told.append(f"{found['counts']['rows']} avatars, latents {shape}; no held-out combination is among them")

    def _draw_pictures(self, path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for i, example in enumerate(make("avatars", self.plan.pictures, SIZE, heldout="exclude")):
                file = io.BytesIO()
                example.image.save(file, "PNG")
                for suffix, content in ((".png", file.getvalue()), (".txt", example.caption.encode())):
                    member = tarfile.TarInfo(f"{i:06d}{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))

    def _partition(self) -> None:
        done = (self.data / "clusters" / "partition.json").exists()
        with self.stages.stage("partition", done) as told:
            if not done:
                partition(self.data, NUM_EXPERTS, cap=BALANCE, progress=sys.stderr.isatty())
            told.append(f"{NUM_EXPERTS} clusters of {', '.join(map(str, self._read_sizes()))}")

    def _read_sizes(self) -> list[int]:
        path = self.data / "clusters" / "partition.json"
        sizes = read_json(path, f"remove {self.data}, and run the demo again").get("sizes")
        if not isinstance(sizes, list) or [type(size) for size in sizes] != [int] * NUM_EXPERTS:
            raise InputError(f"{path} is damaged, its 'sizes' are {shown(sizes)}: remove {self.data}, and run it again")
        return sizes

    # --- training ---------------------------------------------------------------------------------------------------

    def _count_flops(self) -> dict[str, float]:
        """Of training each: a step's, counted, times the steps. The monolith's batch is as large as these pay for."""
        data = Dataset.open(self.data, 0)
        expert = flops_of_step(ExpertTask(data, self.plan.expert, CPU), self.plan.expert.batch)
        ddpm = flops_of_step(ExpertTask(data, self.plan.ddpm, CPU), self.plan.ddpm.batch)
        whole = Dataset.open(self.data)
        router = flops_of_step(RouterTask(whole, self.plan.router, CPU), self.plan.router.batch)
        experts = [
            (ddpm if k == self.ddpm else expert) * settings.steps
            for k, settings in enumerate(self.plan.experts(self.ddpm))
        ]
        total = sum(experts) + router * self.plan.router.steps
        usual = self.plan.expert
        # As the papers compare: as many steps as an expert, and as many samples in each as all of them together.
        self.monolith = replace(usual, batch=math.ceil(usual.batch * total / (expert * usual.steps)))
        return {
            **{f"expert_{k}": value for k, value in enumerate(experts)},
            "router": router * self.plan.router.steps,
            "twin": expert * self._twin.steps,
            "monolith": expert * self.monolith.steps * self.monolith.batch / usual.batch,
        }

    @property
    def _twin(self) -> ExpertSettings:
        """The homogeneous ensemble's expert of the DDPM expert's cluster: the same in all but the objective."""
        return replace(self.plan.ddpm, objective=self.plan.expert.objective)

    def _jobs(self) -> list[Job]:
        """The longest first, so that no core idles long."""
        jobs = []
        if self.compare:
            folder = self.out / "compare"
            jobs.append(self._job("monolith", None, self.monolith, folder / "monolith"))
            jobs.append(self._job(f"expert {self.ddpm} fm", self.ddpm, self._twin, folder / f"expert_{self.ddpm}"))
        jobs += [
            self._job(f"expert {k} {settings.objective}", k, settings, self.run / f"expert_{k}")
            for k, settings in enumerate(self.plan.experts(self.ddpm))
        ]
        jobs.append(job_of("router", ["train-router", str(self.data)], self.run / "router", self.plan.router))
        return jobs

    def _job(self, name: str, cluster: int | None, settings: ExpertSettings, folder: Path) -> Job:
        where = "all" if cluster is None else str(cluster)
        return job_of(name, ["train", str(self.data), "--cluster", where], folder, settings)

    def _train(self) -> None:
        jobs = self._jobs()
        done = all(_is_complete(job.folder) for job in jobs)
        with self.stages.stage("train", done) as told:
            if not done:
                run_jobs(jobs, find_slots("cpu"), environment={"OMP_NUM_THREADS": "1"})
            kinds = ", ".join(f"{k} {kind}" for k, kind in enumerate(self.objectives))
            told.append(
                f"experts {kinds} and a router{', and what to compare with' if self.compare else ''}, in isolation"
            )

    def _assemble(self) -> None:
        run = [self.run / f"expert_{k}" for k in range(NUM_EXPERTS)]
        parts: dict[Path, list[Path]] = {self.model: run}
        if self.compare:
            twin = self.out / "compare" / f"expert_{self.ddpm}"
            parts[self.others["homogeneous"]] = [twin if k == self.ddpm else run[k] for k in range(NUM_EXPERTS)]
            parts[self.others["monolith"]] = [self.out / "compare" / "monolith"]
        done = all((folder / INDEX).exists() for folder in parts)
        with self.stages.stage("assemble", done) as told:
            for folder, experts in parts.items():
                if not (folder / INDEX).exists():
                    assemble(experts, self.run / "router" if len(experts) > 1 else None, folder, self.data)
            told.append(f"{self.model}, {ModelIndex.read(self.model).hash[:12]}")

    # --- pictures and figures ---------------------------------------------------------------------------------------

    @property
    def _models(self) -> dict[str, Path]:
        return {"ensemble": self.model, **(self.others if self.compare else {})}

    def _sample(self) -> Kept:
        """Chosen prompts; and one of each cluster, by each expert alone and by all models, from the same noise."""
        hashes = {name: ModelIndex.read(folder).hash for name, folder in self._models.items()}
        folder = self.out / "samples"
        found = Kept.read(folder, "samples", hashes)
        with self.stages.stage("sample", found is not None) as told:
            if found is None:
                found = self._make_samples(hashes)
                found.write(folder, "samples")
                images = [Image.fromarray(picture) for picture in found.arrays["chosen"]]
                save_picture(draw_grid(images, CHOSEN), folder / "grid.png")
            told.append(f"{len(CHOSEN)} prompts; {folder / 'grid.png'}")
        return found

    def _chosen(self, samples: Kept) -> list[tuple[str, NDArray[np.uint8], bool]]:
        return list(zip(CHOSEN, samples.arrays["chosen"], samples.about["chosen_right"], strict=True))

    def _make_samples(self, hashes: dict[str, str]) -> Kept:
        captions = self._one_of_each_cluster()
        arrays: dict[str, NDArray[Any]] = {}
        about: dict[str, Any] = {"captions": captions}
        for name, folder in self._models.items():
            pipe = AtollPipeline(folder)
            made = pipe(captions, seed=0, output_type="pt", batch_size=BATCH, progress=False)
            arrays[f"same_{name}"] = bytes_of(made.images)
            if name == "ensemble":
                about["painted_by"] = [int(trace.weights.mean(0).argmax()) for trace in made.trace]
                for k in range(NUM_EXPERTS):
                    arrays[f"same_expert_{k}"] = _by_one_expert(pipe, captions, k)
                chosen = pipe(CHOSEN, seed=list(range(len(CHOSEN))), output_type="pt", batch_size=BATCH, progress=False)
                arrays["chosen"] = bytes_of(chosen.images)
                about["chosen_right"] = are_right(arrays["chosen"], CHOSEN)
                arrays |= _traced(pipe)
        return Kept(hashes, about, arrays)

    def _one_of_each_cluster(self) -> list[str]:
        data = Dataset.open(self.data)
        clusters = data.clusters()
        return data.texts("caption", [int(np.flatnonzero(clusters == k)[7]) for k in range(NUM_EXPERTS)])

    def _evaluate(self) -> dict[str, Kept]:
        folder, plan = self.out / "evaluation", self.plan
        prompts = Asked.of(Dataset.open(self.data), plan.prompts, plan.prompts_heldout, plan.varied, plan.seeds)
        keys = {name: {"model": ModelIndex.read(model).hash} for name, model in self._models.items()}
        found = {name: Kept.read(folder, name, key) for name, key in keys.items()}
        with self.stages.stage("evaluate", all(found.values())) as told:
            judge = None
            for name, kept in found.items():
                if kept is None:
                    judge = judge or Judge(self.data, prompts)
                    fresh = judge.judge(self._models[name], keys[name])
                    fresh.write(folder, name)
                    found[name] = fresh
            told.append(f"{len(prompts.seen)} prompts, {len(prompts.heldout)} of combinations that nobody has seen")
        return {name: kept for name, kept in found.items() if kept is not None}

    # --- telling ----------------------------------------------------------------------------------------------------

    def _results(self, judged: Mapping[str, Kept]) -> dict[str, Any]:
        experts = [self._about(self.run / f"expert_{k}", f"expert_{k}") for k in range(NUM_EXPERTS)]
        router = self._about(self.run / "router", "router")
        parts = [*experts, router]
        found: dict[str, Any] = {
            **self._times(),
            **judged["ensemble"].about["figures"],
            **_sum_of(parts),
            "experts": [
                {"objective": self.objectives[k], "cluster": k, "pictures": self.sizes[k], **part}
                for k, part in enumerate(experts)
            ],
            "router": router,
        }
        if self.compare:
            twin = self._about(self.out / "compare" / f"expert_{self.ddpm}", "twin")
            monolith = self._about(self.out / "compare" / "monolith", "monolith")
            alike = [twin if k == self.ddpm else part for k, part in enumerate(experts)]
            found["compare"] = {
                "homogeneous": {**judged["homogeneous"].about["figures"], **_sum_of([*alike, router])},
                "monolith": {
                    **judged["monolith"].about["figures"],
                    **_sum_of([monolith]),
                    "batch": self.monolith.batch,
                },
            }
        found["aims"] = _aims(found)
        found["settings"] = json.loads(json.dumps(asdict(self.plan)))
        found["commands"] = self._commands()
        return found

    def _times(self) -> dict[str, Any]:
        return {"seconds": round(sum(self.stages.seconds.values()), 2), "stages": dict(self.stages.seconds)}

    def _about(self, folder: Path, name: str) -> dict[str, Any]:
        training = read_json(folder / "config.json", f"remove {folder} and run the demo again")["training"]
        return {
            "steps": training["steps"],
            "parameters": training["parameters"],
            "training_flops": self.flops[name],
            "training_seconds": max(line.get("seconds", 0.0) for line in read_metrics(folder)),
            "held_out_loss": training["held_out"]["loss"],
        }

    def _commands(self) -> list[str]:
        """The stages one by one, by hand."""
        experts = [
            f"atoll train data --cluster {k} {_flags(settings)} --out run/expert_{k}"
            for k, settings in enumerate(self.plan.experts(self.ddpm))
        ]
        return [
            f"atoll prepare {self.out}/pictures.tar --near-duplicates keep --license {LICENSE} --out data",
            f"atoll partition data --experts {NUM_EXPERTS} --balance {BALANCE}",
            *experts,
            f"atoll train-router data {_flags(self.plan.router)} --out run/router",
            "atoll assemble run --data data --out model",
            f'atoll sample model "{CHOSEN[0]}" --trace',
        ]

    def _gallery(self, samples: Kept, judged: Mapping[str, Kept]) -> Gallery:
        data = Dataset.open(self.data)
        clusters, codec = data.clusters(), load_codec(self.data)
        sheets = [decode_rows(data, np.flatnonzero(clusters == k)[:ON_A_SHEET], codec) for k in range(NUM_EXPERTS)]
        curves = []
        for k in range(NUM_EXPERTS):
            lines = read_metrics(self.run / f"expert_{k}")
            curves.append(
                Curve(
                    [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None],
                    [(line["step"], line["held_out"]) for line in lines if line.get("held_out") is not None],
                )
            )
        mine, arrays = judged["ensemble"], samples.arrays
        same = [
            Labelled(caption, {name[5:]: pictures[i] for name, pictures in arrays.items() if name.startswith("same_")})
            for i, caption in enumerate(samples.about["captions"])
        ]
        return Gallery(
            clusters=sheets,
            curves=curves,
            chosen=self._chosen(samples),
            heldout=list(
                zip(mine.about["heldout"], mine.arrays["heldout"], mine.about["heldout_right"], strict=True)
            ),
            same=same,
            painted_by=samples.about["painted_by"],
            traces=[
                Traced(
                    caption, arrays[f"trace_{i}_times"], arrays[f"trace_{i}_weights"], arrays[f"trace_{i}_at"],
                    arrays[f"trace_{i}_previews"], arrays[f"trace_{i}_final"],
                )
                for i, caption in enumerate(TRACED)
            ],
        )  # fmt: skip

    def _tell(self, results: Mapping[str, Any]) -> None:
        print(f"{'in all':10}{results['seconds']:6.1f} s")
        print(
            f"every attribute right in {results['prompt_accuracy']:.1%} of samples, "
            f"{results['prompt_accuracy_heldout']:.1%} for held-out combinations; Frechet distance "
            f"{results['frechet']:.3f}"
        )
        for name, other in results.get("compare", {}).items():
            figures = f"{other['prompt_accuracy']:.1%}, {other['prompt_accuracy_heldout']:.1%}, {other['frechet']:.3f}"
            print(f"{name}: {figures}")
        for aim in results["aims"]:
            if not aim["reached"]:
                print(f"not reached: {aim['what']}, but {aim['found']:.3f}")
        print(f"look: {self.out / 'report.html'}")


# --- pictures ------------------------------------------------------------------------------------------------------


def _by_one_expert(pipe: AtollPipeline, captions: Sequence[str], k: int) -> NDArray[np.uint8]:
    """What expert k alone makes of the captions, from seed 0."""
    num = len(captions)
    latents = generate(
        pipe.ensemble, Prompts.encode(pipe.text_encoder, captions, [""] * num), [0] * num, solver=defaults.SOLVER,
        times=uniform_times(defaults.STEPS), routing=get_routing("oracle"), labels=torch.full((num,), k),
        guidance=Guidance(defaults.GUIDANCE),
    )  # fmt: skip
    return bytes_of(pipe.render(latents, "pt"))


def _traced(pipe: AtollPipeline) -> dict[str, NDArray[Any]]:
    """The weights of the experts on the way of a few pictures, all of them mixed, and where each was heading."""
    made = pipe(TRACED, seed=0, output_type="pt", routing="full", previews=PREVIEWS, progress=False)
    finals = bytes_of(made.images)
    arrays: dict[str, NDArray[Any]] = {}
    for i, trace in enumerate(made.trace):
        previews = pipe.render(torch.stack([preview.x0 for preview in trace.previews]), "pt")
        arrays |= {
            f"trace_{i}_times": np.array(trace.times),
            f"trace_{i}_weights": trace.weights.double().numpy(),
            f"trace_{i}_at": np.array([preview.t for preview in trace.previews]),
            f"trace_{i}_previews": bytes_of(previews),
            f"trace_{i}_final": finals[i],
        }
    return arrays


# --- telling ------------------------------------------------------------------------------------------------------


def _sum_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in ("parameters", "training_flops", "training_seconds")}


def _aims(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was wanted of the figures, and whether it was reached."""
    names = {
        "prompt_accuracy": "prompt accuracy",
        "prompt_accuracy_heldout": "prompt accuracy on held-out combinations",
    }
    aims = [
        (f"{names[key]} of at least {least}", results[key], least, results[key] >= least) for key, least in AIMS.items()
    ]
    if "compare" in results:
        distance = results["frechet"]
        monolith, alike = (results["compare"][name]["frechet"] for name in ("monolith", "homogeneous"))
        aims.append(("a Frechet distance of at most the monolith's", distance, monolith, distance <= monolith))
        near = NEAR * alike
        aims.append(("a Frechet distance within 10% of the homogeneous ensemble's", distance, near, distance <= near))
    return [dict(zip(("what", "found", "wanted", "reached"), aim, strict=True)) for aim in aims]


def _is_complete(folder: Path) -> bool:
    path = folder / "run.json"
    return path.exists() and read_json(path, f"remove {folder}, and run the demo again").get("complete") is True


def _flags(settings: Settings) -> str:
    """Those that are not at their defaults."""
    usual = type(settings)()
    told = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in told.items() if value != getattr(usual, name)
    )
