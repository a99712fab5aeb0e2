"""All of it with one command, on avatars: `atoll demo`.

Each stage leaves its outputs in OUT and is skipped where they are there, so rerunning the command resumes:

OUT/pictures.tar         what the data set is made of, without a tenth of all combinations of attributes
OUT/data/                prepared and partitioned
OUT/run/                 the experts and the router, each trained by a process of its own
OUT/model/               assembled
OUT/samples/             images of chosen prompts
OUT/evaluation/          images of many prompts, and what was read in them
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.cards import ModelIndex
from atoll.data.builtin import make
from atoll.data.prepare import Settings as DataSettings
from atoll.data.prepare import prepare
from atoll.data.shards import Dataset
from atoll.data.sources import Source
from atoll.data.view import decode_rows
from atoll.diffusion.guidance import Guidance
from atoll.diffusion.solvers import uniform_times
from atoll.encoders.codecs import load_codec
from atoll.errors import InputError, shown
from atoll.experiments.cache import Snapshot
from atoll.experiments.flops import flops_of_step
from atoll.experiments.graph import Graph, ModelNode, PartNode
from atoll.experiments.judge import BATCH, SIZE, DemoPrompts, Judge, are_right, bytes_of
from atoll.experiments.report import Curve, Gallery, Labelled, Traced, write_report
from atoll.partition.partition import partition
from atoll.plots.canvas import save_picture
from atoll.plots.contact_sheet import draw_grid
from atoll.sampling import defaults
from atoll.sampling.ensemble import generate
from atoll.sampling.expert import Prompts
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import get_routing
from atoll.storage import alone, make_folder, read_json, write_json, write_whole
from atoll.training.expert import ExpertTask
from atoll.training.metrics_log import read_metrics
from atoll.training.router import RouterTask
from atoll.training.settings import ExpertSettings, RouterSettings, Settings, as_flags

NUM_EXPERTS = 4
BALANCE = 1.3
LICENSE = "Apache-2.0"
PREVIEWS = 7
ON_A_SHEET = 40
CPU = torch.device("cpu")
AGAIN = "rerun the command"

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

    pictures: int  # of the data set
    expert: ExpertSettings  # of those that learn flow matching
    ddpm: ExpertSettings
    router: RouterSettings
    prompts: int  # with combinations that were seen in training
    prompts_heldout: int
    varied: int  # prompts of which several images are made
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
    """Runs all stages, one line each; returns what results.json says."""
    torch.set_num_threads(1)  # two would round otherwise, and on images of this size they are slower
    make_folder(out)
    with alone(out):
        _check_same(out, plan)
        return _Demo(out, plan, compare).run()


def _check_same(out: Path, plan: Plan) -> None:
    """Refuses a folder that holds another demo, or something else."""
    path, wanted = out / "plan.json", json.loads(json.dumps(asdict(plan)))
    if not path.exists():
        names = sorted(p.name for p in out.iterdir() if not p.name.startswith("."))
        if names:
            raise InputError(f"{out} holds {names[0]} and is not a demo: choose another --out")
        write_json(path, wanted)
    elif read_json(path, f"remove {out}, or choose another --out") != wanted:
        raise InputError(f"{out} was begun with other settings (is it --quick?): remove it, or choose another --out")


class Stages:
    """One line per stage, and the seconds that each has taken, over all runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_json(path, "remove it") if path.exists() else {}
        self.seconds: dict[str, float] = {
            name: value for name, value in content.items() if type(value) in (int, float) and value >= 0
        }

    @contextmanager
    def stage(self, name: str, done: bool = False) -> Iterator[list[str]]:
        """What is put into the list is told in the stage's line; `done`: its outputs are there already."""
        notes: list[str] = []
        start = time.perf_counter()
        try:
            yield notes
        finally:
            if not done:
                self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 2)
                write_json(self.path, self.seconds)
        spent = self.seconds.get(name, 0.0)
        print(f"{name:10}{spent:6.1f} s  {'; '.join([*notes, *(['done before'] if done else [])])}", flush=True)

    def describe(self) -> dict[str, Any]:
        return {"seconds": round(sum(self.seconds.values()), 2), "stages": dict(self.seconds)}


