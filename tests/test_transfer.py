"""Transfer beyond the exact oracle: calibration, the paper's safeguards, the range seen in training."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.diffusion.oracle import ClusteredGaussians
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.schedules import LINEAR, SCHEDULES
from atoll.diffusion.solvers import SOLVERS, uniform_times
from atoll.diffusion.transfer import Calibration, Conversion, Predict, Safeguards, Transfer, products
from atoll.errors import InputError
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset

COSINE = SCHEDULES["cosine"]
DATA = ClusteredGaussians.random(1, 4, 16)
MEAN = (DATA.weights[0][:, None] * DATA.means[0]).sum(0)


def noisy_expert(level: float, seed: int = 0) -> Predict:
    """Returns the perfect EPS expert plus an error that does not shrink with alpha, as of a trained one."""
    perfect, g = DATA.expert(0, Prediction.EPS, COSINE), torch.Generator().manual_seed(seed)
    return lambda x, t: perfect(x, t) + level * torch.randn(x.shape, generator=g, dtype=x.dtype)


def noised(num: int, t: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x0, _ = DATA.sample(num, g)
    eps = torch.randn(x0.shape, generator=g, dtype=x0.dtype)
    return x0, (1 - t) * x0 + t * eps


def measured(level: float) -> Calibration:
    t = torch.linspace(0.001, 0.999, 8000, dtype=torch.float64)
    x0, x = noised(len(t), t[:, None])
    x0_hat, _ = Transfer(Prediction.EPS, COSINE, Conversion.EXACT).estimate(noisy_expert(level), x, t)
    return Calibration.fit(*products(x0, x0_hat, MEAN), LINEAR.log_snr(t), MEAN)


def test_calibration_tames_an_imperfect_eps_expert():
    calibration = measured(0.05)
    assert float(calibration.gain[0]) < 0.1  # at t near 1 the expert's x0 is all error
    assert float(calibration.gain[-1]) > 0.99
    exact = Transfer(Prediction.EPS, COSINE, Conversion.EXACT)
    calibrated = Transfer(Prediction.EPS, COSINE, calibration=calibration)
    assert calibrated.conversion is Conversion.CALIBRATED  # the default for an expert that carries one
    for t in (0.9, 0.98, 0.999, 1.0):
        at = torch.tensor(t, dtype=torch.float64)
        _, x = noised(2000, at, seed=5)
        true = DATA.velocity(x, at)
        errors = [
            float((transfer.velocity(noisy_expert(0.05, seed=9), x, at) - true).norm() / true.norm())
            for transfer in (exact, calibrated)
        ]
        assert errors[1] < 0.35
        assert errors[1] < errors[0]


def test_at_pure_noise_the_calibrated_answer_is_the_mean():
    calibrated = Transfer(Prediction.EPS, COSINE, calibration=measured(0.05))
    one = torch.tensor(1.0, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(calibrated.velocity(noisy_expert(0.05), x, one), x - MEAN, rtol=1e-6, atol=1e-6)


def test_a_perfect_expert_needs_no_calibration():
    calibration = measured(0.0)
    t = torch.tensor(0.5, dtype=torch.float64)
    _, x = noised(500, t)
    found = Transfer(Prediction.EPS, COSINE, calibration=calibration).velocity(noisy_expert(0.0), x, t)
    true = DATA.velocity(x, t)
    assert float((found - true).norm() / true.norm()) < 0.03


def test_the_gain_is_the_regression_coefficient(rng):
    """Against numpy's least squares."""
    x0_hat = torch.randn(400, 3, generator=rng, dtype=torch.float64)
    x0 = 0.6 * x0_hat + torch.randn(400, 3, generator=rng, dtype=torch.float64)
    zero = torch.zeros(3).double()
    fitted = Calibration.fit(*products(x0, x0_hat, zero), torch.zeros(400).double(), zero, num_bins=1)
    expected, *_ = np.linalg.lstsq(x0_hat.reshape(-1, 1).numpy(), x0.reshape(-1).numpy(), rcond=None)
    assert float(fitted.gain) == pytest.approx(float(expected[0]))


