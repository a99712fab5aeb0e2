"""`atoll demo`: runs the whole pipeline on avatars with one command.

Each stage writes its outputs to OUT and is skipped if they exist, so rerunning the command resumes:

OUT/pictures.tar         the source images, without a tenth of all combinations of attributes
OUT/data/                the prepared and partitioned data set
OUT/run/                 the experts and the router, each trained by a process of its own
OUT/model/               the assembled model
OUT/samples/             images of chosen prompts
OUT/evaluation/          images of many prompts, and the attributes read from them
OUT/compare/             with --compare: the monolith, the flow-matching twin of the DDPM expert, and their models
OUT/few_steps/           with --few-steps: students of the ensemble for 4, 2 and 1 steps, and their models
OUT/results.json, report.html
"""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import combinations
from operator import call
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.cards import PARTITION, DatasetCard, ModelIndex, PartitionCard
from atoll.data.builtin import make
from atoll.data.builtin.avatars import ATTRIBUTES, attributes_of, draw_avatar, read_avatars
from atoll.data.download import write_samples
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.shards import TRAIN, Dataset
from atoll.data.sources import Source
from atoll.data.view import decode_rows
from atoll.diffusion.solvers import uniform_times
from atoll.encoders.codec import to_uint8
from atoll.encoders.codecs import load_codec
from atoll.encoders.features import make_features
from atoll.engines.local import Local
from atoll.engines.train_all import Part
from atoll.errors import plural
from atoll.experiments.cache import Snapshot
from atoll.experiments.flops import counting, training_flops
from atoll.experiments.graph import ModelNode, assemble_all, begun, train
from atoll.experiments.images import COUNTED, Images, bytes_of, tensor_of
from atoll.experiments.report import Points, render
from atoll.metrics.frechet import Moments, frechet_distance
from atoll.metrics.labels import are_right
from atoll.partition.partition import partition
from atoll.plots.canvas import save_image
from atoll.plots.contact_sheet import draw_grid
from atoll.sampling.ensemble import generate
from atoll.sampling.expert import Prompts
from atoll.sampling.folder import png_of
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import get_routing
from atoll.sampling.settings import Sampling
from atoll.storage import read_json, write_json, write_text, write_whole
from atoll.training.metrics_log import read_metrics
from atoll.training.settings import DistillSettings, ExpertSettings, RouterSettings, as_flags

NUM_EXPERTS = 4
FEW_STEPS = (4, 2, 1)
BALANCE = 1.3
LICENSE = "Apache-2.0"
PREVIEWS = 7
ON_A_SHEET = 40
SIZE = 32  # of the images
BATCH = 100  # images per batch; each depends on its own seed alone
AS_TENSORS: dict[str, Any] = {"output_type": "pt", "batch_size": BATCH, "progress": False}

# These cover every attribute, and none of the combinations is held out.
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


@dataclass(frozen=True)
class Plan:
    """The size of a demo."""

    pictures: int  # in the data set
    expert: ExpertSettings  # of the flow-matching experts
    ddpm: ExpertSettings
    router: RouterSettings
    prompts: int  # with combinations that were seen in training
    prompts_heldout: int
    varied: int  # prompts with several images each
    seeds: int  # images of each of these


_LONG: dict[str, Any] = {"lr_schedule": "cosine", "save_every": 200, "sample_every": 0}
_EXPERT = ExpertSettings("mini", steps=520, batch=32, lr=8e-3, warmup=50, eval_every=520, **_LONG)
_DDPM = replace(_EXPERT, lr=5e-3, objective="ddpm", weighting="min-snr")
_ROUTER = RouterSettings("64x3", steps=300, batch=64, lr=2e-3, eval_every=300, **_LONG)
FULL = Plan(6000, _EXPERT, _DDPM, _ROUTER, prompts=400, prompts_heldout=200, varied=20, seeds=6)
_TINY: dict[str, Any] = {"steps": 10, "batch": 16, "lr": 1e-3, "log_every": 2, "save_every": 5, "sample_every": 0}
_XS, _XS_ROUTER = ExpertSettings("xs", **_TINY), RouterSettings("xs", **_TINY)
QUICK = Plan(200, _XS, replace(_XS, objective="ddpm"), _XS_ROUTER, prompts=24, prompts_heldout=12, varied=3, seeds=3)


