"""Training an expert on its cluster, or the monolith on all of the data."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from atoll.data.shards import Dataset
from atoll.data.view import decode_rows, refuse_inside
from atoll.diffusion.guidance import Guidance
from atoll.diffusion.solvers import uniform_times
from atoll.encoders.codecs import Codec, is_quick, load_codec, pictures_of
from atoll.encoders.pretrained import check_same, fingerprint
from atoll.errors import InputError, shown
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.expert import Expert
from atoll.networks.presets import preset
from atoll.networks.text_prior import TextPrior
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.ensemble import Ensemble, generate
from atoll.sampling.expert import Prompts, VelocityExpert
from atoll.storage import resolved
from atoll.training.batches import seeded
from atoll.training.calibrate import Judgement, judge, measure_prior
from atoll.training.dry_run import preview
from atoll.training.loop import train
from atoll.training.settings import DistillSettings, ExpertSettings
from atoll.training.task import CaptionedTask, Tensors, bytes_of

JUDGED, JUDGED_AT_THE_END = 512, 2048
IN_A_GRID = 12


class ExpertTask(CaptionedTask):
    """(x_t, t, text) -> what the objective asks for."""

    guidance = Guidance(2.0)  # of the images that a run shows

    def __init__(
        self,
        data: Dataset,
        settings: ExpertSettings | DistillSettings,
        device: torch.device,
        init: Path | None = None,
    ) -> None:
        super().__init__(data, settings, device)
        self.settings = settings
        self.objective = settings.resolved_objective
        self.init: Mapping[str, Any] | None = None
        self.license = data.card.license
        self.network = self._make_network(init)
        self.judgement: Judgement | None = None
        self.view.latents(self.view.judged_by(JUDGED))  # what is damaged or missing shows now, not hours later
        self.codec: Codec | None = None
        if settings.sample_every:
            self.codec = load_codec(data.folder)
            if isinstance(self.codec, nn.Module):
                self.codec.to(device)

    def _make_network(self, init: Path | None) -> DiT:
        channels, size, _ = self.view.shape
        if init is None:
            sizes = preset(self.settings.model, input_size=size, in_channels=channels, text_dim=self.text.dim)
            with seeded("weights", self.settings.seed):
                return DiT(DiTConfig(**sizes))
        network = DiT.from_pretrained(init, dtype=torch.float32)
        config, card = network.config, network.card
        sizes = preset(self.settings.model, input_size=config.input_size)
        if self.settings.model != type(self.settings)().model and any(
            getattr(config, name) != value for name, value in sizes.items()
        ):
            theirs_is = f"{config.hidden_size}x{config.depth}/{config.patch_size}"
            raise InputError(f"{init} is of size {theirs_is}, not {self.settings.model}: leave --model out with --init")
        if (config.in_channels, config.input_size) != (channels, size):
            raise InputError(
                f"{init} was made for latents {[config.in_channels, config.input_size, config.input_size]}, but "
                f"{self.view.name} has {list(self.view.shape)}: prepare the data with the codec and size of {init}"
            )
        if config.text_dim != self.text.dim:
            raise InputError(
                f"{init} reads text {config.text_dim} wide, but {self.view.name} has {self.text.dim}: "
                f"prepare the data with the text encoder of {init}"
            )
        if "latent_space" in card:
            check_same(self.view.latent_space()["codec"], _table(init, card, "latent_space", "codec"), "codec")
        if "text_encoder" in card:
            check_same(self.about_text, _table(init, card, "text_encoder"), "text encoder")
        self.init = {
            "name": resolved(init).name,
            "fingerprint": fingerprint(network.state_dict(), {}),
            **{key: card[key] for key in ("objective", "init", "license") if key in card},
        }
        theirs = card.get("license")
        if isinstance(theirs, str) and theirs not in ("unknown", self.license):
            self.license = f"{self.license} (data), {theirs} (first weights)"
        return network

    @property
    def frozen_bytes(self) -> int:
        return super().frozen_bytes + bytes_of(self.codec)

    def describe(self) -> dict[str, Any]:
        return {"data": self.view.identity(), "init": self.init}

    def sample_times(self, num: int, generator: torch.Generator) -> Tensor:
        return self.objective.sample_times(num, generator)

    def loss(self, network: nn.Module, batch: Tensors, drawn: Tensors) -> Tensor:
        (indices, x0, ids), (t, eps, dropped) = batch, drawn
        tokens, mask = self.encode(ids, dropped, indices)
        return self.objective.loss(lambda x, t: network(x, t, tokens, mask), x0, eps, t)

    def evaluate(self, sample: bool) -> tuple[Mapping[str, Any], Image.Image | None]:
        self.judgement = self._judge(JUDGED)
        metrics = {"held_out": self.judgement.loss, "held_out_by_log_snr": self.judgement.loss_by_log_snr}
        return metrics, self.sample_grid() if sample else None

    def _judge(self, num: int) -> Judgement:
        return judge(self.network, self.objective, self.view, self.text, self.device, num, self.at_a_time, self.prior)

    @cached_property
    def prior(self) -> TextPrior:
        return measure_prior(self.view, self.text, self.device)

    def sample_grid(self) -> Image.Image | None:
        """Returns held-out images, and below each what the expert makes of its caption."""
        codec = self.codec
        if codec is None:
            return None
        rows = self.view.judged_by(IN_A_GRID if is_quick(codec) else 4)
        tokens, mask = self.text.encode(self.view.tokens(rows).to(self.device))
        null = self.text.encode(self.null_ids.to(self.device))
        ensemble = Ensemble([VelocityExpert.of(self.as_expert({}))])
        prompts = Prompts.of(tokens, mask, *null)
        latents = generate(ensemble, prompts, range(len(rows)), guidance=self.guidance, times=uniform_times(24))
        images = pictures_of(codec.decode(latents))
        captions = self.view.data.texts("caption", rows)
        title = f"{self.view.name}, {self.settings.objective}"
        real = decode_rows(self.view.data, rows, codec, side=images.shape[1])
        return draw_samples({"held out": real, "made": images}, captions, title)

    def as_expert(self, training: Mapping[str, Any]) -> Expert:
        return Expert(
            network=self.network,
            objective=self.objective,
            latent_space=self.view.latent_space(),
            text_encoder=self.about_text,
            data=self.view.describe(),
            training=training,
            init=self.init,
            license=self.license,
            calibration=None if self.judgement is None else self.judgement.calibration,
            prior=None if self.judgement is None else self.prior,
        )

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Measures on more held-out data than before, and writes the expert."""
        self.judgement = self._judge(JUDGED_AT_THE_END)
        on = self.view.measured_on
        held_out = {"loss": self.judgement.loss, "by_log_snr": self.judgement.loss_by_log_snr, "on": on}
        config = self.network.config
        size = f"{config.hidden_size}x{config.depth}/{config.patch_size}"
        settings = {**training["settings"], "model": self.settings.model if self.init is None else size}
        expert = self.as_expert({**training, "settings": settings, "held_out": held_out})
        expert.save(folder)
        return [f"an expert of {self.view.name}, loss {self.judgement.loss:.4f} on {on}"]


def _table(init: Path, card: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Returns what the card of first weights says under some keys, each within the one before."""
    value: Any = card
    for key in keys:
        value = value.get(key)
        if not isinstance(value, Mapping):
            raise InputError(f"{init} describes its {key} as {shown(value)}: copy it again from its source")
    return value


def train_expert(
    data: Path,
    cluster: int | None,
    settings: ExpertSettings,
    out: Path,
    init: Path | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> Sequence[str]:
    """Trains the expert of one cluster, or with None the monolith; the folder `out` is the expert in the end."""
    dataset = Dataset.open(data, cluster)
    refuse_inside(out, data)

    def make(device: torch.device) -> ExpertTask:
        return ExpertTask(dataset, settings, device, init)

    return preview(make, settings) if dry_run else train(make, settings, out, progress)