class _Demo:
    def __init__(self, out: Path, plan: Plan, compare: bool) -> None:
        self.out, self.plan, self.data = out, plan, out / "data"
        before = (out / "evaluation" / f"{name}.json" for name in ("homogeneous", "monolith"))
        self.compare = compare or all(path.exists() for path in before)
        self.stages = Stages(out / "stages.json")

    def run(self) -> dict[str, Any]:
        self._prepare()
        self._partition()
        self.sizes = self._read_sizes()
        # A DDPM expert learns more slowly at high noise, so it gets the smallest cluster, with the least to tell apart.
        self.ddpm = min(range(NUM_EXPERTS), key=lambda k: self.sizes[k])
        self.flops = self._count_flops()
        self.parts = self._plan_parts()
        self.models = self._plan_models()
        self._build()
        samples = self._sample()
        judged = self._evaluate()
        results = self._results(judged)
        report = self.out / "report.html"
        with self.stages.stage("report", report.exists()) as notes:  # written anew each time, it is quick
            write_report(report, results, self._gallery(samples, judged["ensemble"]))
            notes.append(str(report))
        results |= self.stages.describe()
        write_json(self.out / "results.json", results)
        _tell(results, report)
        return results

    # --- data -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        path = self.data / "dataset.json"
        done = path.exists() and read_json(path, f"remove {self.data}").get("complete") is True
        with self.stages.stage("prepare", done) as notes:
            if not done:
                tar = self.out / "pictures.tar"
                if not tar.exists():
                    write_whole(tar, self._write_avatars)
                settings = DataSettings(SIZE, near_duplicates="keep", license=LICENSE)
                # Without workers: images this small are read sooner than another process has started.
                prepare(Source(str(tar)), self.data, settings, 0, progress=sys.stderr.isatty())
            about = read_json(path, f"remove {self.data}")
            shape = "x".join(map(str, about["latent_shape"]))
            notes.append(f"{about['counts']['rows']} avatars, latents {shape}; no held-out combination is among them")

    def _write_avatars(self, path: Path) -> None:
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
        with self.stages.stage("partition", done) as notes:
            if not done:
                partition(self.data, NUM_EXPERTS, cap=BALANCE, progress=sys.stderr.isatty())
            notes.append(f"{NUM_EXPERTS} clusters of {', '.join(map(str, self._read_sizes()))}")

    def _read_sizes(self) -> list[int]:
        path = self.data / "clusters" / "partition.json"
        sizes = read_json(path, f"remove {self.data}, and {AGAIN}").get("sizes")
        if not isinstance(sizes, list) or [type(size) for size in sizes] != [int] * NUM_EXPERTS:
            raise InputError(f"{path} is damaged, its 'sizes' are {shown(sizes)}: remove {self.data}, and {AGAIN}")
        return sizes

    # --- parts and models -------------------------------------------------------------------------------------------

    def _count_flops(self) -> dict[str, float]:
        """Returns the FLOPs of training each part: those of a step, counted, times the steps."""
        plan, data = self.plan, Dataset.open(self.data, 0)
        expert = flops_of_step(ExpertTask(data, plan.expert, CPU), plan.expert.batch)
        ddpm = flops_of_step(ExpertTask(data, plan.ddpm, CPU), plan.ddpm.batch)
        router = flops_of_step(RouterTask(Dataset.open(self.data), plan.router, CPU), plan.router.batch)
        flops = {
            f"expert_{k}": (ddpm if k == self.ddpm else expert) * settings.steps
            for k, settings in enumerate(plan.experts(self.ddpm))
        }
        flops["router"] = router * plan.router.steps
        # As the papers compare: as many steps as an expert, and as many samples in each as all of them together.
        self.batch = math.ceil(plan.expert.batch * sum(flops.values()) / (expert * plan.expert.steps))
        flops["twin"] = expert * plan.ddpm.steps
        flops["monolith"] = expert * plan.expert.steps * self.batch / plan.expert.batch
        return flops

    def _plan_parts(self) -> dict[str, PartNode]:
        """The twin stands in for the DDPM expert in the homogeneous ensemble: the same in all but the objective."""
        run, compare, data, plan = self.out / "run", self.out / "compare", self.data, self.plan
        parts = {
            f"expert_{k}": PartNode.expert(f"expert {k} {own.objective}", data, k, run / f"expert_{k}", own)
            for k, own in enumerate(plan.experts(self.ddpm))
        }
        parts["router"] = PartNode.router("router", data, run / "router", plan.router)
        if self.compare:
            twin = replace(plan.ddpm, objective=plan.expert.objective)
            monolith = replace(plan.expert, batch=self.batch)
            name = f"expert {self.ddpm} fm"
            parts["twin"] = PartNode.expert(name, data, self.ddpm, compare / f"expert_{self.ddpm}", twin)
            parts["monolith"] = PartNode.expert("monolith", data, None, compare / "monolith", monolith)
        return parts

    def _plan_models(self) -> dict[str, ModelNode]:
        experts, router = [self.parts[f"expert_{k}"] for k in range(NUM_EXPERTS)], self.parts["router"]
        models = {"ensemble": ModelNode(self.out / "model", self.data, experts, router)}
        if self.compare:
            alike = [self.parts["twin"] if k == self.ddpm else part for k, part in enumerate(experts)]
            folder = self.out / "compare"
            models["homogeneous"] = ModelNode(folder / "homogeneous-model", self.data, alike, router)
            models["monolith"] = ModelNode(folder / "monolith-model", self.data, [self.parts["monolith"]])
        return models

    def _build(self) -> None:
        graph = Graph(list(self.parts.values()), list(self.models.values()))
        with self.stages.stage("train", done := all(part.is_complete for part in graph.parts)) as notes:
            if not done:
                graph.train("cpu")
            kinds = ", ".join(f"{k} {own.objective}" for k, own in enumerate(self.plan.experts(self.ddpm)))
            compared = ", and what to compare with" if self.compare else ""
            notes.append(f"experts {kinds} and a router{compared}, in isolation")
        with self.stages.stage("assemble", all(model.is_complete for model in graph.models)) as notes:
            graph.assemble()
            notes.append(f"{self.models['ensemble'].folder}, {self._hashes()['ensemble'][:12]}")

    def _hashes(self) -> dict[str, str]:
        return {name: ModelIndex.read(model.folder).hash for name, model in self.models.items()}

    # --- images and figures -----------------------------------------------------------------------------------------

    def _sample(self) -> Snapshot:
        """Chosen prompts; and one of each cluster, by each expert alone and by all models, from the same noise."""
        hashes, folder = self._hashes(), self.out / "samples"
        samples = Snapshot.read(folder, "samples", hashes)
        with self.stages.stage("sample", samples is not None) as notes:
            if samples is None:
                samples = self._make_samples(hashes)
                samples.write(folder, "samples")
                images = [Image.fromarray(image) for image in samples.arrays["chosen"]]
                save_picture(draw_grid(images, CHOSEN, across=6), folder / "grid.png")
            notes.append(f"{len(CHOSEN)} prompts; {folder / 'grid.png'}")
        return samples

    def _make_samples(self, hashes: dict[str, str]) -> Snapshot:
        data = Dataset.open(self.data)
        clusters = data.clusters()
        captions = data.texts("caption", [int(np.flatnonzero(clusters == k)[7]) for k in range(NUM_EXPERTS)])
        arrays: dict[str, NDArray[Any]] = {}
        about: dict[str, Any] = {"captions": captions}
        options: dict[str, Any] = {"output_type": "pt", "batch_size": BATCH, "progress": False}
        for name, model in self.models.items():
            pipe = AtollPipeline(model.folder)
            samples = pipe(captions, seed=0, **options)
            arrays[f"same_{name}"] = bytes_of(samples.images)
            if name == "ensemble":
                about["painted_by"] = [int(trace.weights.mean(0).argmax()) for trace in samples.trace]
                for k in range(NUM_EXPERTS):
                    arrays[f"same_expert_{k}"] = _by_one_expert(pipe, captions, k)
                arrays["chosen"] = bytes_of(pipe(CHOSEN, seed=list(range(len(CHOSEN))), **options).images)
                about["chosen_right"] = are_right(arrays["chosen"], CHOSEN)
                arrays |= _traced(pipe)
        return Snapshot(hashes, about, arrays)

    def _evaluate(self) -> dict[str, Snapshot]:
        folder, plan = self.out / "evaluation", self.plan
        data = Dataset.open(self.data)
        prompts = DemoPrompts.choose(data, plan.prompts, plan.prompts_heldout, plan.varied, plan.seeds)
        keys = {name: {"model": hash_} for name, hash_ in self._hashes().items()}
        judged = {name: kept for name, key in keys.items() if (kept := Snapshot.read(folder, name, key))}
        with self.stages.stage("evaluate", len(judged) == len(keys)) as notes:
            judge = Judge(self.data, prompts) if len(judged) < len(keys) else None
            for name, key in keys.items():
                if judge and name not in judged:
                    judged[name] = judge.judge(self.models[name].folder, key)
                    judged[name].write(folder, name)
            notes.append(f"{len(prompts.seen)} prompts, {len(prompts.heldout)} of combinations that nobody has seen")
        return judged

    # --- results ----------------------------------------------------------------------------------------------------

    def _results(self, judged: Mapping[str, Snapshot]) -> dict[str, Any]:
        parts = {name: _describe_part(part.folder, self.flops[name]) for name, part in self.parts.items()}
        names = {part.folder: name for name, part in self.parts.items()}
        models = {
            name: {**judged[name].about["figures"], **_sum_of([parts[names[part.folder]] for part in model.parts])}
            for name, model in self.models.items()
        }
        results: dict[str, Any] = {
            **self.stages.describe(),
            **models.pop("ensemble"),
            "experts": [
                {"objective": own.objective, "cluster": k, "pictures": self.sizes[k], **parts[f"expert_{k}"]}
                for k, own in enumerate(self.plan.experts(self.ddpm))
            ],
            "router": parts["router"],
        }
        if self.compare:
            models["monolith"]["batch"] = self.batch
            results["compare"] = models
        results["aims"] = _aims(results)
        results["settings"] = json.loads(json.dumps(asdict(self.plan)))
        results["commands"] = self._commands()
        return results

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

    def _gallery(self, samples: Snapshot, judged: Snapshot) -> Gallery:
        data, codec = Dataset.open(self.data), load_codec(self.data)
        clusters, arrays = data.clusters(), samples.arrays
        logs = [read_metrics(self.parts[f"expert_{k}"].folder) for k in range(NUM_EXPERTS)]
        same = {name.removeprefix("same_"): images for name, images in arrays.items() if name.startswith("same_")}
        return Gallery(
            clusters=[decode_rows(data, np.flatnonzero(clusters == k)[:ON_A_SHEET], codec) for k in range(NUM_EXPERTS)],
            curves=[Curve(_curve(log, "loss"), _curve(log, "held_out")) for log in logs],
            chosen=list(zip(CHOSEN, arrays["chosen"], samples.about["chosen_right"], strict=True)),
            heldout=list(
                zip(judged.about["heldout"], judged.arrays["heldout"], judged.about["heldout_right"], strict=True)
            ),
            same=[
                Labelled(caption, {name: images[i] for name, images in same.items()})
                for i, caption in enumerate(samples.about["captions"])
            ],
            painted_by=samples.about["painted_by"],
            traces=[
                Traced(caption, *(arrays[f"trace_{i}_{name}"] for name in Traced._fields[1:]))
                for i, caption in enumerate(TRACED)
            ],
        )


