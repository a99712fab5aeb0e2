"""Converted checkpoints in use: trained further, beside other experts in an ensemble, and Paris sampled as a whole."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor

from atoll.cli.main import main
from atoll.convert import Options, convert
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.diffusion.prediction import Prediction
from atoll.diffusion.schedules import get_schedule
from atoll.diffusion.solvers import uniform_times
from atoll.diffusion.transfer import Conversion, Transfer
from atoll.errors import InputError
from atoll.networks.expert import Expert
from atoll.partition.partition import partition
from atoll.sampling.assemble import assemble_paris
from atoll.sampling.ensemble import Ensemble, Mixture, generate
from atoll.sampling.expert import Prompts, VelocityExpert
from atoll.sampling.pipeline import AtollPipeline
from atoll.sampling.routing import get_routing
from atoll.training import expert as expert_module
from atoll.training import router as router_module
from published import HEADS, SIZE, paris_expert, paris_router, run_paris_expert, run_paris_router
from test_convert import make_dit

SHAPE = (12, 4, 4)
TRAIN = ["--steps", "4", "--batch", "8", "--sample-every", "0", "--save-every", "4", "--eval-every", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "avatars"
    prepare(Source("avatars", num=90, size=32), folder, PrepareSettings(size=32, codec="pca:8x12", holdout=0.2),
            0, progress=False)  # fmt: skip
    partition(folder, 2, cap=1.3, progress=False)
    return folder


@pytest.fixture(scope="module")
def dit(tmp_path_factory) -> Path:
    """Returns a class-conditional DiT for such latents, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("dit") / "dit"
    model = make_dit(tied=True, in_channels=12, out_channels=24, sample_size=4, patch_size=1)
    with torch.no_grad():  # smaller weights than in the parity tests
        model.proj_out_2.weight.mul_(0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _judged_quickly(monkeypatch):
    for judge in (expert_module, router_module):
        monkeypatch.setattr(judge, "EVALUATED_AT_THE_END", 64)  # their quality does not matter here


@pytest.fixture(scope="module")
def pair(data, dit, tmp_path_factory) -> tuple[Path, Path]:
    tmp_path = tmp_path_factory.mktemp("pair")
    main(["convert", str(dit), "--as-is", "--label", "3", "--data", str(data), "--cluster", "1",
          "--out", str(tmp_path / "expert_1")])  # fmt: skip
    main(["train", str(data), "--cluster", "0", "--model", "xs/1", "--out", str(tmp_path / "expert_0"), *TRAIN])
    return tmp_path / "expert_0", tmp_path / "expert_1"


def card(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


class TestTraining:
    def test_provenance(self, data, dit, tmp_path, capsys):
        """The card of an expert trained from them has the initial weights' source, hash and licence."""
        main(["convert", str(dit), "--data", str(data), "--out", str(tmp_path / "init")])
        printed = capsys.readouterr().out
        assert "licence: CC-BY-NC-4.0: for non-commercial use only" in printed
        assert "next: atoll train" in printed  # it does not use its text yet: it cannot be assembled
        main(["train", str(data), "--cluster", "1", "--init", str(tmp_path / "init"), "--out", str(tmp_path / "e"),
              *TRAIN])  # fmt: skip
        about = card(tmp_path / "e")
        theirs = json.loads((tmp_path / "init" / "conversion.json").read_text())
        assert about["init"]["init"]["sha256"] == theirs["sha256"]
        assert about["init"]["init"]["format"] == "diffusers DiTTransformer2DModel"
        assert about["init"]["init"]["source"] == "dit"
        assert about["init"]["license"] == "CC-BY-NC-4.0"
        assert "CC-BY-NC-4.0 (first weights)" in about["license"]
        assert about["objective"]["prediction"] == "velocity"
        assert Expert.load(tmp_path / "e").calibration is not None

    def test_a_bare_network_will_do(self, data, dit, tmp_path, capsys):
        main(["convert", str(dit), "--text-dim", "64", "--license", "mine", "--out", str(tmp_path / "init")])
        assert "next: atoll train DATA --cluster K --init" in capsys.readouterr().out
        assert "latent_space" not in card(tmp_path / "init")
        main(["train", str(data), "--init", str(tmp_path / "init"), "--out", str(tmp_path / "e"), *TRAIN])
        assert "mine (first weights)" in card(tmp_path / "e")["license"]

    def test_what_is_trained_goes_to_diffusers(self, data, tmp_path, capsys):
        main(["train", str(data), "--cluster", "0", "--model", "xs/1", "--out", str(tmp_path / "e"), *TRAIN])
        main(["convert", str(tmp_path / "e"), "--to", "diffusers", "--out", str(tmp_path / "d")])
        expert = Expert.load(tmp_path / "e")
        x, text = torch.randn(2, *SHAPE), torch.randn(2, 5, 64)
        model = PixArtTransformer2DModel.from_pretrained(tmp_path / "d")
        with torch.no_grad():
            theirs = model(x, text, timestep=torch.tensor([300.0, 300.0]), return_dict=False)[0]
            torch.testing.assert_close(theirs, expert.network(x, torch.tensor(300 / 999), text), rtol=0, atol=1e-5)

    def test_data_that_does_not_fit(self, data, tmp_path, capsys):
        make_dit(tied=True).save_pretrained(tmp_path / "dit")
        with pytest.raises(SystemExit):
            main(["convert", str(tmp_path / "dit"), "--data", str(data), "--out", str(tmp_path / "init")])
        assert "takes 4 channels, but the latents of" in capsys.readouterr().err
        for flags in (["--text-dim", "7"], ["--size", "8"]):
            with pytest.raises(SystemExit):
                main(["convert", str(tmp_path / "dit"), "--data", str(data), "--out", str(tmp_path / "init"), *flags])
            assert "leave them out with --data" in capsys.readouterr().err
        assert not (tmp_path / "init").exists()


class TestAsItIs:
    """A class-conditional DiT as an expert without text, together with one that reads text."""

    @pytest.mark.slow
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_in_an_ensemble(self, data, pair, scale):
        experts = [Expert.load(folder) for folder in pair]
        velocities = [VelocityExpert.of(expert) for expert in experts]
        text = torch.randn(4, 6, 64)
        prompts = Prompts((*text.split(1), torch.randn(1, 2, 64)), tuple(range(len(text))), (len(text),) * len(text))
        mixed = Ensemble(velocities, lambda x, t, _: x.new_tensor([[0.0, 1.0]]).expand(len(x), -1))
        velocity = Mixture(mixed, prompts, routing=get_routing("full"), guidance=scale)
        x, t = torch.randn(4, *SHAPE), torch.tensor(0.6)
        with torch.no_grad():
            both = velocity(x, t)
            theirs = velocities[1].velocity(x, t)
            alone = Mixture(Ensemble(velocities[:1]), prompts, guidance=scale)(x, t)
        w = torch.softmax(torch.tensor([0.0, 1.0]), 0)
        torch.testing.assert_close(both, w[0] * alone + w[1] * theirs, rtol=1e-4, atol=1e-4)

    def test_its_velocity_is_the_source_s(self, dit, pair):
        """The expert's canonical velocity is the exact transfer of diffusers' own prediction."""
        from diffusers import DiTTransformer2DModel

        model = DiTTransformer2DModel.from_pretrained(dit)
        expert = Expert.load(pair[1])

        def predict(x: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad():
                times = (999 * t).expand(len(x)) if t.dim() == 0 else 999 * t
                return model(x, times, torch.full((len(x),), 3), return_dict=False)[0][:, :12]

        assert expert.calibration is not None  # measured on the data that it is used for
        x, t = torch.randn(3, *SHAPE), torch.tensor(0.4)
        theirs = Transfer(Prediction.EPS, get_schedule("ddpm"), Conversion.EXACT).velocity(predict, x, t)
        with torch.no_grad():
            ours = VelocityExpert.of(expert, "exact").velocity(x, t)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_assembled_and_sampled(self, data, pair, tmp_path, capsys):
        main(["train-router", str(data), "--model", "xs/1", "--out", str(tmp_path / "router"), "--steps", "4",
              "--batch", "8", "--save-every", "4", "--eval-every", "4"])  # fmt: skip
        main(["assemble", *map(str, pair), "--router", str(tmp_path / "router"), "--data", str(data),
              "--out", str(tmp_path / "model")])  # fmt: skip
        printed = capsys.readouterr().out
        assert "CC-BY-NC-4.0 (expert_1)" in printed
        about = card(tmp_path / "model" / "expert_1")
        report = json.loads((tmp_path / "model" / "expert_1" / "conversion.json").read_text())
        assert about["init"]["sha256"] == report["sha256"]
        pipe = AtollPipeline.from_pretrained(tmp_path / "model")
        for routing in ("full", "top1"):
            output = pipe(["a red robot", "a ghost"], num_inference_steps=3, guidance_scale=2.0, routing=routing,
                        output_type="latent", seed=0, progress=False)  # fmt: skip
            assert bool(torch.isfinite(output.images).all())


# --- Paris --------------------------------------------------------------------------------------------------------


def write_paris(folder: Path, kl: Path, clip: Path, num: int = 3) -> Path:
    """Writes a folder in the layout of the published model, with tiny random weights."""
    sizes = {"num_heads": HEADS, "image_size": SIZE, "use_adaln_single": True, "use_class_conditioning": False}
    for k in range(num):
        part = folder / f"expert_{k}"
        part.mkdir(parents=True)
        weights = paris_expert(k)
        weights["final_layer.linear.weight"] *= 0.2
        save_file(weights, part / "diffusion_pytorch_model.safetensors")
        (part / "config.json").write_text(json.dumps({**sizes, "text_embed_dim": 16}))
    (folder / "router").mkdir()
    save_file(paris_router(9, num), folder / "router" / "pytorch_model.safetensors")
    (folder / "router" / "config.json").write_text(json.dumps({**sizes, "num_clusters": num}))
    shutil.copytree(kl, folder / "vae")
    for name in ("text_encoder", "tokenizer"):
        shutil.copytree(clip / name, folder / name)
    (folder / "config.json").write_text(json.dumps({"num_experts": num, "image_size": SIZE, "num_channels": 4}))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ParisPipeline"}))
    return folder


@pytest.fixture
def paris(tmp_path, kl, clip) -> Path:
    return write_paris(tmp_path / "paris", kl, clip)


class TestParis:
    TIMES = torch.tensor([0.0, 0.4, 1.0])

    def test_expert(self, paris):
        converted = convert(paris / "expert_1")
        x, text = torch.randn(3, 4, SIZE, SIZE), torch.randn(3, 5, 16)
        w = paris_expert(1)
        w["final_layer.linear.weight"] *= 0.2
        theirs = run_paris_expert(w, x, 999 * self.TIMES, text)
        torch.testing.assert_close(converted.network(x, self.TIMES, text), theirs, rtol=0, atol=1e-5)
        assert converted.objective.prediction == "velocity"
        assert converted.license == "mit"
        assert not converted.ledger.dropped
        assert not converted.ledger.initialised

    def test_router(self, paris):
        converted = convert(paris / "router")
        x = torch.randn(3, 4, SIZE, SIZE)
        theirs = run_paris_router(paris_router(9, 3), x, 999 * self.TIMES)
        torch.testing.assert_close(converted.network(x, self.TIMES), theirs, rtol=0, atol=1e-5)
        assert converted.network.config.num_experts == 3

    def test_objective(self, paris):
        assert convert(paris / "expert_0", Options(objective="ddpm")).objective.prediction == "eps"
        about = json.loads((paris / "expert_0" / "config.json").read_text())
        (paris / "expert_0" / "config.json").write_text(json.dumps({**about, "objective": "ddpm"}))
        assert convert(paris / "expert_0").objective.prediction == "eps"
        (paris / "expert_0" / "config.json").write_text(json.dumps({**about, "objective": "score"}))
        with pytest.raises(InputError, match="objective in the config of .* is 'score', not a known one"):
            convert(paris / "expert_0")

    def test_what_it_has_learned_stays(self, paris):
        with pytest.raises(InputError, match="reads text 16 wide, which cannot be changed to 7"):
            convert(paris / "expert_0", Options(text_dim=7))
        for part in ("expert_0", "router"):
            with pytest.raises(InputError, match="has learned its positions, for latents 8 a side"):
                convert(paris / part, Options(input_size=16))

    def test_parts_that_are_links(self, paris, tmp_path):
        (paris / "expert_1").rename(tmp_path / "elsewhere")
        (paris / "expert_1").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match="expert_1 cannot be part of a model .it is a link that leaves its folder"):
            assemble_paris(paris, tmp_path / "model")

    def test_objectives_of_any_type(self, paris):
        path = paris / "expert_0" / "config.json"
        about = json.loads(path.read_text())
        for value in (["fm"], {"a": 1}, "\x1b[2J" * 10**5):
            path.write_text(json.dumps({**about, "objective": value}))
            with pytest.raises(InputError, match="objective in the config of .* not a known one") as caught:
                convert(paris / "expert_0")
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 1000

    def test_what_to_do_next(self, paris, tmp_path, capsys):
        main(["convert", str(paris / "router"), "--out", str(tmp_path / "router")])
        assert "next: atoll assemble EXPERT ... --router" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["convert", str(paris), "--out", str(tmp_path / "all")])
        assert "holds several parts: give one of them" in capsys.readouterr().err

    def test_as_a_model(self, paris, tmp_path, capsys):
        main(["convert", str(paris), "--to", "model", "--out", str(tmp_path / "model")])
        printed = capsys.readouterr().out
        assert "next: atoll sample" in printed
        assert "taken as flow matching, else give --objective ddpm (expert_0, expert_1, expert_2)" in printed
        report = json.loads((tmp_path / "model" / "expert_2" / "conversion.json").read_text())
        assert report["sha256"] == card(tmp_path / "model" / "expert_2")["init"]["sha256"]
        main(["convert", str(paris), "--to", "model", "--out", str(tmp_path / "model")])  # again, over it
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "paris"]
        pipe = AtollPipeline.from_pretrained(tmp_path / "model", verify=True)
        assert pipe.index.num_experts == 3
        assert not pipe.text_encoder.hide_padding
        output = pipe("cat cat", num_inference_steps=4, guidance_scale=2.0, routing="topk:2", solver="euler", seed=[7],
                    output_type="latent", progress=False)  # fmt: skip
        torch.testing.assert_close(output.images, self.by_hand(pipe, "cat cat", 7, 4, 2.0), rtol=1e-3, atol=1e-3)
        main(["sample", str(tmp_path / "model"), "cat", "--steps", "2", "--out", str(tmp_path / "pictures")])

    def by_hand(self, pipe: AtollPipeline, prompt: str, seed: int, steps: int, scale: float) -> Tensor:
        """Computes Euler steps with the two most probable experts, each guided before they are mixed."""
        texts = torch.cat([pipe.text_encoder.encode(pipe.text_encoder.tokenize([p]))[0] for p in (prompt, "")])
        assert texts.shape[1] == 16  # all tokens, padding too
        x = torch.randn(4, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))[None]
        weights = []
        for k in range(3):
            weights.append(paris_expert(k))
            weights[-1]["final_layer.linear.weight"] *= 0.2
        router = paris_router(9, 3)
        times = uniform_times(steps)
        for t, after in pairwise(times.float()):
            p = torch.softmax(run_paris_router(router, x, (999 * t).reshape(1)), 1)[0]
            best, who = p.topk(2)
            u = torch.zeros_like(x)
            for weight, k in zip(best / best.sum(), who.tolist(), strict=True):
                both = run_paris_expert(weights[k], x.expand(2, -1, -1, -1), (999 * t).expand(2), texts)
                u += weight * (both[1:] + scale * (both[:1] - both[1:]))
            x = x + (after - t) * u
        return x

    def test_not_all_of_it(self, paris, tmp_path):
        shutil.rmtree(paris / "vae")
        with pytest.raises(InputError, match="has no vae"):
            assemble_paris(paris, tmp_path / "model")
        with pytest.raises(InputError, match="has no expert_0"):
            assemble_paris(tmp_path, tmp_path / "model")

    def test_a_key_too_many(self, paris):
        w = {**paris_router(9, 3), "head.5.weight": torch.zeros(3)}
        save_file(w, paris / "router" / "pytorch_model.safetensors")
        with pytest.raises(InputError, match=r"head.5.weight, which this architecture does not know"):
            convert(paris / "router")


def test_generate_without_any_text(data, dit, tmp_path):
    """An ensemble of experts without text needs no prompt."""
    main(["convert", str(dit), "--as-is", "--data", str(data), "--out", str(tmp_path / "e")])
    ensemble = Ensemble([VelocityExpert.of(Expert.load(tmp_path / "e"))])
    latents = generate(ensemble, None, [0, 1], times=uniform_times(3))
    assert latents.shape == (2, *SHAPE)
