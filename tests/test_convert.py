"""Published checkpoints as experts: parity with their own forward passes, complete key mappings, and bad files."""

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, PixArtTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.cli.main import main
from atoll.convert import REPORT, Options, convert, describe, save
from atoll.convert.diffusers_export import export
from atoll.convert.ledger import Layer, spacing_of
from atoll.convert.modulation import TimeMLP, fit_single
from atoll.diffusion.objective import Objective
from atoll.diffusion.prediction import Prediction
from atoll.errors import InputError
from atoll.networks import published as reading
from atoll.networks.dit import DiT, DiTConfig, sincos_positions
from published import CLASSES, DEPTH, HEADS, SIZE, WIDTH, class_dit, layer, pixart, places, run_class_dit, run_pixart
from published import draw as draw_weights

TEXT = 24


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def text() -> Tensor:
    return torch.randn(3, 7, TEXT, generator=torch.Generator().manual_seed(6))


TIMES = torch.tensor([0.0, 321 / 999, 1.0])


def write(tmp_path, weights, name="DiT-XL-2-256x256.pt"):
    path = tmp_path / name
    torch.save(weights, path)
    return path


def make_dit(seed: int = 0, tied: bool = False, **changes: object) -> DiTTransformer2DModel:
    """Returns diffusers' class with no zero weight; if tied, blocks share one time MLP, as in converted originals."""
    torch.manual_seed(seed)
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS, "num_layers": DEPTH}
    model = DiTTransformer2DModel(
        **{**sizes, "in_channels": 4, "out_channels": 8, "sample_size": SIZE, "num_embeds_ada_norm": CLASSES,
           "norm_eps": 1e-6, **changes}
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    first = model.transformer_blocks[0].norm1.emb
    for block in model.transformer_blocks[1:] if tied else ():
        block.norm1.emb.load_state_dict(first.state_dict())
    return model.eval()


def off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.norm())


class TestAsItIs:
    """An expert without text that reproduces the source's output for one class."""

    @pytest.mark.parametrize("label", [None, 3])
    def test_original(self, tmp_path, x, label):
        w = class_dit()
        converted = convert(write(tmp_path, w), Options(as_is=True, label=label, num_heads=HEADS))
        theirs = run_class_dit(w, x, 999 * TIMES, CLASSES if label is None else label)
        assert theirs.std() > 0.1
        torch.testing.assert_close(converted.network(x, TIMES), theirs[:, :4], rtol=0, atol=1e-5)
        assert converted.objective == Objective(Prediction.EPS, "ddpm")
        assert converted.residual is None
        assert converted.network.config.text_dim is None

    def test_diffusers(self, tmp_path, x):
        model = make_dit(tied=True)
        model.save_pretrained(tmp_path)
        converted = convert(tmp_path, Options(as_is=True, label=2))
        with torch.no_grad():
            theirs = model(x, 999 * TIMES, torch.full((3,), 2), return_dict=False)[0]
        torch.testing.assert_close(converted.network(x, TIMES), theirs[:, :4], rtol=0, atol=1e-5)

    def test_diffusers_with_a_time_mlp_a_block(self, tmp_path, x):
        """A model trained from scratch in diffusers is fitted, and the stated residual is its actual error."""
        model = make_dit()
        model.save_pretrained(tmp_path)
        converted = convert(tmp_path, Options(as_is=True, label=2))
        assert converted.residual is not None
        block, t = model.transformer_blocks[2], torch.linspace(0, 1, 500)
        with torch.no_grad():
            label = torch.full((500,), 2)
            theirs = block.norm1.linear(block.norm1.silu(block.norm1.emb(999 * t, label, hidden_dtype=torch.float32)))
            tau = nn.functional.silu(converted.network.time_embed(t))
            ours = converted.network.blocks[2].time_block(tau)
        assert off(ours, theirs) == pytest.approx(converted.residual["by_block"][2], rel=0.02)
        model.transformer_blocks[1].norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
        model.save_pretrained(tmp_path)
        converted = convert(tmp_path, Options(as_is=True, label=2))
        assert converted.residual["by_block"][1] == 0 < converted.residual["by_block"][2]
        assert len(converted.residual["by_block"]) == DEPTH

    def test_sit(self, tmp_path, x):
        """SiT's time is reversed and its velocity has the opposite sign: x_s = s x0 + (1 - s) eps."""
        w = class_dit(1)
        converted = convert(write(tmp_path, w, "SiT-XL-2-256.pt"), Options(as_is=True, label=4, num_heads=HEADS))
        theirs = run_class_dit(w, x, 1 - TIMES, 4)[:, :4]
        torch.testing.assert_close(converted.network(x, TIMES), -theirs, rtol=0, atol=1e-5)
        assert converted.objective == Objective(Prediction.VELOCITY, "linear")
        assert converted.license == "mit"
        assert converted.network.config.time_scale == 1.0

    def test_sit_says_how_it_was_trained(self, tmp_path, x):
        w = class_dit(1)
        args = argparse.Namespace(path_type="GVP", prediction="noise", model="SiT-XL/2")
        path = write(tmp_path, {"model": class_dit(2), "ema": w, "opt": {"state": {}}, "args": args}, "0100000.pt")
        converted = convert(path, Options(as_is=True, num_heads=HEADS))
        assert converted.objective == Objective(Prediction.EPS, "cosine")
        torch.testing.assert_close(
            converted.network(x, TIMES), run_class_dit(w, x, 1 - TIMES, CLASSES)[:, :4], rtol=0, atol=1e-5
        )
        bad = argparse.Namespace(path_type="VP", prediction="score")
        with pytest.raises(InputError, match="predicts 'score' on the path 'VP'"):
            convert(write(tmp_path, {"ema": w, "args": bad}), Options(num_heads=HEADS))

    def test_which_of_the_two(self, tmp_path):
        path = write(tmp_path, class_dit(), "checkpoint.pt")
        with pytest.raises(InputError, match="may be a DiT or a SiT.*--kind"):
            convert(path, Options(num_heads=HEADS))
        assert convert(path, Options(num_heads=HEADS, kind="sit")).format == "SiT"
        for name in ("conditional.pt", "university.pt", "dit-against-sit.pt"):  # words that merely contain the names
            with pytest.raises(InputError, match="may be a DiT or a SiT"):
                convert(write(tmp_path, class_dit(), name), Options(num_heads=HEADS))
        assert convert(write(tmp_path, class_dit(), "my_SiT_B2.pt"), Options(num_heads=HEADS)).format == "SiT"


