"""`atoll distill`: distils an ensemble into one dense student.

The student learns the teacher's velocity at x_t = (1 - t) x0 + t eps of real images. With labels, expert k alone
teaches the images of cluster k. The minimiser of the squared error is then the conditional mean, the sum over k of
p(k | x_t, t, text) u_k(x_t, t, text), which is Eq. 1 with a perfect router: no router is needed, and only one expert
is run per image.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from atoll.cards import ExpertCard, ExpertEntry, ModelIndex, PartCard, require_fit
from atoll.data.shards import Dataset
from atoll.data.view import DatasetView, refuse_inside
from atoll.diffusion.schedules import LINEAR
from atoll.errors import InputError, plural
from atoll.networks.expert import Expert
from atoll.networks.stored import WEIGHTS
from atoll.sampling.assemble import find_model
from atoll.sampling.ensemble import Ensemble, Mixture
from atoll.sampling.expert import EncodedTexts, FolderExpert, Prompts
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import Routing
from atoll.sampling.settings import GUIDANCE
from atoll.storage import resolved
from atoll.training.dry_run import preview
from atoll.training.expert import EVALUATED, EVALUATED_AT_THE_END, ExpertTask
from atoll.training.held_out import held_out_batches
from atoll.training.loop import train
from atoll.training.settings import DistillSettings
from atoll.training.task import Batch, Tensors, bytes_of, on_linear_path

ROUTINGS = {
    "label": Routing("oracle"),
    "router": Routing("full"),
    "top1": Routing("top1"),
    "top2": Routing("topk", 2),
}


@dataclass(frozen=True, eq=False)
class Teacher:
    """An ensemble as the target of a student: canonical (x_t, t), text and expert of each sample -> velocity."""

    ensemble: Ensemble
    routing: Routing
    guidance: float = 1.0
    places: Mapping[int, int] | None = None  # cluster -> number of its expert; None: it does not teach by label
    about: Mapping[str, Any] = field(default_factory=dict)  # for the student's card

    @classmethod
    def open(cls, folder: Path, index: ModelIndex, settings: DistillSettings, device: torch.device) -> "Teacher":
        """Opens a model folder; experts are loaded when first used."""
        assert settings.teacher is not None
        assert settings.guidance is not None
        by_label = settings.teacher == "label" and index.num_experts > 1
        if not by_label and index.num_experts > 1 and index.router is None:
            raise InputError(f"{folder} has no router: use --teacher label")
        with warnings.catch_warnings():
            if by_label:
                warnings.filterwarnings("ignore", "expert_.* missing")  # their weight is not redistributed
            pipe = AtollPipeline(folder, max_resident=settings.max_resident, device=device)
        index.verify(folder, again=False)  # before hours of work
        if pipe.made_for is not None:
            raise InputError(
                f"{folder} was itself distilled to {plural(pipe.made_for, 'step')}, and knows no velocity between "
                "them: distil its teacher"
            )
        learned = set(pipe.learned_guidance)
        if len(learned) > 1:
            raise InputError(f"the experts of {folder} have learned different guidance: a student needs one for all")
        about = {
            "name": resolved(folder).name,
            "hash": index.hash,
            "experts": list(pipe.objectives),
            "license": index.license,
            "missing": missing_experts(folder, index),
            "by": settings.teacher,
            "guidance": settings.guidance,
            "learned_guidance": learned.pop(),
        }
        places = places_of(folder, index) if by_label else None
        return cls(pipe.ensemble, ROUTINGS[settings.teacher], settings.guidance, places, about)

    @property
    def learned_guidance(self) -> float:
        """Returns the guidance a student will have learned: scales multiply, since guidance keeps the null text's."""
        return self.guidance * float(self.about.get("learned_guidance", 1.0))

    def velocity(self, x: Tensor, t: Tensor, prompts: Prompts | None = None, experts: Tensor | None = None) -> Tensor:
        """Returns dx/dt at canonical (x, t), guided if the teacher guides; `experts`[B], on the host, teach by label.

        Raises an InputError on the CPU if a velocity is not finite. On a GPU the check would wait for the device;
        there the student's loss shows it.
        """
        with self._answering(x.device, prompts, experts) as mixture:
            return mixture(x, t)

    @contextmanager
    def _answering(self, device: torch.device, prompts: Prompts | None, experts: Tensor | None) -> Iterator[Mixture]:
        mixture = Mixture(self.ensemble, prompts, routing=self.routing, guidance=self.guidance, labels=experts)
        # Weights may be unloaded, so a cache of their casts would only take memory.
        enabled = torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, enabled=enabled, cache_enabled=False):
            yield mixture
        if failed := mixture.failed():
            raise InputError(f"expert_{failed[0]} of the teacher gives values that are not finite: use less guidance")

    def resident_bytes(self) -> int:
        """Returns the maximum size of the weights in memory at once."""
        experts = [expert for expert in self.ensemble.experts if isinstance(expert, FolderExpert)]
        sizes = sorted(((expert.path / WEIGHTS).stat().st_size for expert in experts), reverse=True)
        return sum(sizes[: self.ensemble.max_resident]) + bytes_of(self.ensemble.router)


