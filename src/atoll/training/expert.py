"""Training an expert on its cluster, or the monolith on all of the data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from atoll.cards import LatentSpace, TextEncoderCard, require_same
from atoll.data.shards import Dataset
from atoll.data.view import AT_A_TIME, decode_rows, refuse_inside
from atoll.diffusion.solvers import uniform_times
from atoll.encoders.codec import Codec, to_uint8
from atoll.encoders.codecs import is_quick, load_codec
from atoll.encoders.pretrained import fingerprint
from atoll.errors import InputError
from atoll.networks.centroid_router import mean_token
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.expert import Expert
from atoll.networks.presets import preset, size_of
from atoll.networks.text_prior import TextPrior
from atoll.plots.contact_sheet import draw_samples
from atoll.sampling.ensemble import Ensemble, generate
from atoll.sampling.expert import EncodedTexts, Prompts, VelocityExpert
from atoll.storage import resolved
from atoll.training.dry_run import preview
from atoll.training.held_out import Evaluated, evaluate_expert
from atoll.training.loop import train
from atoll.training.settings import DistillSettings, ExpertSettings
from atoll.training.task import Batch, CaptionedTask, bytes_of, seeded

EVALUATED, EVALUATED_AT_THE_END = 512, 2048  # held-out rows
IN_A_GRID = 12
MOST_FOR_PRIOR = 20_000  # captions; more do not change the fit


class ExpertTask(CaptionedTask):
    """(x_t, t, text) -> the prediction of the objective."""

    guidance = 2.0  # of sample grids
    grid_steps = 24

    def __init__(
        self, data: Dataset, settings: ExpertSettings | DistillSettings, device: torch.device, init: Path | None = None
    ) -> None:
        super().__init__(data, settings, device)
        self.settings = settings
        self.init: Mapping[str, Any] | None = None
        self.license = data.card.license
        self.network = self._make_network(init)
        self.evaluated: Evaluated | None = None
        self.view.latents(self.view.evaluation_rows(EVALUATED))  # fail now, not hours later, if data are damaged
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
        config, card, settings = network.config, network.card, self.settings
        sizes = preset(settings.model, input_size=config.input_size)
        is_chosen = settings.model != type(settings)().model
        if is_chosen and any(getattr(config, name) != value for name, value in sizes.items()):
            raise InputError(
                f"{init} is of size {size_of(config)}, not {settings.model}: leave --model out with --init"
            )
        if (config.in_channels, config.input_size, config.text_dim) != (channels, size, self.text.dim):
            raise InputError(
                f"{init} was made for latents {[config.in_channels, config.input_size, config.input_size]} and text "
                f"{config.text_dim} wide, but {self.view.name} has {list(self.view.shape)} and {self.text.dim}: "
                f"prepare the data with the codec, size and text encoder of {init}"
            )
        data = self.view.data
        if "latent_space" in card:
            codec = LatentSpace.parse(card["latent_space"], str(init)).codec
            require_same(data.card.codec, codec, "codec", data.folder, init)
        if "text_encoder" in card:
            text = TextEncoderCard.parse(card["text_encoder"], str(init))
            require_same(data.card.text, text, "text encoder", data.folder, init)
        self.init = {
            "name": resolved(init).name,
            "fingerprint": fingerprint(network.state_dict(), {}),
            **{key: card[key] for key in ("objective", "init", "license") if key in card},
        }
        self.add_license(card.get("license"), "first weights")
        return network

    def add_license(self, theirs: object, whose: str) -> None:
        if isinstance(theirs, str) and theirs not in ("unknown", self.license):
            self.license = f"{self.license} (data), {theirs} ({whose})"

    @property
    def frozen_bytes(self) -> int:
        return super().frozen_bytes + bytes_of(self.codec)

    def describe(self) -> dict[str, Any]:
        return {"data": self.view.identity(), "init": self.init}

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        text = () if network_is_blind(self.network) else self.encode(batch, host)
        return self.objective.loss(lambda x, t: network(x, t, *text), batch.latents.float(), batch.eps, batch.t)

    def evaluate(self, sample: bool) -> tuple[Mapping[str, Any], Image.Image | None]:
        loss, by_log_snr = self._evaluate(EVALUATED)
        return {"held_out": loss, "held_out_by_log_snr": by_log_snr}, self.sample_grid() if sample else None

    def _evaluate(self, num: int) -> tuple[float, list[float | None]]:
        network = self.network
        self.evaluated = evaluate_expert(
            (lambda x, t, *_: network(x, t)) if network_is_blind(network) else network,
            self.objective,
            self.view,
            self.text,
            self.device,
            num,
            self.at_a_time,
            self.prior,
        )
        return self.evaluated.loss, self.evaluated.loss_by_log_snr

    @cached_property
    def prior(self) -> TextPrior:
        """Returns a fit of the cluster's mean image given its caption: the prior mean of a calibrated x0."""
        rows = self.view.training_rows(MOST_FOR_PRIOR)
        parts = (rows[first : first + AT_A_TIME] for first in range(0, len(rows), AT_A_TIME))
        batches = ((self._mean_token(self.view.tokens(part)), self.view.latents(part)) for part in parts)
        return TextPrior.fit(batches, self.view.mean, self._mean_token(self.null_ids)[0])

    def _mean_token(self, ids: Tensor) -> Tensor:
        return mean_token(*self.text.encode(ids.to(self.device))).cpu()

    def sample_grid(self) -> Image.Image | None:
        """Returns held-out images, and below each a sample from its caption."""
        codec = self.codec
        if codec is None:
            return None
        rows = self.view.evaluation_rows(IN_A_GRID if is_quick(codec) else 4)
        texts = (EncodedTexts.of(self.text, ids) for ids in (self.view.tokens(rows), self.null_ids))
        ensemble, prompts = Ensemble([VelocityExpert.of(self.as_expert({}))]), Prompts.of(*texts)
        latents = generate(
            ensemble, prompts, range(len(rows)), guidance=self.guidance, times=uniform_times(self.grid_steps)
        )
        images = to_uint8(codec.decode(latents))
        captions = self.view.data.strings("caption", rows)
        title = f"{self.view.name}, {self.settings.objective}"
        real = decode_rows(self.view.data, rows, codec, side=images.shape[1])
        return draw_samples({"held out": real, "made": images}, captions, title)

    def as_expert(self, training: Mapping[str, Any]) -> Expert:
        self.network.card = {
            "objective": asdict(self.objective),
            "latent_space": self.view.data.card.latent_space.values(),
            "text_encoder": self.view.data.card.text.values(),
            "data": self.view.describe(),
            "training": training,
            "init": self.init,
            "license": self.license,
        }
        measured = () if self.evaluated is None else (self.evaluated.calibration, self.prior)
        return Expert(self.network, self.objective, *measured)

    def finish(self, folder: Path, training: Mapping[str, Any]) -> Sequence[str]:
        """Evaluates on more held-out data than during the run, and writes the expert."""
        loss, by_log_snr = self._evaluate(EVALUATED_AT_THE_END)
        on = self.view.measured_on
        settings = {**training["settings"], "model": size_of(self.network.config) if self.init else self.settings.model}
        held_out = {"loss": loss, "by_log_snr": by_log_snr, "on": on}
        self.as_expert({**training, "settings": settings, "held_out": held_out}).save(folder)
        return [f"an expert of {self.view.name}, loss {loss:.4f} on {on}"]


def network_is_blind(network: DiT) -> bool:
    return network.config.text_dim is None


def train_expert(
    data: Path,
    cluster: int | None,
    settings: ExpertSettings,
    out: Path,
    init: Path | None = None,
    progress: bool = True,
    dry_run: bool = False,
    mirror: str | None = None,
) -> Sequence[str]:
    """Trains the expert of one cluster, or, if None, the monolith; in the end the folder `out` is the expert."""
    refuse_inside(out, data)
    make = partial(ExpertTask, Dataset.open(data, cluster), settings, init=init)
    return preview(make, settings) if dry_run else train(make, settings, out, progress, mirror)