class TestClasses:
    """Which embedding is the null class, if there is one."""

    def test_a_file_that_says_how_many(self, tmp_path):
        args = argparse.Namespace(num_classes=CLASSES, model="DiT-XL/2")
        converted = convert(write(tmp_path, {"ema": class_dit(), "args": args}), Options(num_heads=HEADS))
        assert f"class {CLASSES}, the last, taken for that of no class, is part" in converted.notes[0]
        args.num_classes = CLASSES + 1  # as many as there are rows
        path = write(tmp_path, {"ema": class_dit(), "args": args})
        with pytest.raises(InputError, match="has no embedding of no class: give --label, a class from 0 to 10"):
            convert(path, Options(num_heads=HEADS))
        assert "of class 10 is part" in convert(path, Options(num_heads=HEADS, label=10)).notes[0]

    def test_imagenet(self, tmp_path):
        converted = convert(write(tmp_path, class_dit(classes=1000)), Options(num_heads=HEADS))
        assert "class 1000, the last, taken for that of no class, is part" in converted.notes[0]
        with pytest.raises(InputError, match="was trained on 1000 classes and has no embedding of no class"):
            convert(write(tmp_path, class_dit(classes=999)), Options(num_heads=HEADS))

    def test_nothing_tells(self, tmp_path):
        converted = convert(write(tmp_path, class_dit()), Options(num_heads=HEADS))
        assert "class 10, the last, taken for that of no class," in converted.notes[0]

    def test_diffusers(self, tmp_path):
        make_dit(tied=True).save_pretrained(tmp_path)
        assert f"class {CLASSES}, the last, taken for that of no class, is part" in convert(tmp_path).notes[0]


class TestFit:
    """AdaLN-Single in the place of per-block modulation."""

    WIDE = 128  # a narrow time MLP cannot fit every curve

    def in_family(self, seed: int = 0) -> dict[str, Tensor]:
        """Returns a DiT whose blocks share one modulation curve per channel, with their own factors and constants."""
        w = class_dit(seed, width=self.WIDE)
        g = torch.Generator().manual_seed(seed)
        shared = w["blocks.0.adaLN_modulation.1.weight"]
        for i in range(DEPTH):
            sign = torch.where(torch.rand(4, self.WIDE, generator=g) < 0.5, -1.0, 1.0)
            factor = sign * (0.7 + 0.6 * torch.rand(4, self.WIDE, generator=g))
            w[f"blocks.{i}.adaLN_modulation.1.weight"] = shared * factor[[0, 0, 1, 2, 2, 3]].flatten()[:, None]
        last = w["final_layer.adaLN_modulation.1.weight"]
        last[: self.WIDE] = last[self.WIDE :]  # the output's shift and scale vary together
        return w

    def test_what_it_can_express_is_kept(self, tmp_path, x, text):
        w = self.in_family()
        converted = convert(write(tmp_path, w), Options(num_heads=HEADS, text_dim=TEXT))
        assert max(converted.residual["by_block"]) < 0.06
        t = torch.linspace(0.02, 1, 9)
        many = x[:1].expand(9, -1, -1, -1)
        theirs = run_class_dit(w, many, 999 * t, CLASSES)[:, :4]
        ours = off(converted.network(many, t, text[:1]), theirs)
        plain = convert(write(tmp_path, w), Options(num_heads=HEADS, text_dim=TEXT, fit="mean"))
        assert ours < 0.15 < 0.3 * off(plain.network(many, t, text[:1]), theirs)

    def test_better_than_at_one_point(self, tmp_path, x, text, report):
        """Tested on blocks that have nothing in common, the worst case."""
        errors = {}
        for fit in ("curve", "mean", "point"):
            total = 0.0
            for seed in range(3):
                w = class_dit(seed)
                converted = convert(write(tmp_path, w), Options(num_heads=HEADS, text_dim=TEXT, fit=fit))
                t = torch.linspace(0.02, 1, 9)
                many = x[:1].expand(9, -1, -1, -1)
                total += off(
                    converted.network(many, t, text[:1]), run_class_dit(w, many, 999 * t, CLASSES)[:, :4]
                ) / 3  # fmt: skip
            errors[fit] = total
        report(f"converted random DiT, output off by: {', '.join(f'{k} {v:.3f}' for k, v in errors.items())}")
        assert errors["curve"] < 0.6 * min(errors["mean"], errors["point"])

    def test_equal_at_one_point(self, tmp_path, x, text):
        w = class_dit()
        converted = convert(write(tmp_path, w), Options(num_heads=HEADS, text_dim=TEXT, fit="point"))
        at = torch.tensor(500 / 999)
        theirs = run_class_dit(w, x, (999 * at).expand(3), CLASSES)[:, :4]
        torch.testing.assert_close(converted.network(x, at, text), theirs, rtol=0, atol=2e-4)
        converted = convert(write(tmp_path, w, "SiT.pt"), Options(num_heads=HEADS, text_dim=TEXT, fit="point"))
        theirs = -run_class_dit(w, x, (1 - at).expand(3), CLASSES)[:, :4]
        torch.testing.assert_close(converted.network(x, at, text), theirs, rtol=0, atol=2e-4)

    @pytest.mark.parametrize("fit", ["curve", "mean", "point"])
    def test_the_stated_residual(self, tmp_path, fit):
        """Measured independently: the new network's modulation times its layers' factors, against the source."""
        w = class_dit(3)
        converted = convert(write(tmp_path, w), Options(num_heads=HEADS, text_dim=TEXT, fit=fit))
        network, t = converted.network, torch.linspace(0, 1, 500)
        f = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        angle = 999 * t[:, None] * f
        seen = torch.cat([angle.cos(), angle.sin()], 1)
        hidden = nn.functional.silu(seen @ w["t_embedder.mlp.0.weight"].T + w["t_embedder.mlp.0.bias"])
        c = hidden @ w["t_embedder.mlp.2.weight"].T + w["t_embedder.mlp.2.bias"]
        c = nn.functional.silu(c + w["y_embedder.embedding_table.weight"][CLASSES])
        with torch.no_grad():
            shared = network.time_block(nn.functional.silu(network.time_embed(t))).unflatten(1, (6, -1))
        for i, block in enumerate(network.blocks):
            name = f"blocks.{i}.adaLN_modulation.1"
            theirs = (c @ w[f"{name}.weight"].T + w[f"{name}.bias"]).unflatten(1, (6, -1))
            columns = [block.attention.qkv.weight[0] / w[f"blocks.{i}.attn.qkv.weight"][0],
                       block.mlp[0].weight[0] / w[f"blocks.{i}.mlp.fc1.weight"][0]]  # fmt: skip
            rows = [block.attention.out.bias / w[f"blocks.{i}.attn.proj.bias"],
                    block.mlp[2].bias / w[f"blocks.{i}.mlp.fc2.bias"]]  # fmt: skip
            factor = torch.stack([columns[0], columns[0], rows[0], columns[1], columns[1], rows[1]])
            ours = shared + block.modulation
            ours[:, (1, 4)] += 1
            ours = factor * ours
            ours[:, (1, 4)] -= 1
            assert off(ours, theirs) == pytest.approx(converted.residual["by_block"][i], rel=0.01)

    def test_still_time(self):
        """A source whose output layer ignores the time, as at the start of training, keeps its time embedding."""
        w, wide = class_dit(width=self.WIDE), self.WIDE
        mlp = TimeMLP(Layer(w["t_embedder.mlp.0.weight"], w["t_embedder.mlp.0.bias"]),
                      Layer(w["t_embedder.mlp.2.weight"], w["t_embedder.mlp.2.bias"]), 999.0)  # fmt: skip
        last = Layer(torch.zeros(2 * wide, wide), torch.zeros(2 * wide))
        one = Layer(w["blocks.0.adaLN_modulation.1.weight"], w["blocks.0.adaLN_modulation.1.bias"])
        for out in (torch.zeros(16, wide), torch.randn(16, wide)):
            single = fit_single([mlp] * 3, [one] * 3, last, out)
            assert max(single.residual) < 0.06

    def test_text_is_silent_at_first(self, tmp_path, x, text):
        converted = convert(write(tmp_path, class_dit()), Options(num_heads=HEADS, text_dim=TEXT))
        network = converted.network
        torch.testing.assert_close(network(x, TIMES, text), network(x, TIMES, 9 * text), rtol=0, atol=0)
        assert network.text_embed.weight.std().item() == pytest.approx(0.02, rel=0.1)

    def test_other_latents(self, tmp_path, text):
        converted = convert(write(tmp_path, class_dit()), Options(num_heads=HEADS, text_dim=TEXT, input_size=16))
        assert converted.network(torch.randn(1, 4, 16, 16), torch.tensor(0.5), text[:1]).shape == (1, 4, 16, 16)
        assert "pos_embed" in converted.ledger.dropped