# --- images ----------------------------------------------------------------------------------------------------------


def _by_one_expert(pipe: AtollPipeline, captions: Sequence[str], k: int) -> NDArray[np.uint8]:
    """Returns what expert k alone makes of the captions, from seed 0."""
    num = len(captions)
    latents = generate(
        pipe.ensemble, Prompts.encode(pipe.text_encoder, captions, [""] * num), [0] * num, solver=defaults.SOLVER,
        times=uniform_times(defaults.STEPS), routing=get_routing("oracle"), labels=torch.full((num,), k),
        guidance=Guidance(defaults.GUIDANCE),
    )  # fmt: skip
    return bytes_of(pipe.render(latents, "pt"))


def _traced(pipe: AtollPipeline) -> dict[str, NDArray[Any]]:
    """Returns the experts' weights on the way of a few images, all of them mixed, and where each was heading."""
    samples = pipe(TRACED, seed=0, output_type="pt", routing="full", previews=PREVIEWS, progress=False)
    finals = bytes_of(samples.images)
    arrays: dict[str, NDArray[Any]] = {}
    for i, trace in enumerate(samples.trace):
        previews = pipe.render(torch.stack([preview.x0 for preview in trace.previews]), "pt")
        arrays |= {
            f"trace_{i}_times": np.array(trace.times),
            f"trace_{i}_weights": trace.weights.double().numpy(),
            f"trace_{i}_at": np.array([preview.t for preview in trace.previews]),
            f"trace_{i}_previews": bytes_of(previews),
            f"trace_{i}_final": finals[i],
        }
    return arrays


# --- results ---------------------------------------------------------------------------------------------------------


def _curve(log: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in log if line.get(key) is not None]


def _describe_part(folder: Path, flops: float) -> dict[str, Any]:
    training = read_json(folder / "config.json", f"remove {folder} and {AGAIN}")["training"]
    return {
        "steps": training["steps"],
        "parameters": training["parameters"],
        "training_flops": flops,
        "training_seconds": max(line.get("seconds", 0.0) for line in read_metrics(folder)),
        "held_out_loss": training["held_out"]["loss"],
    }


def _tell(results: Mapping[str, Any], report: Path) -> None:
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
    print(f"look: {report}")


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


def _flags(settings: Settings) -> str:
    """Returns those that are not at their defaults."""
    return " ".join(as_flags(settings, type(settings)()))
