"""An expert as it is published: a network with the description of its training, its data and its calibration.

EXPERT/config.json              architecture, objective, latent space, text encoder, data, training, init, licence
EXPERT/model.safetensors        the EMA weights
EXPERT/calibration.safetensors  the calibration measured on held-out data of its cluster, if config.json names it
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.cards import CONFIG, ExpertCard
from atoll.config import build
from atoll.diffusion.objective import Objective
from atoll.diffusion.transfer import Calibration, Conversion, Transfer
from atoll.errors import InputError
from atoll.networks.dit import DiT
from atoll.networks.stored import WEIGHTS, folder_of
from atoll.networks.text_prior import TextPrior
from atoll.storage import reason_of, write_whole
from atoll.tensors import read_tensors

CALIBRATION = "calibration.safetensors"
REPORT = "conversion.json"  # of an expert converted from a published checkpoint


@dataclass(frozen=True, eq=False)
class Expert:
    """A network whose card is an `ExpertCard`, and its calibration."""

    network: DiT
    objective: Objective
    calibration: Calibration | None = None
    prior: TextPrior | None = None  # what calibration shrinks x0 towards; None: the cluster's mean

    def transfer(self, conversion: Conversion | str | None = None) -> Transfer:
        """Returns the conversion of its outputs to canonical velocities."""
        chosen = None if conversion is None else Conversion(conversion)
        return Transfer(self.objective.prediction, self.objective.path, chosen, self.calibration)

    def save(self, folder: str | Path) -> None:
        """Writes the folder, config.json last, so that the files it names exist."""
        folder, files = Path(folder), []
        if self.calibration is not None:
            known, prior = self.calibration, self.prior
            tensors = {"log_snr": known.log_snr, "gain": known.gain, "mean": known.mean.float().contiguous()}
            if prior is not None:
                named = {name: getattr(prior, name) for name in ("weight", "centre", "null", "covariance")}
                tensors |= {f"text_{name}": part.contiguous() for name, part in named.items() if part is not None}
                tensors["text_limit"] = torch.tensor(prior.limit, dtype=torch.float64)
            write_whole(folder / CALIBRATION, lambda staged: save_file(tensors, staged))
            files = [CALIBRATION]
        self.network.card = {**self.network.card, "calibration": CALIBRATION if files else None}
        self.network.save_pretrained(folder, files)

    @classmethod
    def load(cls, folder: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None) -> "Expert":
        """Loads the expert from a folder or hub id; every key and value is checked."""
        path = folder_of(folder, revision, (CONFIG, WEIGHTS, CALIBRATION))
        network = DiT.from_pretrained(path, dtype=dtype)
        if "latent_space" not in network.card:
            raise InputError(f"{path / CONFIG} has no 'latent_space': it holds a bare network, not an expert")
        card = ExpertCard.parse(network.card, str(path / CONFIG))
        objective = build(Objective, card.objective, f"the objective in {path / CONFIG}")
        calibration, prior = (None, None) if card.calibration is None else read_calibration(path / CALIBRATION)
        config = network.config
        for file, shape in ((CONFIG, card.latent_space.shape), (CALIBRATION, calibration and calibration.mean.shape)):
            if shape and list(shape) != [config.in_channels, config.input_size, config.input_size]:
                raise InputError(f"{path / file} is of latents {list(shape)}, which the architecture does not take")
        return cls(network, objective, calibration, prior)


def read_calibration(path: Path) -> tuple[Calibration, TextPrior | None]:
    tensors = read_tensors(path, f"the expert's {CONFIG} names it, so copy it again from its source")
    try:
        calibration = Calibration(tensors["log_snr"], tensors["gain"], tensors["mean"])
        if "text_weight" not in tensors:
            return calibration, None
        weight, centre, null, limit = (tensors[f"text_{name}"] for name in ("weight", "centre", "null", "limit"))
        covariance = tensors.get("text_covariance")  # missing in experts of earlier versions
        return calibration, TextPrior(calibration.mean, weight, centre, null, float(limit), covariance)
    except (KeyError, RuntimeError, TypeError) as error:  # a tensor is missing or of another shape
        raise InputError(f"{path} is damaged ({reason_of(error)}): copy it again from its source") from error