class TestPixArt:
    def test_original(self, tmp_path, x, text):
        w = pixart(text_dim=TEXT)
        for content in (w, {"state_dict": w, "epoch": 3}, {"state_dict": {}, "state_dict_ema": w}):
            converted = convert(write(tmp_path, content, "PixArt.pth"), Options(num_heads=HEADS))
            theirs = run_pixart(w, x, 999 * TIMES, text)
            torch.testing.assert_close(converted.network(x, TIMES, text), theirs[:, :4], rtol=0, atol=1e-5)
            assert converted.ledger.dropped == {"y_embedder.y_embedding": "the null text is the encoded empty string"}
            assert converted.objective == Objective(Prediction.EPS, "ddpm")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("step", [1.0, 0.5])
    def test_original_of_another_size(self, tmp_path, text, step, dtype):
        """The file's positions are stretched over larger latents; for 1024 pixels they are 0.5 apart."""
        w = {**pixart(text_dim=TEXT), "pos_embed": places(WIDTH, SIZE // 2, step)}
        path = write(tmp_path, {**w, "pos_embed": w["pos_embed"].to(dtype)}, "PixArt.pth")
        converted = convert(path, Options(num_heads=HEADS, input_size=16))
        x = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(5))
        w["pos_embed"] = places(WIDTH, 8, step / 2)
        theirs = run_pixart(w, x, 999 * TIMES, text)
        torch.testing.assert_close(converted.network(x, TIMES, text), theirs[:, :4], rtol=0, atol=1e-5)

    def test_learned_places_have_one_size(self, tmp_path):
        w = pixart(text_dim=TEXT)
        w["pos_embed"] = torch.randn(1, 16, WIDTH)
        path = write(tmp_path, w, "PixArt.pth")
        convert(path, Options(num_heads=HEADS))
        with pytest.raises(InputError, match="not the sines and cosines of a grid.*leave out --size"):
            convert(path, Options(num_heads=HEADS, input_size=16))

    @pytest.mark.parametrize(("sees_sizes", "step"), [(False, 1.0), (True, 8.0)])
    def test_original_without_places(self, tmp_path, sees_sizes, step):
        """Models for 1024 pixels, which are given the image's size, have 32 units per side at any size."""
        w = pixart(text_dim=TEXT)
        del w["pos_embed"]
        for name, rows in (("csize_embedder", WIDTH // 4), ("ar_embedder", WIDTH // 2)) if sees_sizes else ():
            w |= draw_weights(layer(f"{name}.mlp.0", rows, 256) | layer(f"{name}.mlp.2", rows, rows))
        converted = convert(write(tmp_path, w, "PixArt.pth"), Options(num_heads=HEADS, input_size=SIZE))
        assert spacing_of(converted.network.positions) == step

    def make(self, **changes: object) -> PixArtTransformer2DModel:
        torch.manual_seed(0)
        sizes = {"num_attention_heads": HEADS, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 48}
        model = PixArtTransformer2DModel(
            **{**sizes, "sample_size": 8, "caption_channels": TEXT, "use_additional_conditions": False, **changes}
        )
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.15)
        return model.eval()

    @pytest.mark.parametrize("changes", [{}, {"interpolation_scale": 2}, {"use_additional_conditions": True}])
    def test_diffusers(self, tmp_path, x, text, changes):
        model = self.make(**changes)
        model.save_pretrained(tmp_path)
        converted = convert(tmp_path)
        sizes = {"resolution": torch.full((3, 2), 64.0), "aspect_ratio": torch.ones(3, 1)}
        with torch.no_grad():
            theirs = model(
                x, text, timestep=999 * TIMES, return_dict=False,
                added_cond_kwargs=sizes if changes.get("use_additional_conditions") else None,
            )[0]  # fmt: skip
        assert theirs.std() > 0.1
        torch.testing.assert_close(converted.network(x, TIMES, text), theirs[:, :4], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("scale", [1, 2])
    def test_diffusers_of_another_size(self, tmp_path, text, scale):
        """Its positions are stretched over larger latents, as in diffusers."""
        model = self.make(interpolation_scale=scale)
        model.save_pretrained(tmp_path)
        x = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            theirs = model(x, text, timestep=999 * TIMES, return_dict=False)[0]
        ours = convert(tmp_path, Options(input_size=16)).network(x, TIMES, text)
        torch.testing.assert_close(ours, theirs[:, :4], rtol=0, atol=1e-5)

    def test_there_and_back(self, tmp_path, x, text):
        """Converting diffusers' folder to an expert and back gives the same weights."""
        model = self.make(out_channels=4)
        model.save_pretrained(tmp_path / "a")
        save(convert(tmp_path / "a"), tmp_path / "expert")
        export(tmp_path / "expert", tmp_path / "b")
        again = PixArtTransformer2DModel.from_pretrained(tmp_path / "b")
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=0)

    def test_texts_of_another_width(self, tmp_path):
        self.make().save_pretrained(tmp_path)
        converted = convert(tmp_path, Options(text_dim=16))
        assert converted.network.config.text_dim == 16
        assert "caption_projection.linear_1.weight" in converted.ledger.dropped
        assert converted.ledger.initialised["text_embed.0.weight"] == "N(0, 0.02)"


class TestExport:
    def expert(self, **changes: object) -> DiT:
        torch.manual_seed(0)
        sizes = {"input_size": SIZE, "hidden_size": WIDTH, "depth": 2, "num_heads": HEADS, "text_dim": TEXT}
        dit = DiT(DiTConfig(**{**sizes, **changes}))
        for parameter in dit.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.15)
        return dit.eval()

    @pytest.mark.parametrize("projection", ["linear", "mlp"])
    def test_the_same_outputs_in_diffusers(self, tmp_path, x, text, projection):
        dit = self.expert(text_projection=projection)
        dit.card = {"objective": {"prediction": "velocity", "schedule": "linear"}, "license": "mit"}
        dit.save_pretrained(tmp_path / "expert")
        lines = export(tmp_path / "expert", tmp_path / "out")
        assert "velocity on the schedule linear" in lines[0]
        model = PixArtTransformer2DModel.from_pretrained(tmp_path / "out")
        mask = torch.arange(7) < torch.tensor([[2], [7], [4]])
        with torch.no_grad():
            for real in (None, mask):
                theirs = model(x, text, timestep=999 * TIMES, encoder_attention_mask=real, return_dict=False)[0]
                ours = dit(x, TIMES, text, real)
                assert theirs.std() > 0.1
                torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
        about = json.loads((tmp_path / "out" / "atoll.json").read_text())
        assert about["objective"]["prediction"] == "velocity"
        assert "999 t" in about["time"]
        assert about["license"] == "mit"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"adaln": "block"}, "per-block modulation"),
            ({"text_dim": None}, "no text"),
            ({"cross_attention_norm": True}, "a norm before cross-attention"),
            ({"frequency_shift": 1}, "waves of the time"),
            ({"mlp_ratio": 2.0}, "MLPs that are not 4 times as wide"),
        ],
    )
    def test_refused(self, tmp_path, changes, message):
        self.expert(**changes).save_pretrained(tmp_path / "expert")
        with pytest.raises(InputError, match=message):
            export(tmp_path / "expert", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("step", [2.0, 0.5, 1 / 3, 0.8])
    def test_places_another_way_apart(self, tmp_path, x, text, step):
        dit = self.expert()
        dit.positions.data.copy_(places(WIDTH, SIZE // 2, step)[0])
        dit.save_pretrained(tmp_path / "expert")
        export(tmp_path / "expert", tmp_path / "out")
        about = json.loads((tmp_path / "out" / "config.json").read_text())
        assert about["interpolation_scale"] == pytest.approx(1 / step)
        model = PixArtTransformer2DModel.from_pretrained(tmp_path / "out")
        with torch.no_grad():
            theirs = model(x, text, timestep=999 * TIMES, return_dict=False)[0]
            torch.testing.assert_close(theirs, dit(x, TIMES, text), rtol=0, atol=1e-5)

    def test_a_sit_takes_its_time_from_0_to_1(self, tmp_path, x, text):
        save(
            convert(write(tmp_path, class_dit(), "SiT.pt"), Options(num_heads=HEADS, text_dim=TEXT)),
            tmp_path / "expert",
        )
        lines = export(tmp_path / "expert", tmp_path / "out")
        assert "for timestep 1 t" in lines[0]
        assert json.loads((tmp_path / "out" / "atoll.json").read_text())["time"].startswith("timestep = 1 t")
        model, ours = (
            PixArtTransformer2DModel.from_pretrained(tmp_path / "out"),
            DiT.from_pretrained(tmp_path / "expert"),
        )
        with torch.no_grad():
            theirs = model(x, text, timestep=TIMES, return_dict=False)[0]
            torch.testing.assert_close(theirs, ours(x, TIMES, text), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("objective", [["fm"], {"prediction": "\x1b[2J" * 10**5}])
    def test_cards_of_strangers(self, tmp_path, objective):
        dit = self.expert()
        dit.card = {"objective": objective, "license": "\x1b[2J" * 10**5}
        dit.save_pretrained(tmp_path / "expert")
        lines = export(tmp_path / "expert", tmp_path / "out")
        assert all(line.isprintable() and len(line) < 1000 for line in lines)

    def test_learned_positions(self, tmp_path):
        dit = self.expert()
        dit.positions.data += 0.1
        dit.save_pretrained(tmp_path / "expert")
        with pytest.raises(InputError, match="has positions that it has learned"):
            export(tmp_path / "expert", tmp_path / "out")


class TestSpacing:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("step", [0.125, 1 / 3, 0.5, 1.0, 1.5, 2.0, 4.0, 7.0])
    @pytest.mark.parametrize(("width", "side"), [(32, 4), (96, 16), (1152, 32)])
    def test_found(self, step, width, side, dtype):
        assert spacing_of(sincos_positions(width, side, step).to(dtype)) == step

    def test_none(self):
        assert spacing_of(torch.randn(16, 32, generator=torch.Generator().manual_seed(0))) is None
        assert spacing_of(torch.zeros(16, 32)) is None
        assert spacing_of(torch.zeros(15, 32)) is None
        assert spacing_of(torch.zeros(16, 2)) is None
        assert spacing_of(sincos_positions(32, 1)) == 1


class TestBooks:
    """Every source key is used or dropped with a reason, and every network key is filled or initialised."""

    @pytest.mark.parametrize("as_is", [False, True])
    def test_nothing_is_silent(self, tmp_path, as_is):
        w = class_dit()
        converted = convert(write(tmp_path, w), Options(num_heads=HEADS, as_is=as_is))
        save(converted, tmp_path / "out")
        books = json.loads((tmp_path / "out" / REPORT).read_text())
        assert set(books["consumed"]) | set(books["dropped"]) == set(w)
        assert not set(books["consumed"]) & set(books["dropped"])
        weights = load_file(tmp_path / "out" / "model.safetensors")
        text = {name for name in weights if name.startswith("text_embed") or ".cross." in name}
        assert set(books["initialised"]) == text
        assert bool(text) != as_is
        assert books["license"] == "CC-BY-NC-4.0"
        assert len(books["sha256"]) == 64
        assert books["source"] == "DiT-XL-2-256x256.pt"
        assert books["asked_for"]["num_heads"] == HEADS
        if not as_is:
            assert len(books["modulation"]["by_block"]) == DEPTH
        DiT.from_pretrained(tmp_path / "out")

    def test_a_key_too_many(self, tmp_path):
        w = {**class_dit(), "blocks.0.attn.q_norm.weight": torch.ones(8)}
        with pytest.raises(InputError, match="blocks.0.attn.q_norm.weight, which this architecture does not know"):
            convert(write(tmp_path, w), Options(num_heads=HEADS))

    @pytest.mark.parametrize("key", ["blocks.1.mlp.fc2.bias", "final_layer.linear.weight", "t_embedder.mlp.2.weight"])
    def test_a_key_too_few(self, tmp_path, key):
        w = class_dit()
        del w[key]
        with pytest.raises(InputError, match=f"lacks {key}"):
            convert(write(tmp_path, w), Options(num_heads=HEADS))

    def test_a_block_too_few(self, tmp_path):
        """With the second of three blocks missing, the third block's keys are not ignored."""
        w = {name: weight for name, weight in class_dit().items() if not name.startswith("blocks.1.")}
        with pytest.raises(InputError, match="blocks.2.* which this architecture does not know"):
            convert(write(tmp_path, w), Options(num_heads=HEADS))

    def test_a_wrong_shape(self, tmp_path):
        w = class_dit()
        w["blocks.1.attn.proj.weight"] = torch.zeros(WIDTH, WIDTH + 1)
        with pytest.raises(InputError, match="size mismatch for blocks.1.attention.out.weight"):
            convert(write(tmp_path, w), Options(num_heads=HEADS))

    def test_one_number_is_not_broadcast(self, tmp_path):
        w = {**class_dit(), "blocks.1.attn.proj.bias": torch.ones(1)}
        with pytest.raises(InputError, match="its weights do not fit together"):
            convert(write(tmp_path, w), Options(num_heads=HEADS))

    def test_half_precision(self, tmp_path, x):
        w = {name: weight.bfloat16() for name, weight in class_dit().items()}
        converted = convert(write(tmp_path, w), Options(num_heads=HEADS, as_is=True))
        theirs = run_class_dit({name: weight.float() for name, weight in w.items()}, x, 999 * TIMES, CLASSES)
        torch.testing.assert_close(converted.network(x, TIMES), theirs[:, :4], rtol=0, atol=1e-5)

    def test_safetensors_and_prefixes(self, tmp_path, x):
        w = class_dit()
        save_file({f"module.{name}": weight for name, weight in w.items()}, tmp_path / "dit.safetensors")
        first = convert(tmp_path / "dit.safetensors", Options(num_heads=HEADS))
        wrapped = {"ema": {}, "model": w}  # EMA weights that were never computed
        second = convert(write(tmp_path, wrapped), Options(num_heads=HEADS))
        for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_shards_of_a_pipeline(self, tmp_path):
        """A whole pipeline's folder, with its transformer in several files."""
        model = make_dit(tied=True)
        model.save_pretrained(tmp_path / "transformer", max_shard_size="40KB")
        assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
        model.save_pretrained(tmp_path / "whole")
        one, other = (convert(folder, Options(as_is=True)).network for folder in (tmp_path, tmp_path / "whole"))
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
        next((tmp_path / "transformer").glob("*-00002-of-*.safetensors")).unlink()
        with pytest.raises(InputError, match="is missing: download it again"):
            convert(tmp_path)

    def test_what_is_told(self, tmp_path):
        lines = "\n".join(describe(convert(write(tmp_path, class_dit()), Options(num_heads=HEADS)), "out"))
        for part in ("facebookresearch DiT", "32 wide, 3 blocks", "M parameters", "modulation: off by", "initialised",
                     "CC-BY-NC-4.0: for non-commercial use only", "class 10, the last, taken for that"):  # fmt: skip
            assert part in lines


def test_configs_of_before(tmp_path):
    """A config.json from before per-block modulation and wave spacings existed still loads unchanged."""
    dit = DiT(DiTConfig(input_size=SIZE, hidden_size=WIDTH, depth=1, num_heads=HEADS, text_dim=TEXT))
    dit.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    del about["architecture"]["adaln"], about["architecture"]["frequency_shift"]
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert DiT.from_pretrained(tmp_path).config == dit.config
    for changes, message in (({"adaln": "zero"}, "adaln"), ({"frequency_shift": 2}, "unknown frequency_shift '2'")):
        with pytest.raises(InputError, match=message):
            DiTConfig(**changes)


class Attack:
    """A pickle that creates a file when it is opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class TestBadInput:
    def refused(self, capsys, path, message, *flags):
        with pytest.raises(SystemExit) as stop:
            main(["convert", str(path), "--out", str(path.parent / "out"), *flags])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1
        assert "Traceback" not in error
        assert not (path.parent / "out").exists()

    @pytest.mark.parametrize("old", [False, True])
    def test_a_pickle_with_code_in_it(self, tmp_path, capsys, old):
        trap = tmp_path / "trap"
        content = {**class_dit(), "z": Attack(str(trap))}
        torch.save(content, tmp_path / "dit.pt", _use_new_zipfile_serialization=not old)
        self.refused(capsys, tmp_path / "dit.pt", "is refused: it is a pickle with code in it")
        assert not trap.exists()

    @pytest.mark.parametrize("keep", [0.9, 0.5, 0.001])
    def test_truncated(self, tmp_path, capsys, keep):
        path = write(tmp_path, class_dit())
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content))])
        self.refused(capsys, path, "truncated or damaged")

    def test_truncated_safetensors(self, tmp_path, capsys):
        path = tmp_path / "dit.safetensors"
        save_file(class_dit(), path)
        path.write_bytes(path.read_bytes()[:-100])
        self.refused(capsys, path, "truncated or not a safetensors file")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"<!doctype html><html>", "is a web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer"),
            (b"", "is empty"),
            (b"hello hello hello", "neither a torch checkpoint nor a safetensors file"),
        ],
    )
    def test_no_checkpoint(self, tmp_path, capsys, content, message):
        (tmp_path / "dit.pt").write_bytes(content)
        self.refused(capsys, tmp_path / "dit.pt", message)

    def test_another_architecture(self, tmp_path, capsys):
        path = write(tmp_path, {"conv.weight": torch.zeros(3, 3)})
        self.refused(capsys, path, "none of the known checkpoints (its keys begin with conv.weight)")

    def test_not_tensors(self, tmp_path, capsys):
        self.refused(capsys, write(tmp_path, {"a": 1}), "is no plain dense tensor")
        self.refused(capsys, write(tmp_path, [1, 2]), "no tensors by name")
        self.refused(capsys, write(tmp_path, {"a": torch.zeros(2, dtype=torch.long)}), "not weights")

    def test_not_there(self, tmp_path, capsys):
        self.refused(capsys, tmp_path / "dit.pt", "No such file")
        (tmp_path / "empty").mkdir()
        self.refused(capsys, tmp_path / "empty", "there is no")
        (tmp_path / "empty" / "config.json").write_text("{}")
        self.refused(capsys, tmp_path / "empty", "holds no weights")

    def test_unknown_heads_and_classes(self, tmp_path, capsys):
        path = write(tmp_path, class_dit())
        self.refused(capsys, path, "does not say how many heads it has: give --heads")
        self.refused(capsys, path, "--label must be a class from 0 to 10", "--heads", "4", "--label", "11")
        self.refused(capsys, path, "--cluster is of a data set", "--heads", "4", "--cluster", "1")

    def test_not_finite(self, tmp_path, capsys):
        w = class_dit()
        w["blocks.0.mlp.fc1.weight"][0, 0] = math.nan
        self.refused(capsys, write(tmp_path, w), "not finite", "--heads", "4")

    def test_onto_itself(self, tmp_path, capsys):
        make_dit().save_pretrained(tmp_path / "dit")
        before = (tmp_path / "dit" / "config.json").read_text()
        for out in (tmp_path / "dit", tmp_path):
            with pytest.raises(SystemExit):
                main(["convert", str(tmp_path / "dit"), "--out", str(out)])
            assert "holds the checkpoint itself" in capsys.readouterr().err
        assert (tmp_path / "dit" / "config.json").read_text() == before

    def test_export_of_no_expert(self, tmp_path, capsys):
        self.refused(capsys, tmp_path / "x", "is not a folder: give that of an expert", "--to", "diffusers")
        self.refused(capsys, write(tmp_path, class_dit()), "is not a folder", "--to", "diffusers")

    @pytest.mark.parametrize(
        "key", ["blocks.0.adaLN_modulation.1.weight", "final_layer.linear.weight", "y_embedder.embedding_table.weight"]
    )
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_numbers_that_no_fit_can_take(self, tmp_path, capsys, key, value):
        w = class_dit()
        w[key][-1] = value
        message = f"{key} in {tmp_path / 'dit.pt'} holds values that are not finite"
        self.refused(capsys, write(tmp_path, w, "dit.pt"), message, "--heads", "4")

    def test_numbers_that_are_too_large(self, tmp_path):
        w = class_dit()
        w["t_embedder.mlp.2.weight"] *= 1e30
        with pytest.raises(InputError, match="cannot be converted|far too large"):
            convert(write(tmp_path, w), Options(num_heads=HEADS))

    @pytest.mark.parametrize(
        "key", ["t_embedder.mlp.0.weight", "final_layer.linear.bias", "pos_embed", "blocks.0.mlp.fc1.weight",
                "x_embedder.proj.weight", "y_embedder.embedding_table.weight"],
    )  # fmt: skip
    @pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
    def test_wrong_shapes(self, tmp_path, key, shape):
        """Any damage is reported in words, by whichever part detects it."""
        path = write(tmp_path, {**class_dit(), key: torch.ones(shape)})
        for as_is in (False, True):
            with pytest.raises(InputError):
                convert(path, Options(num_heads=HEADS, as_is=as_is))

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--heads", "5"], "must be a multiple of 4 and of num_heads 5"),
            (["--heads", "0"], "num_heads must be a whole number from 1"),
            (["--heads", "4", "--text-dim", "-3"], "text_dim must be a whole number from 1"),
            (["--heads", "4", "--text-dim", "0"], "text_dim must be a whole number from 1"),
            (["--heads", "4", "--size", "100000"], "input_size must be a whole number from 1"),
            (["--heads", "4", "--size", "7"], "input_size 7 is not a multiple of patch_size 2"),
            (["--heads", "4", "--seed", "99999999999999999999"], "--seed must be from 0"),
            (["--heads", "4", "--calibrate", "-1"], "--calibrate must be 0 or more"),
            (["--heads", "4", "--as-is", "--fit", "mean"], "leave them out with --as-is"),
            (["--to", "model", "--cluster", "1"], "--data and --cluster are for --to expert"),
            (["--to", "diffusers", "--label", "1"], "leave out everything but --out"),
        ],
    )
    def test_flags(self, tmp_path, capsys, flags, message):
        self.refused(capsys, write(tmp_path, class_dit()), message, *flags)

    @pytest.mark.parametrize(
        "flags", [["--as-is"], ["--label", "1"], ["--kind", "sit"], ["--fit", "mean"]], ids=lambda flags: flags[0]
    )
    def test_flags_of_another_kind(self, tmp_path, capsys, flags):
        path = write(tmp_path, pixart(), "PixArt.pth")
        self.refused(capsys, path, f"{flags[0]} is for DiT and SiT", "--heads", "4", *flags)

    def test_objects_that_are_no_tensors(self, tmp_path, capsys):
        with warnings.catch_warnings(action="ignore"):
            torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
        self.refused(capsys, tmp_path / "script.pt", "holds a program or other objects")
        (tmp_path / "raw.pt").write_bytes(pickle.dumps({"a": Attack(str(tmp_path / "trap"))}, protocol=4))
        self.refused(capsys, tmp_path / "raw.pt", "give a file that holds tensors alone")
        assert not (tmp_path / "trap").exists()

    def test_a_folder_of_something_else(self, tmp_path, capsys):
        """The contents of --out are kept, unless they are an earlier conversion, which is removed entirely."""
        path, out = write(tmp_path, class_dit()), tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("mine")
        for flags in (["--heads", "4"], ["--to", "diffusers"]):
            source = str(path) if "--heads" in flags else str(tmp_path)
            target = out if "--heads" in flags else tmp_path / "out" / "deeper"
            target.mkdir(exist_ok=True)
            (target / "config.json").write_text("mine")
            with pytest.raises(SystemExit):
                main(["convert", source, "--out", str(target), *flags])
            assert "holds something else than an earlier conversion" in capsys.readouterr().err
            assert (target / "config.json").read_text() == "mine"
        main(["convert", str(path), "--heads", "4", "--out", str(tmp_path / "new")])
        (tmp_path / "new" / "calibration.safetensors").write_bytes(b"of before")
        main(["convert", str(path), "--heads", "4", "--label", "2", "--out", str(tmp_path / "new")])
        assert {file.name for file in (tmp_path / "new").iterdir()} == {"config.json", "model.safetensors", REPORT}
        assert json.loads((tmp_path / "new" / REPORT).read_text())["asked_for"] == {"label": 2, "num_heads": 4}

    def test_a_conversion_that_failed_is_no_network(self, tmp_path, monkeypatch):
        converted = convert(write(tmp_path, class_dit()), Options(num_heads=HEADS))

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("atoll.networks.stored.save_file", full)
        (tmp_path / "old").mkdir()
        for name in (REPORT, "config.json"):
            (tmp_path / "old" / name).write_text("{}")
        with pytest.raises(InputError, match="No space left"):
            save(converted, tmp_path / "old")
        assert not (tmp_path / "old" / "config.json").exists()  # no old weights under a new report

    def test_one_of_ours(self, tmp_path, capsys):
        save(convert(write(tmp_path, class_dit()), Options(num_heads=HEADS)), tmp_path / "expert")
        self.refused(capsys, tmp_path / "expert", "is one of Atoll's already")


class TestStrangers:
    """Malicious files are refused in one sentence, before memory is allocated for what they claim."""

    def refused(self, path, message, options=Options(num_heads=HEADS)):  # noqa: B008
        with pytest.raises(InputError, match=message) as caught:
            convert(path, options)
        error = str(caught.value)
        assert len(error) < 1000
        assert error.isprintable(), error

    def archive(self, tmp_path, content: bytes, **options: object) -> object:
        """Writes a file in torch's zip format, with this pickle."""
        path = tmp_path / "dit.pt"
        with zipfile.ZipFile(path, "w", **options) as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
        return path

    @pytest.mark.parametrize("old", [False, True])
    def test_a_tensor_of_one_number_a_billion_times(self, tmp_path, old):
        content = {**class_dit(), "z": torch.zeros(1).expand(100_000, 100_000)}
        torch.save(content, tmp_path / "dit.pt", _use_new_zipfile_serialization=not old)
        self.refused(tmp_path / "dit.pt", "z in .* claims more numbers than the file has")

    def test_one_storage_many_times(self, tmp_path):
        weight = torch.zeros(1000, 1000)
        path = write(tmp_path, {f"w{i}": weight for i in range(1000)})
        self.refused(path, "claims more numbers than the file has")

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.eye(4).to_sparse_csr(),
            lambda: torch.empty(100_000, 100_000, device="meta"),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        ],
        ids=["sparse", "csr", "meta", "nested", "quantized"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_other_kinds_of_tensors(self, tmp_path, make):
        self.refused(write(tmp_path, {**class_dit(), "z": make()}), "no plain dense tensor|not weights|damaged")

    def test_packed(self, tmp_path):
        path = self.archive(tmp_path, bytes(10 << 20), compression=zipfile.ZIP_DEFLATED)
        assert path.stat().st_size < 100_000
        self.refused(path, "is packed, as torch never saves tensors")

    def test_entries_on_one_another(self, tmp_path):
        """A thousand names for the same bytes."""
        path = self.archive(tmp_path, pickle.dumps({}, protocol=2))
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("archive/data/0", bytes(100_000))
            last = archive.infolist()[-1]
            for i in range(1, 1000):
                again = zipfile.ZipInfo(f"archive/data/{i}")
                for name in ("header_offset", "CRC", "file_size", "compress_size"):
                    setattr(again, name, getattr(last, name))
                archive.filelist.append(again)
        self.refused(path, "is packed|truncated or damaged")

    def test_a_pickle_that_is_too_long(self, tmp_path):
        size = reading.MAX_PICKLE
        self.refused(self.archive(tmp_path, bytes(size + 1)), "says more beside its tensors than 8 MB")
        (tmp_path / "dit.pt").write_bytes(reading.LEGACY + b"\x80\x02" + 2 * size * b"]")
        self.refused(tmp_path / "dit.pt", "truncated or damaged|says more beside")
        torch.save({"a" * size: torch.zeros(1)}, tmp_path / "dit.pt", _use_new_zipfile_serialization=False)
        self.refused(tmp_path / "dit.pt", "truncated or damaged|says more beside")

    def test_a_pickle_that_asks_for_memory(self, tmp_path):
        """torch lets a pickle call bytearray with any size."""

        class Greedy:
            def __reduce__(self):
                return bytearray, (10**15,)

        self.refused(self.archive(tmp_path, pickle.dumps(Greedy(), protocol=2)), "holds a program or other objects")
        torch.save({"a": Greedy()}, tmp_path / "dit.pt", _use_new_zipfile_serialization=False)
        self.refused(tmp_path / "dit.pt", "holds a program or other objects")

    def test_safetensors_that_claim(self, tmp_path):
        header = json.dumps({"a": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}}).encode()
        (tmp_path / "dit.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        self.refused(tmp_path / "dit.safetensors", "truncated or not a safetensors file")

    def test_a_header_that_begins_like_a_pickle(self, tmp_path):
        """One in 32 safetensors files: the length of its header is 128 and a multiple of 256."""
        path = tmp_path / "dit.safetensors"
        for i in range(40):
            save_file(class_dit(), path, {"note": "x" * 8 * i})
            if path.read_bytes()[0] == 0x80:
                convert(path, Options(num_heads=HEADS))
                return
        raise AssertionError("no such length")

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without FIFOs")
    def test_files_that_are_none(self, tmp_path):
        os.mkfifo(tmp_path / "dit.pt")
        self.refused(tmp_path / "dit.pt", "it is a FIFO")
        folder, other = tmp_path / "folder", tmp_path / "other"
        make_dit(tied=True).save_pretrained(folder)
        make_dit(tied=True).save_pretrained(other)
        name = "diffusion_pytorch_model.safetensors"
        (folder / name).unlink()
        (folder / name).symlink_to(other / name)
        self.refused(folder, "it is a link that leaves its folder", Options())
        (tmp_path / "pipeline").mkdir()
        (tmp_path / "pipeline" / "transformer").symlink_to(other)
        self.refused(tmp_path / "pipeline", "it is a link that leaves its folder", Options())

    @pytest.mark.parametrize("name", ["../other/model.safetensors", "a\\b.safetensors", "model.bin", 3, None])
    def test_an_index_that_leads_away(self, tmp_path, name):
        make_dit(tied=True).save_pretrained(tmp_path)
        index = {"weight_map": {"a": name}}
        (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
        self.refused(tmp_path, "names a file outside its folder|has no table 'weight_map' of files", Options())

    @pytest.mark.parametrize(
        "name", ["\x1b[2J\x1b]0;", "a" * 5_000_000, "\u202e\u2066"], ids=["escapes", "long", "bidi"]
    )
    def test_names(self, tmp_path, name):
        ones, nan = torch.ones(3), torch.full((3,), math.nan)
        for content in (
            {name: ones}, {**class_dit(), name: ones}, {**class_dit(), name: nan}, {**class_dit(), name: 1},
            {**class_dit(), name: ones.long()}, {**class_dit(), name: ones.to_sparse()},
            {**class_dit(), name: ones[:1].expand(10**6)},
        ):  # fmt: skip
            self.refused(write(tmp_path, content), "DiT-XL-2-256x256.pt")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sample_size": 10**12}, "must be a whole number from 1 to|too many"),
            ({"sample_size": 4096}, "too many"),
            ({"num_attention_heads": 10**300}, "num_heads must be a whole number"),
            ({"num_attention_heads": "\x1b[2J" * 10**5}, "num_heads must be a whole number"),
            ({"interpolation_scale": 1e-300}, "interpolation_scale in the config of"),
            ({"interpolation_scale": "\x1b[2J" * 10**5}, "interpolation_scale in the config of"),
        ],
        ids=str,
    )
    def test_configs(self, tmp_path, changes, message):
        TestPixArt().make().save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        self.refused(tmp_path, message, Options())

    def test_arguments_of_any_type(self, tmp_path):
        """A pickle can nest lists too deeply to print."""
        laugh: list[object] = []
        for _ in range(60):
            laugh = [laugh, laugh]
        for args in ({"path_type": laugh}, {"prediction": laugh, "path_type": "GVP"}, {"model": laugh}, {1: 2}, laugh):
            self.refused(
                write(tmp_path, {"ema": class_dit(), "args": args}, "c.pt"), "is a SiT that|may be a DiT or a SiT"
            )


# --- slow ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_size(tmp_path, report, monkeypatch):
    """DiT-XL/2 as published, with random values: 675M parameters, in a separate process."""
    import published

    monkeypatch.setattr(published, "SIZE", 32)
    w = class_dit(width=1152, depth=28, classes=1000)
    num = sum(weight.numel() for weight in w.values()) / 1e6
    assert num == pytest.approx(675.1, abs=0.1)
    path = write(tmp_path, w)
    del w
    program = (
        "import resource, sys, time; from atoll.cli.main import main; start = time.time(); main(sys.argv[1:]); "
        "use = resource.getrusage(resource.RUSAGE_SELF); "
        "print('took', time.time() - start, use.ru_utime + use.ru_stime, use.ru_maxrss / 1e6)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "convert", path, "--out", tmp_path / "out"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, work, peak = map(float, run.stdout.split("took")[1].split())
    report(f"DiT-XL/2, {num:.1f}M parameters, converted in {seconds:.0f} s ({work:.0f} s of work), peak {peak:.1f} GB")
    assert peak < 12
    assert "605.97M parameters" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_trained(tmp_path, report, tied):
    """On a DiT trained on digits, shows how each fit changes the loss."""
    from sklearn.datasets import load_digits

    model = make_dit(
        in_channels=1, out_channels=2, attention_head_dim=24, num_layers=8, num_embeds_ada_norm=10
    )  # fmt: skip
    train_digits(model, tied, steps=600)
    copy = DiTTransformer2DModel.from_config(model.config)
    copy.load_state_dict(model.state_dict())  # shared weights cannot be saved
    copy.save_pretrained(tmp_path)
    copy.eval()
    x = torch.tensor(load_digits().images).float()[::18, None] / 8 - 1
    schedule, nothing, losses = DDPMScheduler(), torch.zeros(1, 1, 16), {}
    networks = {fit: convert(tmp_path, Options(text_dim=16, fit=fit)).network for fit in ("curve", "mean", "point")}
    networks["as is"] = convert(tmp_path, Options(as_is=True)).network
    for name in ("source", *networks):
        g, total = torch.Generator().manual_seed(1), 0.0
        for step in (5, 50, 200, 400, 500, 600, 800, 950):
            eps, t = torch.randn(x.shape, generator=g), torch.full((len(x),), step)
            noisy = schedule.add_noise(x, eps, t)
            with torch.no_grad():
                if name == "source":
                    prediction = copy(noisy, t, torch.full((len(x),), 10), return_dict=False)[0][:, :1]
                else:
                    text = None if name == "as is" else nothing
                    prediction = networks[name](noisy, torch.tensor(step / 999), text)
            total += float(((prediction - eps) ** 2).mean()) / 8
        losses[name] = total
    kind = "one time MLP" if tied else "a time MLP a block"
    report(f"trained DiT, {kind}: loss {', '.join(f'{name} {loss:.3f}' for name, loss in losses.items())}")
    assert losses["as is"] == pytest.approx(losses["source"], rel=1e-4 if tied else 0.05)
    assert losses["curve"] - losses["source"] < 0.5 * (min(losses["mean"], losses["point"]) - losses["source"])


def train_digits(model: DiTTransformer2DModel, tied: bool, steps: int) -> None:
    """Trains DDPM on scikit-learn's digits, from DiT's initialisation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            nn.init.zeros_(module.bias)
    for block in model.transformer_blocks:
        if tied:
            block.norm1.emb = model.transformer_blocks[0].norm1.emb
        nn.init.zeros_(block.norm1.linear.weight)
        embed = block.norm1.emb
        for weight in (embed.class_embedder.embedding_table.weight, embed.timestep_embedder.linear_1.weight,
                       embed.timestep_embedder.linear_2.weight):  # fmt: skip
            nn.init.normal_(weight, std=0.02)
    for last in (model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(last.weight)
    schedule, model = DDPMScheduler(), model.train()
    optimiser = torch.optim.AdamW(list(dict.fromkeys(model.parameters())), lr=1e-3, betas=(0.9, 0.99), weight_decay=0)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 100, 2 * (steps - step) / steps)
        rows, t = torch.randint(0, len(x), (48,)), torch.randint(0, 1000, (48,))
        eps = torch.randn(48, 1, 8, 8)
        output = model(schedule.add_noise(x[rows], eps, t), t, y[rows], return_dict=False)[0]
        loss = ((output[:, :1] - eps) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