def experts_there(folder: Path, index: ModelIndex) -> dict[int, ExpertEntry]:
    """Returns the experts whose folders exist, by number."""
    return {k: part for k, part in enumerate(index.experts) if part is not None and (folder / part.folder).exists()}


def missing_experts(folder: Path, index: ModelIndex) -> list[str]:
    return [f"expert_{k}" for k in range(index.num_experts) if k not in experts_there(folder, index)]


def places_of(folder: Path, index: ModelIndex) -> dict[int, int]:
    """Returns the number of each cluster's expert, for the experts that exist."""
    places = dict[int, int]()
    for k, part in experts_there(folder, index).items():
        if part.cluster is None or part.cluster in places:
            raise InputError(f"{folder / part.folder} is not the only expert of a known cluster: use --teacher router")
        places[part.cluster] = k
    return places


class DistillTask(ExpertTask):
    """(x_t, t, text) -> the teacher's velocity."""

    def __init__(
        self,
        data: Dataset,
        settings: DistillSettings,
        device: torch.device,
        teacher: Teacher,
        init: Path | None = None,
        allow_missing: bool = False,
    ) -> None:
        super().__init__(data, settings, device, init)
        self.teacher = teacher
        self.learned_guidance = teacher.learned_guidance
        if self.learned_guidance != 1:
            self.guidance = 1.0
        self.experts = self._experts_of_rows(allow_missing)
        self.null = EncodedTexts.of(self.text, self.null_ids) if teacher.guidance != 1 else None
        self._targets: dict[int, list[Tensor]] = {}  # for held-out rows, by their number
        self.add_license(teacher.about.get("license"), "teacher")

    def _experts_of_rows(self, allow_missing: bool) -> Tensor:
        """Returns the expert that teaches each row, -1 for none: such rows are dropped if `allow_missing`."""
        view, places = self.view, self.teacher.places
        if places is None:
            return torch.zeros(len(view.data), dtype=torch.long)
        clusters = view.data.clusters()
        experts = np.array([places.get(k, -1) for k in range(int(clusters.max()) + 1)], np.int64)[clusters]
        taught = experts >= 0
        if not taught.all() and not allow_missing:
            raise InputError(
                f"the teacher has no expert of cluster {', '.join(map(str, np.unique(clusters[~taught])))} of "
                f"{view.data.folder}: give the data of its experts, --allow-missing to leave these images out, or "
                "--teacher router"
            )
        view.train, view.held_out = (part[taught[part]] for part in (view.train, view.held_out))
        if not len(view.train):
            raise InputError(f"the teacher has no expert of any cluster of {view.data.folder}: use --teacher router")
        if not len(view.held_out):
            view.measured_on = "training rows, for none that is taught was held out"
        self.num_rows = len(view.train)
        return torch.from_numpy(experts)

    @property
    def frozen_bytes(self) -> int:
        return super().frozen_bytes + self.teacher.resident_bytes()

    def describe(self) -> dict[str, Any]:
        teacher = {key: value for key, value in self.teacher.about.items() if key != "name"}  # its hash is its name
        return {**super().describe(), "teacher": teacher}

    def read(self, rows: NDArray[np.int64], drawn: Tensors) -> Batch:
        """Groups samples by teacher, so that each is loaded once per step, however small the micro-batches are.

        Reordering the rows biases nothing, since their noise was drawn independently of them.
        """
        teachers = self.labels_of(self.view.train[rows]).numpy()
        return super().read(rows[np.argsort(teachers, kind="stable")], drawn)

    def labels_of(self, indices: NDArray[np.int64]) -> Tensor:
        return self.experts[indices]

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        tokens, mask = self.encode(batch, host)
        x = on_linear_path(batch.latents.float(), batch.eps, batch.t)
        # A dropped text is the null text, which guidance does not change, so the student can still be guided further.
        target = self.teacher.velocity(x, batch.t, self._prompts(tokens, host.ids), host.labels)
        return squared_error(network(x, batch.t, tokens, mask), target)

    def _prompts(self, tokens: Tensor, ids: Tensor) -> Prompts:
        """Returns the teacher's prompts: the texts of ids[B, L] (on the host), and the null text if it guides."""
        return Prompts.of(EncodedTexts(tokens, ids, self.text.lengths(ids)), self.null)

    def evaluate(self, sample: bool) -> tuple[Mapping[str, Any], Image.Image | None]:
        metrics, grid = super().evaluate(sample)
        return {**metrics, "held_out_teacher": self.loss_to_teacher(EVALUATED)}, grid

    @torch.no_grad()
    def loss_to_teacher(self, num: int) -> float:
        """Returns the mean squared error to the teacher on held-out rows, always at the same noise and times."""
        targets, losses = self._targets.setdefault(num, []), []  # cached: the teacher does not change
        batches = held_out_batches(self.view, self.text, self.device, num, self.at_a_time, self.experts)
        for i, (rows, x0, eps, times, text) in enumerate(batches):
            t = LINEAR.inside(times)
            x, t = on_linear_path(x0, eps, t).to(self.device), t.to(self.device)
            if i == len(targets):
                prompts = self._prompts(text[0], self.view.tokens(rows))
                targets.append(self.teacher.velocity(x, t, prompts, self.experts[rows]).cpu())
            losses.append(squared_error(self.network(x, t, *text).float().cpu(), targets[i]))
        return float(torch.cat(losses).mean())

    def as_expert(self, training: Mapping[str, Any]) -> Expert:
        expert = super().as_expert(training)
        if self.learned_guidance != 1:
            self.network.card = {**self.network.card, "guidance": self.learned_guidance}
        return expert

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Evaluates the student against its teacher and against the data, and writes it as an expert."""
        apart = self.loss_to_teacher(EVALUATED_AT_THE_END)
        about = {**self.teacher.about, "held_out_loss": apart}
        super().finish(folder, {**training, "teacher": about})
        lines = [*self.describe_result(apart)]
        if self.learned_guidance != 1:
            learned = f"{self.learned_guidance:g}"
            lines.append(f"it has learned guidance of {learned}: sample it with --guidance 1, the default")
        return [*lines, f"next: atoll assemble {folder} --data {self.view.data.folder} --out MODEL"]

    def describe_result(self, apart: float) -> Sequence[str]:
        """Returns lines for the user about a student whose error to the teacher is `apart`."""
        assert self.evaluated is not None
        return [
            f"a student of {self.teacher.about.get('name', 'its teacher')}: {apart:.4f} from it, loss "
            f"{self.evaluated.loss:.4f} against the images themselves, on {self.view.measured_on}"
        ]


def squared_error(one: Tensor, other: Tensor) -> Tensor:
    """Returns the mean squared error of each sample, [B]."""
    return ((one - other) ** 2).flatten(1).mean(1)


def distill(
    model: str | Path,
    data: Path,
    settings: DistillSettings,
    out: Path,
    init: Path | None = None,
    allow_missing: bool = False,
    cluster: int | None = None,
    reuse: Path | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> Sequence[str]:
    """Trains a student of a model; in the end the folder `out` is an expert on all of the data, or on one cluster.

    `reuse` is the folder of a few-step student whose trajectories this one trains on.
    """
    from atoll.training.few_steps import FewStepTask  # here: it imports DistillTask

    refuse_inside(out, data)
    if resolved(out).is_relative_to(resolved(model)):
        raise InputError(f"{out} lies within {model}: choose an --out outside of the teacher")
    folder = find_model(model)
    index, dataset = ModelIndex.read(folder), Dataset.open(data, cluster)
    card = PartCard(latent_space=dataset.card.latent_space, text_encoder=dataset.card.text)
    require_fit(data, card, index.latent_space, index.text_encoder, folder)
    settings = resolved_settings(settings, index, cluster)
    if reuse is not None and settings.steps_out is None:
        raise InputError("--reuse is for students of few steps: add --steps-out")
    missing = missing_experts(folder, index)
    if missing and not allow_missing and cluster is None:
        raise InputError(f"{folder} lacks {', '.join(missing)}: assemble it with all experts, or give --allow-missing")
    if settings.teacher == "label" and index.num_experts > 1:
        _check_labels(folder, index, dataset)

    def make(device: torch.device) -> DistillTask:
        teacher = Teacher.open(folder, index, settings, device)
        if settings.steps_out is None:
            return DistillTask(dataset, settings, device, teacher, init, allow_missing)
        return FewStepTask(dataset, settings, device, teacher, init, allow_missing, reuse)

    return preview(make, settings) if dry_run else train(make, settings, out, progress)


def resolved_settings(settings: DistillSettings, index: ModelIndex, cluster: int | None) -> DistillSettings:
    """Returns settings with defaults filled in: a few-step student learns the default sampling settings."""
    few = settings.steps_out is not None
    usual = "top1" if few and cluster is None and index.router is not None else "label"
    guidance = GUIDANCE if few else 1.0
    return replace(
        settings,
        teacher=usual if settings.teacher is None else settings.teacher,
        guidance=guidance if settings.guidance is None else settings.guidance,
    )


def _check_labels(folder: Path, index: ModelIndex, data: Dataset) -> None:
    """Warns if the clusters of the data may differ from those that the experts were trained on."""
    clusters = set(data.clusters().tolist())
    for k, part in experts_there(folder, index).items():
        known = ExpertCard.read(folder / part.folder).data
        if part.cluster not in clusters or known is None or known.fingerprint is None:
            continue
        if known.fingerprint != DatasetView(Dataset.open(data.folder, part.cluster)).fingerprint:
            warnings.warn(
                f"expert_{k} of {folder} was trained on other images than cluster {part.cluster} of {data.folder}: "
                "labels are right only if `atoll assign` has placed these into the clusters of the experts, so if it "
                "has not, use --teacher router",
                stacklevel=2,
            )
            return