def test_gain_between_and_beyond_the_levels():
    gains = torch.tensor([0.2, 0.6, 0.9])
    calibration = Calibration(torch.tensor([-4.0, 0.0, 4.0]), gains, torch.zeros(2))
    asked = torch.tensor([-math.inf, -6.0, -4.0, -2.0, 0.0, 4.0, 9.0, math.inf])
    expected = torch.tensor([0.0, 0.2 * math.exp(-2), 0.2, 0.4, 0.6, 0.9, 1 - 0.1 * math.exp(-5), 1.0])
    torch.testing.assert_close(calibration.gain_at(asked), expected)
    torch.testing.assert_close(calibration.gain_at(torch.tensor(-2.0)), torch.tensor(0.4))


@pytest.mark.parametrize("prediction", Prediction)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("conversion", [Conversion.EXACT, Conversion.PAPER])
def test_velocities_are_finite_at_the_very_ends(prediction, name, conversion):
    transfer = Transfer(prediction, SCHEDULES[name], conversion)
    x = torch.randn(4, 16)
    for t in (torch.tensor(0.0), torch.tensor(1.0), torch.tensor([0.0, 1.0, 0.5, 1.0])):
        assert bool(torch.isfinite(transfer.velocity(lambda x, t: torch.ones_like(x), x, t)).all())


@pytest.mark.parametrize("prediction", Prediction)
def test_outside_the_range_seen_the_nearest_x0_stands(prediction):
    """A network trained on a table is never evaluated outside [0, 1], and its x0 there stays bounded."""
    table = SCHEDULES["ddpm"]
    transfer = Transfer(prediction, table, log_snr_range=table.log_snr_range)
    asked: list[Tensor] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        asked.append(t)
        return DATA.expert(0, prediction, table)(x, t)

    for t in (0.0, 0.001, 0.5, 0.999, 1.0):
        at = torch.tensor(t, dtype=torch.float64)
        _, x = noised(200, at)
        x0, eps = transfer.estimate(predict, x, at)
        assert -1e-12 <= float(asked[-1]) <= 1 + 1e-12
        if 0 < t < 1:
            torch.testing.assert_close((1 - at) * x0 + at * eps, x, rtol=1e-7, atol=1e-7)
        if t >= 0.5:
            true, _ = DATA.estimate(x, LINEAR(at))
            assert float((x0 - true).norm() / true.norm()) < 0.02


@pytest.mark.parametrize("prediction", Prediction)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_real_network_of_any_kind_can_be_sampled(prediction, name, solver):
    """By default a network is evaluated only at times in [0, 1], and samples are finite."""
    net = DiT(DiTConfig(**preset("xs/2", input_size=8, text_dim=None)))
    torch.nn.init.normal_(net.out.weight, std=0.1)
    transfer = Transfer(prediction, SCHEDULES[name])
    with torch.no_grad():
        velocity = lambda x, t: transfer.velocity(net, x, t)  # noqa: E731
        found = SOLVERS[solver](velocity, torch.randn(2, 4, 8, 8), uniform_times(4), None)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["cosine", "ddpm", "ddpm-scaled"])
@pytest.mark.parametrize("level", [0.0, 0.05])
def test_an_x0_expert_survives_the_clean_end(solver, name, level):
    """The last step must not land on its error divided by sigma."""
    schedule, g = SCHEDULES[name], torch.Generator().manual_seed(0)
    perfect = DATA.expert(0, Prediction.X0, schedule)
    noise = torch.randn(300, 16, generator=g, dtype=torch.float64)
    reference = SOLVERS["midpoint"](DATA.velocity, noise, uniform_times(400), None)
    transfer = Transfer(Prediction.X0, schedule)
    error = level * torch.randn(300, 16, generator=g, dtype=torch.float64)
    found = SOLVERS[solver](
        lambda x, t: transfer.velocity(lambda x, t: perfect(x, t) + error, x, t), noise, uniform_times(50), None
    )
    assert float((found - reference).square().mean().sqrt()) < 0.03 + 6 * level


def test_a_calibration_ends_at_the_data():
    """A last gain below 1 must not pull at t = 0, where x is the data."""
    calibration = Calibration(torch.tensor([-4.0, 6.0]), torch.tensor([0.5, 0.99]), torch.zeros(16))
    transfer = Transfer(Prediction.VELOCITY, LINEAR, calibration=calibration)
    x, t = torch.randn(4, 16), torch.tensor(0.0)
    expert = lambda x, t: torch.ones_like(x)  # noqa: E731
    torch.testing.assert_close(transfer.velocity(expert, x, t), expert(x, t), rtol=0, atol=1e-3)