def run_demo(out: Path, plan: Plan = FULL, compare: bool = False, few_steps: bool = False) -> dict[str, Any]:
    """Runs all stages, printing one line each; returns the content of results.json."""
    torch.set_num_threads(1)  # two threads round differently, and are slower on images of this size
    with begun(out, "plan.json", asdict(plan)):
        return _Demo(out, plan, compare, few_steps).run()


class Stages:
    """Prints one line per stage, and records the seconds that each took, summed over all runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = read_json(path, "remove it") if path.exists() else {}

    @contextmanager
    def stage(self, name: str, done: bool = False) -> Iterator[list[str]]:
        """Times a stage; yields a list for the notes in its line. `done` means that its outputs exist already."""
        notes: list[str] = []
        start = time.perf_counter()
        try:
            yield notes
        finally:
            if not done:
                self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 2)
                write_json(self.path, self.seconds)
        print(
            f"{name:10}{self.seconds.get(name, 0):6.1f} s  {'; '.join([*notes, *['done before'] * done])}", flush=True
        )

    def describe(self) -> dict[str, Any]:
        return {"seconds": round(sum(self.seconds.values()), 2), "stages": dict(self.seconds)}


class _Demo:
    def __init__(self, out: Path, plan: Plan, compare: bool, few_steps: bool) -> None:
        self.out, self.plan, self.data = out, plan, out / "data"
        self.few_steps = few_steps or (out / "evaluation" / "steps_1.safetensors").exists()
        self.compare = compare or (out / "evaluation" / "monolith.safetensors").exists()
        self.stages = Stages(out / "stages.json")
        self._make_data()
        self.sizes = PartitionCard.read(self.data / "clusters").sizes
        self.models = self._plan_models()
        self.experts = self.models["ensemble"].parts[:NUM_EXPERTS]

    def run(self) -> dict[str, Any]:
        self._train()
        hashes = {name: ModelIndex.read(model.folder).hash for name, model in self.models.items()}
        samples, judged = self._sample(hashes), self._evaluate(hashes)
        results = self._results(judged)
        students = self._distill() if self.few_steps else {}
        results |= {"few_steps": {name: part.about["figures"] for name, part in students.items()}} if students else {}
        report = self.out / "report.html"
        with self.stages.stage("report", report.exists()) as notes:  # always rewritten, since it is quick
            curves = [_curves(part) for part in self.experts]
            write_text(report, render(results, samples, judged["ensemble"], curves, students))
            notes.append(str(report))
        results |= self.stages.describe()
        write_json(self.out / "results.json", results)
        print(f"{'in all':10}{results['seconds']:6.1f} s")
        for name, model in {"ensemble": results, **results.get("compare", {}), **results.get("few_steps", {})}.items():
            right, heldout = f"{model['prompt_accuracy']:.1%}", f"{model['prompt_accuracy_heldout']:.1%}"
            print(f"{name}: every attribute right in {right} of samples, {heldout} for held-out combinations; Frechet "
                  f"distance {model['frechet']:.3f}")  # fmt: skip
        for aim in results["aims"]:
            if not aim["reached"]:
                print(f"not reached: {aim['what']}, but {aim['found']:.3f}")
        print(f"look: {report}")
        out = shlex.quote(str(self.out))
        print(f"paint: atoll serve {out}/model --clusters {out}/data/clusters, then open http://127.0.0.1:8000")
        return results

    # --- data, parts and models -------------------------------------------------------------------------------------

    def _make_data(self) -> None:
        done, progress = (self.data / "clusters" / PARTITION).exists(), sys.stderr.isatty()
        with self.stages.stage("prepare", done) as notes:
            if not done:
                if not (tar := self.out / "pictures.tar").exists():
                    write_whole(tar, self._write_avatars)
                settings = PrepareSettings(SIZE, near_duplicates="keep", license=LICENSE)
                # No workers: reading images this small takes less time than starting a process.
                prepare(Source(str(tar)), self.data, settings, 0, progress=progress)
            card = DatasetCard.read(self.data)
            shape = "x".join(map(str, card.latent_shape))
            notes.append(f"{card.counts.rows} avatars, latents {shape}; no held-out combination is among them")
        with self.stages.stage("partition", done) as notes:
            if not done:
                partition(self.data, NUM_EXPERTS, cap=BALANCE, progress=progress)
            sizes = PartitionCard.read(self.data / "clusters").sizes
            notes.append(f"{NUM_EXPERTS} clusters of {', '.join(map(str, sizes))}")

    def _write_avatars(self, path: Path) -> None:
        examples = enumerate(make("avatars", self.plan.pictures, SIZE, heldout="exclude"))
        write_samples(path, ((f"{i:06d}", png_of(example.image), example.caption) for i, example in examples))

    def _plan_models(self) -> dict[str, ModelNode]:
        plan, run, compare = self.plan, self.out / "run", self.out / "compare"
        # A DDPM expert learns more slowly at high noise, so it gets the smallest, least varied cluster.
        ddpm = min(range(NUM_EXPERTS), key=lambda k: self.sizes[k])
        self.settings = [plan.ddpm if k == ddpm else plan.expert for k in range(NUM_EXPERTS)]
        experts = [
            Part(f"expert {k} {own.objective}", run / f"expert_{k}", own, self.data, k)
            for k, own in enumerate(self.settings)
        ]
        router = Part("router", run / "router", plan.router, self.data)
        models = {"ensemble": ModelNode(self.out / "model", self.data, (*experts, router))}
        if self.compare:
            # As in the papers: as many steps as an expert, with a batch that gives equal FLOPs in total.
            budget = sum(self._count_flops(part) for part in (*experts, router))
            batch = math.ceil(plan.expert.batch * budget / training_flops(plan.expert, self.data, 0))
            monolith = Part("monolith", compare / "monolith", replace(plan.expert, batch=batch), self.data)
            # A twin replaces the DDPM expert, with the same settings except the objective.
            twin = replace(plan.ddpm, objective=plan.expert.objective)
            experts[ddpm] = Part(f"expert {ddpm} fm", compare / f"expert_{ddpm}", twin, self.data, ddpm)
            models["homogeneous"] = ModelNode(compare / "homogeneous-model", self.data, (*experts, router))
            models["monolith"] = ModelNode(compare / "monolith-model", self.data, (monolith,))
        return models

    def _count_flops(self, part: Part) -> float:
        """Counts FLOPs on an expert of the first cluster for all experts and the monolith, scaled by batch size."""
        own, usual = part.settings, self.plan.expert
        if not isinstance(own, ExpertSettings):
            return training_flops(self.plan.router, self.data)
        return training_flops(replace(own, batch=usual.batch), self.data, 0) * own.batch / usual.batch

    def _train(self) -> None:
        models = list(self.models.values())
        done = all(model.is_complete for model in models)
        with self.stages.stage("train", done) as notes:
            if not done:
                train(models, Local("cpu", at_a_time=NUM_EXPERTS + 1))  # more jobs than cores: none idles at the end
            kinds = ", ".join(f"{k} {own.objective}" for k, own in enumerate(self.settings))
            compared = ", and what to compare with" if self.compare else ""
            notes.append(f"experts {kinds} and a router{compared}, in isolation")
        with self.stages.stage("assemble", done) as notes:
            assemble_all(models)
            notes.append(f"{models[0].folder}, {ModelIndex.read(models[0].folder).hash[:12]}")

    # --- images and figures -----------------------------------------------------------------------------------------

    def _sample(self, hashes: Mapping[str, str]) -> Snapshot:
        """Samples the chosen prompts, and a caption of each cluster by every expert and model from the same noise."""
        folder = self.out / "samples"
        samples = Snapshot.read(folder, "shown", hashes)
        with self.stages.stage("sample", samples is not None) as notes:
            if samples is None:
                samples = self._make_samples(hashes)
                samples.write(folder, "shown")
                images = [Image.fromarray(image) for image in samples.arrays["chosen"]]
                save_image(draw_grid(images, CHOSEN, across=6), folder / "grid.png")
            notes.append(f"{len(CHOSEN)} prompts; {folder / 'grid.png'}")
        return samples

    def _make_samples(self, hashes: Mapping[str, str]) -> Snapshot:
        data = Dataset.open(self.data)
        members = [np.flatnonzero(data.clusters() == k) for k in range(NUM_EXPERTS)]
        captions = data.strings("caption", [int(rows[7]) for rows in members])
        arrays = {f"cluster_{k}": decode_rows(data, rows[:ON_A_SHEET]) for k, rows in enumerate(members)}
        pipes = {name: AtollPipeline(model.folder) for name, model in self.models.items()}
        same = {name: pipe(captions, seed=0, **AS_TENSORS) for name, pipe in pipes.items()}
        arrays |= {f"same_{name}": bytes_of(output.images) for name, output in same.items()}
        pipe = pipes["ensemble"]
        for k in range(NUM_EXPERTS):
            arrays[f"same_expert_{k}"] = _by_one_expert(pipe, captions, k)
        arrays["chosen"] = _draw(pipe, CHOSEN, 0)
        about = {
            "captions": captions,
            "painted_by": [int(trace.weights.mean(0).argmax()) for trace in same["ensemble"].trace],
            "chosen": CHOSEN,
            "chosen_right": are_right(arrays["chosen"], CHOSEN),
            "traced": TRACED,
        }
        return Snapshot(hashes, about, arrays | _traces(pipe))

    def _evaluate(self, hashes: Mapping[str, str]) -> dict[str, Snapshot]:
        folder, plan = self.out / "evaluation", self.plan
        judge = Judge(self.data, plan)
        keys = {name: {"model": hash_} for name, hash_ in hashes.items()}
        judged = {name: kept for name, key in keys.items() if (kept := Snapshot.read(folder, name, key))}
        with self.stages.stage("evaluate", len(judged) == len(keys)) as notes:
            for name, key in keys.items():
                if name not in judged:
                    judged[name] = judge.judge(self.models[name].folder, key)
                    judged[name].write(folder, name)
            notes.append(f"{len(judge.seen)} prompts, {len(judge.heldout)} of combinations that nobody has seen")
        return judged

    def _distill(self) -> dict[str, Snapshot]:
        """Trains few-step students, and samples and evaluates them on the same prompts and noise."""
        judge, usual, teacher = Judge(self.data, self.plan), self.plan.expert, self.models["ensemble"].folder
        first = next(k for k, own in enumerate(self.settings) if own.objective == usual.objective)
        settings = DistillSettings(
            steps=min(1000, 2 * usual.steps), batch=usual.batch, lr=3e-3, eval_every=1000,
            trajectories=min(4096, self.plan.pictures), **_LONG,
        )  # fmt: skip
        nodes: dict[str, ModelNode] = {}
        for num in FEW_STEPS:
            folder = self.out / "few_steps" / f"steps_{num}"
            part = Part(
                f"student of {plural(num, 'step')}", folder, replace(settings, steps_out=num), self.data,
                init=teacher / f"expert_{first}", teacher=teacher,
                reuse=self.out / "few_steps" / f"steps_{FEW_STEPS[0]}" if nodes else None,
            )  # fmt: skip
            nodes[f"steps_{num}"] = ModelNode(folder.with_name(f"steps_{num}-model"), self.data, (part,))
        done = all(node.is_complete for node in nodes.values())
        with self.stages.stage("distil", done) as notes:
            if not done:
                first_node, *others = nodes.values()
                train([first_node], Local("cpu"))  # the others reuse its trajectories
                train(others, Local("cpu"))
            assemble_all(list(nodes.values()))
            notes.append(f"students of {', '.join(map(str, FEW_STEPS))} steps; {self.out / 'few_steps'}")
        found = dict[str, Snapshot]()
        keys = {name: {"model": ModelIndex.read(node.folder).hash} for name, node in nodes.items()}
        kept = {name: Snapshot.read(self.out / "evaluation", name, key) for name, key in keys.items()}
        with self.stages.stage("judge", all(kept.values())) as notes:
            for name, node in nodes.items():
                snapshot = kept[name]
                if snapshot is None:
                    snapshot = judge.judge(node.folder, keys[name])
                    chosen = _draw(AtollPipeline(node.folder), CHOSEN, 0)
                    snapshot = snapshot._replace(arrays={**snapshot.arrays, "chosen": chosen})
                    snapshot.write(self.out / "evaluation", name)
                found[name] = snapshot
            notes.append(f"the same prompts and noise in {', '.join(map(str, FEW_STEPS))} steps")
        return found

    # --- results ----------------------------------------------------------------------------------------------------

    def _results(self, judged: Mapping[str, Snapshot]) -> dict[str, Any]:
        parts = {part: self._describe(part) for model in self.models.values() for part in model.parts}
        models = {name: dict(judged[name].about["figures"]) for name in self.models}
        for name, model in self.models.items():
            for key in ("parameters", "training_flops", "training_seconds"):
                models[name][key] = sum(parts[part][key] for part in model.parts)
        *experts, router = (parts[part] for part in self.models["ensemble"].parts)
        for k, expert in enumerate(experts):
            expert |= {"objective": self.settings[k].objective, "cluster": k, "pictures": self.sizes[k]}
        results = {**self.stages.describe(), **models.pop("ensemble"), "experts": experts, "router": router}
        if self.compare:
            models["monolith"]["batch"] = self.models["monolith"].parts[0].settings.batch
            results["compare"] = models
        return results | {"aims": _aims(results), "settings": asdict(self.plan), "commands": self._commands()}

    def _describe(self, part: Part) -> dict[str, Any]:
        training = read_json(part.folder / "config.json", f"remove {part.folder} and rerun the command")["training"]
        return {
            "steps": training["steps"],
            "parameters": training["parameters"],
            "training_flops": self._count_flops(part),
            "training_seconds": max(line.get("cpu_seconds", 0.0) for line in read_metrics(part.folder)),
            "held_out_loss": training["held_out"]["loss"],
        }

    def _commands(self) -> list[str]:
        """Returns the stages as separate commands, with the settings that are not at their defaults."""
        parts = [
            ["atoll", *part.verb, *as_flags(part.settings, type(part.settings)()), "--out", str(part.folder)]
            for part in self.models["ensemble"].parts
        ]
        return [
            f"atoll prepare {self.out}/pictures.tar --near-duplicates keep --license {LICENSE} --out data",
            f"atoll partition data --experts {NUM_EXPERTS} --balance {BALANCE}",
            *(" ".join(words).replace(f"{self.out}/", "") for words in parts),
            "atoll assemble run --data data --out model",
            f'atoll sample model "{CHOSEN[0]}" --trace',
        ]


class Judge:
    """Evaluates models on the same prompts and seeds, and real avatars for comparison."""

    def __init__(self, data: Path, plan: Plan) -> None:
        self.data, self.seeds = data, plan.seeds
        dataset = Dataset.open(data)
        captions = sorted(set(dataset.strings("caption", np.flatnonzero(dataset.column("split")[:] == TRAIN))))
        chosen = np.random.default_rng(0).choice(len(captions), min(plan.prompts, len(captions)), replace=False)
        self.seen = [captions[i] for i in chosen]
        self.repeated = [caption for caption in self.seen[: plan.varied] for _ in range(plan.seeds)]
        heldout, unseen = plan.prompts_heldout, dict[str, None]()
        examples = iter(make("avatars", 100 * heldout, SIZE, seed=1, heldout="only"))
        while len(unseen) < heldout:
            unseen[next(examples).caption] = None
        self.heldout = list(unseen)
        self.network, self.reference = make_features("simple"), Moments.of(dataset.column("features")[:])

    @cached_property
    def real(self) -> dict[str, float]:
        """Returns the figures of other real images, through the codec: the best that a model can reach."""
        codec, rng = load_codec(self.data), np.random.default_rng(1)
        drawn = [draw_avatar(attributes_of(caption), SIZE, rng) for caption in (*self.seen, *self.repeated)]
        images = to_uint8(codec.decode(codec.encode(tensor_of(np.stack(drawn)))))
        return self._measure(images[: len(self.seen)], images[len(self.seen) :])

    def judge(self, model: Path, key: Mapping[str, str]) -> Snapshot:
        drawn, seconds, flops = _draw_all(model, (self.seen, self.heldout, self.repeated))
        seen, heldout, varied = drawn
        figures, right_heldout = self._measure(seen, varied), are_right(heldout, self.heldout)
        results = {
            **figures,
            "prompt_accuracy_heldout": float(np.mean(right_heldout)),
            "attribute_accuracy": _by_attribute(seen, self.seen),
            "attribute_accuracy_heldout": _by_attribute(heldout, self.heldout),
            "num_prompts": len(seen),
            "num_prompts_heldout": len(heldout),
            "diversity": figures["diversity"] / self.real["diversity"],
            "real": {**self.real, "diversity": 1.0},
            "flops_an_image": flops,
            "seconds_an_image": round(seconds / sum(map(len, drawn)), 4),
        }
        about = {"figures": results, "heldout": self.heldout, "heldout_right": right_heldout}
        return Snapshot(key, about, {"seen": seen, "heldout": heldout})

    def _measure(self, seen: Images, varied: Images) -> dict[str, float]:
        """Returns prompt accuracy, Frechet distance to the data, and diversity of the images of a prompt."""
        vectors, of_varied = (self.network.extract(tensor_of(images)).double().numpy() for images in (seen, varied))
        groups = of_varied.reshape(-1, self.seeds, of_varied.shape[1])
        pairs = combinations(range(self.seeds), 2)
        return {
            "prompt_accuracy": float(np.mean(are_right(seen, self.seen))),
            "frechet": frechet_distance(self.reference, Moments.of(vectors)),
            "diversity": float(np.mean([np.linalg.norm(groups[:, a] - groups[:, b], axis=1).mean() for a, b in pairs])),
        }


def _draw_all(model: Path, prompts: Sequence[Sequence[str]]) -> tuple[list[Images], float, float]:
    """Samples lists of prompts on all cores, with seeds from 0, 10,000 and so on.

    Returns the images of each list, the total CPU seconds, and the FLOPs per image.
    """
    parts = [
        (captions[first : first + BATCH], 10_000 * number + first)
        for number, captions in enumerate(prompts)
        for first in range(0, len(captions), BATCH)
    ]
    jobs: list[Callable[[], Any]] = [
        partial(_count_flops, model, prompts[0][:COUNTED]),
        *(partial(_draw_part, model, part) for part in parts),
    ]
    is_much = len(parts) > len(prompts)  # processes take seconds to start
    flops, *drawn = Local("cpu").map(call, jobs) if is_much else map(call, jobs)
    images = np.concatenate([images for images, _ in drawn])
    ends = np.cumsum([len(captions) for captions in prompts])
    return np.split(images, ends[:-1]), sum(seconds for _, seconds in drawn), flops


def _count_flops(model: Path, captions: Sequence[str]) -> float:
    """Returns the mean FLOPs per image."""
    with counting() as total:
        _opened(model)(captions, seed=list(range(len(captions))), output_type="latent", progress=False)
        return total() / len(captions)


def _draw_part(model: Path, part: tuple[Sequence[str], int]) -> tuple[Images, float]:
    start = time.perf_counter()
    return _draw(_opened(model), *part), time.perf_counter() - start


_opened = lru_cache(1)(AtollPipeline)


def _draw(pipe: AtollPipeline, captions: Sequence[str], first_seed: int) -> Images:
    seeds = range(first_seed, first_seed + len(captions))
    return bytes_of(pipe(captions, seed=list(seeds), **AS_TENSORS).images)


def _by_attribute(images: Images, captions: Sequence[str]) -> dict[str, float]:
    pairs = list(zip(read_avatars(images), map(attributes_of, captions), strict=True))
    return {name: float(np.mean([seen[name] == want[name] for seen, want in pairs])) for name in ATTRIBUTES}


def _by_one_expert(pipe: AtollPipeline, captions: Sequence[str], k: int) -> NDArray[np.uint8]:
    """Returns images of the captions by expert k alone, all from seed 0."""
    num, usual = len(captions), pipe.settle(Sampling())
    latents = generate(
        pipe.ensemble, Prompts.encode(pipe.text_encoder, captions), [0] * num, solver=usual.solver,
        times=uniform_times(usual.steps), routing=get_routing("oracle"), labels=torch.full((num,), k),
        guidance=usual.guidance,
    )  # fmt: skip
    return bytes_of(pipe.render(latents, "pt"))


def _traces(pipe: AtollPipeline) -> dict[str, NDArray[Any]]:
    """Returns the experts' weights and previews while sampling a few images with all experts mixed."""
    output = pipe(TRACED, seed=0, output_type="pt", routing="full", previews=PREVIEWS, progress=False)
    arrays: dict[str, NDArray[Any]] = {}
    for i, (trace, final) in enumerate(zip(output.trace, bytes_of(output.images), strict=True)):
        previews = pipe.render(torch.stack([preview.x0 for preview in trace.previews]), "pt")
        arrays |= {
            f"trace_{i}_times": np.array(trace.times),
            f"trace_{i}_weights": trace.weights.double().numpy(),
            f"trace_{i}_at": np.array([preview.t for preview in trace.previews]),
            f"trace_{i}_images": np.stack([*bytes_of(previews), final]),
        }
    return arrays


def _curves(part: Part) -> list[Points]:
    """Returns the curves of (step, loss) in training and on held-out images."""
    log = read_metrics(part.folder)
    return [[(line["step"], line[key]) for line in log if line.get(key) is not None] for key in ("loss", "held_out")]


def _aims(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets for the figures, and whether each was reached."""
    accuracy, heldout, distance = (results[key] for key in ("prompt_accuracy", "prompt_accuracy_heldout", "frechet"))
    aims = [
        ("prompt accuracy of at least 0.95", accuracy, 0.95, accuracy >= 0.95),
        ("prompt accuracy on held-out combinations of at least 0.85", heldout, 0.85, heldout >= 0.85),
    ]
    if compare := results.get("compare"):
        monolith, near = compare["monolith"]["frechet"], 1.1 * compare["homogeneous"]["frechet"]
        aims += [
            ("a Frechet distance of at most the monolith's", distance, monolith, distance <= monolith),
            ("a Frechet distance within 10% of the homogeneous ensemble's", distance, near, distance <= near),
        ]
    return [dict(zip(("what", "found", "wanted", "reached"), aim, strict=True)) for aim in aims]