def test_precision_is_that_of_x():
    """float64 times must not bring float32 samples closer to an end than their precision allows."""
    for t in (0.0, 1.0):
        for prediction in Prediction:
            x = torch.randn(50, 16)
            expert = lambda x, s, p=prediction: DATA.expert(0, p, COSINE)(x.double(), s.double()).float()  # noqa: E731
            coarse = Transfer(prediction, COSINE).velocity(expert, x, torch.tensor(t, dtype=torch.float64))
            true = DATA.velocity(x.double(), torch.tensor(t, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
            assert float((coarse - true).norm() / true.norm()) < 0.01


def test_an_expert_on_the_canonical_path_is_passed_through():
    output = torch.randn(3, 2)
    for conversion in (Conversion.EXACT, Conversion.PAPER):
        transfer = Transfer(Prediction.VELOCITY, LINEAR, conversion)
        assert transfer.velocity(lambda x, t: output, torch.zeros(3, 2), torch.tensor(1.0)) is output


class TestPaper:
    """Eq. 5-8 written out by hand, and each safeguard on its own."""

    t = torch.tensor(0.97, dtype=torch.float64)
    alpha, sigma = math.cos(math.pi / 2 * 0.97), math.sin(math.pi / 2 * 0.97)
    x = torch.tensor([[0.3, -2.0]], dtype=torch.float64)
    eps = torch.tensor([[1.0, 1.5]], dtype=torch.float64)

    def velocity(self, **guard: object) -> Tensor:
        bare: dict[str, object] = {"clamp": math.inf, "alpha_floor": 0.0, "damping_start": 1.0}
        safeguards = Safeguards(**{**bare, **guard})  # type: ignore[arg-type]
        transfer = Transfer(Prediction.EPS, COSINE, Conversion.PAPER, safeguards=safeguards)
        return transfer.velocity(lambda x, t: self.eps, self.x, self.t)

    def test_equations(self):
        x0 = (self.x - self.sigma * self.eps) / self.alpha
        torch.testing.assert_close(self.velocity(equation=8), self.eps - x0)
        seven = -math.pi / 2 * self.sigma * x0 + math.pi / 2 * self.alpha * self.eps
        torch.testing.assert_close(self.velocity(equation=7), seven)

    def test_clamp(self):
        x0 = ((self.x - self.sigma * self.eps) / self.alpha).clamp(-20, 20)
        assert float(x0.min()) == -20
        torch.testing.assert_close(self.velocity(clamp=20.0), self.eps - x0)

    def test_alpha_floor(self):
        x0 = (self.x - self.sigma * self.eps) / 0.2
        torch.testing.assert_close(self.velocity(alpha_floor=0.2), self.eps - x0)

    def test_damping(self):
        steep = math.pi / 2 * self.sigma
        torch.testing.assert_close(self.velocity(equation=7, damping_start=0.85), self.velocity(equation=7) / steep)
        torch.testing.assert_close(self.velocity(equation=8, damping_start=0.85), self.velocity(equation=8))
        self.t = torch.tensor(0.84, dtype=torch.float64)  # before it starts
        torch.testing.assert_close(self.velocity(equation=7, damping_start=0.85), self.velocity(equation=7))


def test_bad_input():
    with pytest.raises(InputError, match="unknown conversion 'exakt': did you mean 'exact'"):
        Transfer(Prediction.EPS, COSINE, "exakt")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs an expert that carries a calibration"):
        Transfer(Prediction.EPS, COSINE, Conversion.CALIBRATED)
    with pytest.raises(InputError, match=r"t must lie in \[0, 1\] but is 2"):
        Transfer(Prediction.EPS, COSINE).velocity(lambda x, t: x, torch.zeros(1, 2), torch.tensor(2.0))
    with pytest.raises(InputError, match="keep latents in float32"):
        Transfer(Prediction.EPS, COSINE).velocity(lambda x, t: x, torch.zeros(1, 2).half(), torch.tensor(0.5))
    with pytest.raises(InputError, match="float32 or float64 fractions"):
        Transfer(Prediction.EPS, COSINE).velocity(lambda x, t: x, torch.zeros(1, 2), torch.tensor(0.5).half())
    level, mean = torch.tensor([0.0, 1.0]), torch.zeros(2)
    for levels, gain in (
        (level, [0.5]),
        (level, [0.5, math.nan]),
        (level, [0.5, 1.5]),
        (level.flip(0), [0.5, 0.6]),
        (level[:0], []),
    ):
        with pytest.raises(InputError, match="for each of its rising levels: measure it again"):
            Calibration(levels, torch.tensor(gain), mean)
