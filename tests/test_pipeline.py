"""From a model folder and texts to images, in Python and by the command."""

import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file

from atoll.cards import ModelIndex
from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.diffusion.solvers import EVALUATIONS
from atoll.errors import InputError
from atoll.experiments.images import SampledImages
from atoll.plots.charts import draw_trace
from atoll.plots.contact_sheet import draw_grid
from atoll.sampling import pipeline as module
from atoll.sampling.assemble import assemble
from atoll.sampling.ensemble import draw_noise, image_generators
from atoll.sampling.expert import FolderExpert, VelocityExpert
from atoll.sampling.folder import file_name, read_metadata, write_image
from atoll.sampling.pipeline import AtollPipeline, ImageTrace, Samples
from atoll.sampling.routing import get_routing
from atoll.sampling.settings import Sampling
from atoll.storage import alone, digest_of
from atoll.training.expert import train_expert
from simulated_gpu import CUDA, simulated_gpu
from test_assemble import KINDS, QUICK, edit, parts

PROMPTS = ["a pink ghost with a yellow party hat on a blue background", "a robot", "", "a green frog"]
FEW = {"num_inference_steps": 4, "progress": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    data, run = parts(tmp_path_factory.getbasetemp())
    folder = tmp_path_factory.mktemp("model") / "model"
    assemble([run], None, folder, data)
    return folder


@pytest.fixture(scope="module")
def pipe(model) -> AtollPipeline:
    return AtollPipeline.from_pretrained(model)


@pytest.fixture
def mine(model, tmp_path) -> Path:
    """Returns a copy to damage."""
    return Path(shutil.copytree(model, tmp_path / "mine"))


def sign(folder: Path) -> None:
    """Updates the hashes in cards and index after a change of files, as an attacker would."""
    index = ModelIndex.read(folder)
    for path in folder.glob("*/config.json"):
        about = json.loads(path.read_text())
        about["sha256"] = {name: digest_of(path.with_name(name)) for name in about.get("sha256", {})}
        path.write_text(json.dumps(about))
    files = {name: digest_of(folder / name) for name in index.files if (folder / name).exists()}
    index.model_copy(update={"files": files}).write(folder)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def latents(pipe: AtollPipeline, *arguments: object, **options: object) -> torch.Tensor:
    return pipe(*arguments, **{**FEW, "output_type": "latent", **options}).images


class TestSeeds:
    @pytest.mark.bits
    def test_the_same_again(self, pipe):
        one, other = (latents(pipe, PROMPTS, seed=3) for _ in range(2))
        assert torch.equal(one, other)
        assert not torch.equal(one, latents(pipe, PROMPTS, seed=4))

    @pytest.mark.parametrize("routing", ["topk", "full", "sample", "top1"])
    def test_alone_or_in_any_batch(self, pipe, routing):
        together = latents(pipe, PROMPTS, seed=[5, 6, 7, 8], routing=routing)
        split = latents(pipe, PROMPTS, seed=[5, 6, 7, 8], routing=routing, batch_size=3)
        torch.testing.assert_close(split, together, atol=1e-4, rtol=0)
        for i, prompt in enumerate(PROMPTS):
            alone = latents(pipe, prompt, seed=5 + i, routing=routing)
            torch.testing.assert_close(alone[0], together[i], atol=1e-4, rtol=0)

    def test_image_i_of_a_prompt_has_the_seed_plus_i(self, pipe):
        made = pipe(PROMPTS[:2], seed=10, num_images_per_prompt=3, output_type="latent", **FEW)
        assert made.seeds == (10, 11, 12) * 2
        assert made.prompts == (PROMPTS[0],) * 3 + (PROMPTS[1],) * 3
        torch.testing.assert_close(made.images[4:5], latents(pipe, PROMPTS[1], seed=11), atol=1e-4, rtol=0)

    def test_a_seed_a_prompt_or_an_image(self, pipe):
        assert pipe(PROMPTS[:2], seed=[4, 9], num_images_per_prompt=2, **FEW).seeds == (4, 5, 9, 10)
        assert pipe(PROMPTS[:2], seed=[4, 9, 2, 2], num_images_per_prompt=2, **FEW).seeds == (4, 9, 2, 2)

    def test_they_can_be_drawn(self, pipe):
        drawn = [pipe(["a", "b"], generator=torch.Generator().manual_seed(1), **FEW).seeds for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert drawn[0][0] != drawn[0][1]
        each = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
        assert pipe(["a", "b"], generator=each, **FEW).seeds[0] == drawn[0][0]
        torch.manual_seed(1)
        assert pipe(["a", "b"], **FEW).seeds == drawn[0]

    def test_the_noise_is_that_of_the_seed(self, pipe):
        seen = []
        latents(pipe, "a", seed=7, num_inference_steps=1000, callback_on_step_end=lambda p, i, t, v: stop(p, v, seen))
        noise = draw_noise(image_generators([7]), pipe.ensemble.shape)
        torch.testing.assert_close(seen[0], noise, atol=0.05, rtol=0)


def stop(pipe, values, seen):
    seen.append(values["latents"].clone())
    pipe._interrupt = True


class TestOutput:
    def test_types_agree(self, pipe):
        made = {kind: pipe(PROMPTS[:2], seed=0, output_type=kind, **FEW).images for kind in module.OUTPUTS}
        assert made["latent"].shape == (2, *pipe.index.latent_space.shape)
        assert made["pt"].shape == (2, 3, 32, 32)
        assert 0 <= float(made["pt"].min()) <= float(made["pt"].max()) <= 1
        assert np.array_equal(made["np"], made["pt"].permute(0, 2, 3, 1).numpy())
        assert all(isinstance(image, Image.Image) for image in made["pil"])
        assert np.abs(np.stack([np.asarray(image) for image in made["pil"]]) / 255 - made["np"]).max() < 0.51 / 255
        decoded = pipe.codec.decode(made["latent"])
        assert torch.equal((decoded.clamp(-1, 1) + 1) / 2, made["pt"])

    def test_one_prompt_as_a_text(self, pipe):
        made = pipe("a robot", seed=0, **FEW)
        assert isinstance(made, Samples)
        assert len(made.images) == len(made.seeds) == len(made.trace) == 1

    def test_a_negative_prompt(self, pipe):
        plain = latents(pipe, "a robot", seed=0)
        assert torch.equal(plain, latents(pipe, "a robot", seed=0, negative_prompt=""))
        assert not torch.equal(plain, latents(pipe, "a robot", seed=0, negative_prompt="a hat"))
        unguided = latents(pipe, "a robot", seed=0, guidance_scale=1)
        assert torch.equal(unguided, latents(pipe, "a robot", seed=0, guidance_scale=1, negative_prompt="a hat"))

    def test_settings_say_how(self, pipe):
        made = pipe("a", seed=0, routing="threshold:0.3", solver="heun", guidance_scale=3, **FEW)
        assert made.settings == {
            "steps": 4, "guidance": 3, "solver": "heun", "routing": "threshold:0.3", "route_every": 1,
            "confident": None, "conversion": None, "dtype": None,
        }  # fmt: skip
        assert get_routing(made.settings["routing"]).number == 0.3
        assert pipe("a", seed=0, confident=0.5, **FEW).settings["confident"] == 0.5

    @pytest.mark.parametrize(
        ("options", "routing"),
        [
            ({}, "top1"),
            ({"routing": "topk:3"}, "topk:3"),
            ({"routing": "threshold:0.5"}, "threshold:0.5"),
            ({"routing": "threshold"}, "threshold:0.1"),
            ({"routing": "topk"}, "topk:2"),
        ],
    )
    def test_a_routing_has_its_number(self, pipe, options, routing):
        assert pipe("a", seed=0, **FEW, **options).settings["routing"] == routing

    def test_numbers_of_other_libraries(self, pipe):
        plain = pipe("a", seed=3, guidance_scale=2, output_type="latent", **FEW)
        for seed in (np.int64(3), torch.tensor(3), [np.int32(3)], np.array([3]), torch.tensor([3])):
            made = pipe("a", seed=seed, guidance_scale=np.float32(2), output_type="latent",
                        num_images_per_prompt=np.int64(1), **FEW)  # fmt: skip
            assert torch.equal(made.images, plain.images)
            assert made.seeds == (3,)
            json.dumps(made.settings)

    def test_each_text_is_encoded_once(self, pipe, monkeypatch):
        seen = []
        encode = pipe.text_encoder.encode
        monkeypatch.setattr(pipe.text_encoder, "encode", lambda ids: seen.append(len(ids)) or encode(ids))
        pipe(["a", "b"], num_images_per_prompt=4, seed=0, **FEW)
        assert seen == [3]


class TestCallback:
    def test_it_watches(self, pipe):
        seen = []
        made = latents(pipe, ["a", "b"], seed=0,
                       callback_on_step_end=lambda p, i, t, v: seen.append((p, i, float(t), v)))  # fmt: skip
        assert [(p is pipe, i, t) for p, i, t, _ in seen] == [(True, i, 1 - i / 4) for i in range(4)]
        assert torch.equal(seen[-1][3]["latents"], made)
        assert seen[0][3]["x0"].shape == made.shape

    @pytest.mark.parametrize("solver", EVALUATIONS)
    def test_it_may_replace_the_latents(self, pipe, solver):
        fixed = torch.zeros(1, *pipe.ensemble.shape)
        replaced = latents(pipe, "a", seed=0, solver=solver,
                           callback_on_step_end=lambda p, i, t, v: {"latents": fixed} if i == 3 else v)  # fmt: skip
        assert torch.equal(replaced, fixed)
        early = latents(pipe, "a", seed=0, solver=solver,
                        callback_on_step_end=lambda p, i, t, v: {"latents": fixed} if i == 0 else {})  # fmt: skip
        assert not torch.equal(early, latents(pipe, "a", seed=0, solver=solver))

    def test_it_may_interrupt(self, pipe):
        steps = []

        def watch(p, i, t, v):
            steps.append(i)
            p._interrupt = i == 1

        made = pipe(PROMPTS, seed=0, batch_size=2, callback_on_step_end=watch, **FEW)
        assert steps == [0, 1]
        assert len(made.images) == len(made.seeds) == len(made.trace) == len(made.prompts) == 2
        assert len(pipe(PROMPTS, seed=0, **FEW).images) == 4  # the next run is complete again

    def test_it_may_raise(self, pipe):
        def fail(*_):
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            pipe("a", seed=0, callback_on_step_end=fail, **FEW)


class TestOnAGpu:
    """Runs on a simulated GPU."""

    def test_a_step_stalls_it_once(self, model):
        options = {"seed": 0, "previews": 2, "output_type": "latent", "progress": False}
        with simulated_gpu() as gpu:
            pipe, counts = AtollPipeline(model, device=CUDA), []
            for steps in (2, 4, 7):  # the first loads the experts
                gpu.stalls.clear()
                pipe(PROMPTS, num_inference_steps=steps, routing="full" if steps == 2 else "top1", **options)
                counts.append(sum(gpu.stalls.values()))
            assert counts[2] - counts[1] == 3, gpu.stalls

    @pytest.mark.filterwarnings("ignore:the velocity of expert_1")
    @pytest.mark.parametrize("fails_below", [0.0, 0.6])
    def test_images_and_traces_are_those_of_the_cpu(self, model, monkeypatch, fails_below):
        """This also holds if an expert fails midway, so that the batch is generated again."""
        velocity = VelocityExpert.velocity

        def failing(self: FolderExpert, x: torch.Tensor, t: torch.Tensor, *text: object) -> torch.Tensor:
            u = velocity(self, x, t, *text)
            return torch.where(t < fails_below, torch.nan, u) if self.path.name == "expert_1" else u

        monkeypatch.setattr(VelocityExpert, "velocity", failing)
        options = {"seed": 0, "previews": 2, "output_type": "np", "routing": "full", **FEW}
        expected = AtollPipeline(model)(PROMPTS, **options)
        with simulated_gpu():
            found = AtollPipeline(model, device=CUDA)(PROMPTS, **options)
        np.testing.assert_allclose(found.images, expected.images, atol=1e-3)
        for ours, theirs in zip(found.trace, expected.trace, strict=True):
            assert ours.times == theirs.times
            torch.testing.assert_close(ours.weights, theirs.weights, atol=1e-4, rtol=1e-4)
            assert [preview.t for preview in ours.previews] == [preview.t for preview in theirs.previews] == [1, 0.5]
            for one, other in zip(ours.previews, theirs.previews, strict=True):
                torch.testing.assert_close(one.x0, other.x0, atol=1e-3, rtol=1e-3)


class TestTrace:
    @pytest.mark.parametrize("routing", ["top1", "topk", "full", "threshold", "sample", "by_time"])
    def test_weights_add_up(self, pipe, routing):
        made = pipe(PROMPTS, seed=0, routing=routing, batch_size=3, **FEW)
        for trace in made.trace:
            assert trace.weights.shape == (4, 3)
            assert trace.times == (1.0, 0.75, 0.5, 0.25)
            torch.testing.assert_close(trace.weights.sum(1), torch.ones(4))
            assert sum(trace.shares) == pytest.approx(1)
            assert int((trace.weights > 0).sum(1).max()) <= {"topk": 2, "full": 3, "threshold": 3}.get(routing, 1)

    @pytest.mark.parametrize("solver", EVALUATIONS)
    def test_every_evaluation_is_there(self, pipe, solver):
        made = pipe("a", seed=0, solver=solver, **FEW)
        assert len(made.trace[0].times) == 4 * EVALUATIONS[solver] - (solver == "heun")

    def test_previews(self, pipe):
        made = pipe(["a", "b"], seed=0, num_inference_steps=10, previews=4, progress=False)
        for trace in made.trace:
            assert [preview.t for preview in trace.previews] == pytest.approx([1, 0.7, 0.4, 0.1])
            assert trace.previews[0].x0.shape == pipe.ensemble.shape
        assert made.trace[0].previews[3].x0 is not made.trace[1].previews[3].x0
        assert pipe("a", seed=0, **FEW).trace[0].previews == ()

    def test_the_last_preview_is_near_the_image(self, pipe):
        made = pipe("a", seed=0, num_inference_steps=20, previews=20, output_type="latent", progress=False)
        torch.testing.assert_close(made.trace[0].previews[-1].x0, made.images[0], atol=0.1, rtol=0.1)

    def test_the_picture_shows_the_weights(self):
        """With two experts, the second taking over halfway, the colours follow the weights."""
        times = tuple(1 - i / 100 for i in range(100))
        weights = torch.tensor([[1.0, 0.0]] * 50 + [[0.0, 1.0]] * 50)
        image = Image.new("RGB", (32, 32), "#123456")
        drawn = draw_trace(times, weights, image, [], ["fm", "ddpm"], "a title")
        row = [drawn.getpixel((x, drawn.height - 120)) for x in range(60, 830)]
        first, second = ((0x0F, 0x71, 0x73), (0xE4, 0x57, 0x2E))
        assert row[:370].count(first) > 360
        assert row[400:].count(second) > 360

    def test_weights_stand_until_the_next_evaluation(self):
        trace = ImageTrace((1.0, 0.5), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        drawn = draw_trace(trace.times, trace.weights, Image.new("RGB", (32, 32)), [], ["fm", "ddpm"], "a title")
        for y in (drawn.height - 240, drawn.height - 150, drawn.height - 70):
            assert drawn.getpixel((54 + 380, y)) == (0x0F, 0x71, 0x73)
            assert drawn.getpixel((54 + 400, y)) == (0xE4, 0x57, 0x2E)

    def test_long_names_stay_off_the_numbers(self, monkeypatch):
        """Texts on one line of the legend do not overlap."""
        texts = []
        monkeypatch.setattr(
            ImageDraw.ImageDraw, "text",
            lambda self, place, text, fill, font, anchor="la", **_: texts.append((place, text, font, anchor)),
        )  # fmt: skip
        weights, image = torch.tensor([[1.0, 0.0]]), Image.new("RGB", (32, 32))
        draw_trace([1.0], weights, image, [], ["velocity, ddpm-scaled", "fm"], "a title")
        shares = {place[1]: place[0] - font.getlength(text) for place, text, font, _ in texts if text.endswith("%")}
        names = [(place, text, font) for place, text, font, _ in texts[::-1] if text.startswith("expert")]
        assert names[0][1] == "expert 1 · fm"
        assert names[1][1].startswith("expert 0 · velo")
        for place, text, font in names:
            assert place[0] + font.getlength(text) < shares[place[1]] - 5

    def test_pictures_of_awkward_things(self):
        """More experts than colours or room, a missing one, no text, and an endless word."""
        trace = ImageTrace((1.0,), torch.full((1, 40), 1 / 40))
        image = Image.new("RGB", (64, 64))
        drawn = draw_trace(trace.times, trace.weights, image, [], ["missing"] * 40, "")
        assert drawn.width > 900
        for captions in (["x" * 10000], ["", "b\n\x00\t"], ["猫"] * 40, [str(i) for i in range(300)]):
            draw_grid([image] * len(captions), captions, "notes " * 100)

    @pytest.mark.parametrize(
        "text", ["word " * 1000, "x" * 5000, "\ufdfa" * 5000, "a " + "\u0315\u0316" * 5000, "i " * 2500]
    )
    def test_long_texts_are_measured_a_few_times(self, monkeypatch, text):
        """Line breaks are found by bisection: measuring at every character took seconds."""
        measured = []
        length = ImageFont.FreeTypeFont.getlength
        monkeypatch.setattr(
            ImageFont.FreeTypeFont,
            "getlength",
            lambda font, text, *how: measured.append(len(text)) or length(font, text, *how),
        )
        draw_grid([Image.new("RGB", (32, 32))] * 2, [text] * 2)
        assert len(measured) < 60
        assert sum(measured) < 60_000
        assert len(file_name(text, 0)) < 100


class TestFolder:
    @pytest.mark.bits
    def test_round_trip(self, model, pipe, tmp_path):
        pipe.save_pretrained(tmp_path / "copy")
        copied = AtollPipeline.from_pretrained(str(tmp_path / "copy"), verify=True)
        assert copied.index == ModelIndex.read(model)
        assert torch.equal(latents(copied, PROMPTS, seed=1), latents(pipe, PROMPTS, seed=1))

    @pytest.mark.bits
    def test_one_expert_in_memory_at_a_time(self, model, pipe):
        paged = AtollPipeline.from_pretrained(model, max_resident=1)
        for routing in ("full", "topk"):
            one, other = (latents(p, PROMPTS, seed=1, routing=routing) for p in (paged, pipe))
            assert torch.equal(one, other)
        assert sum(paged.ensemble.is_resident(k) for k in range(3)) == 1

    def test_dtype_and_back(self, model, pipe):
        other = AtollPipeline.from_pretrained(model, dtype=torch.bfloat16)
        rounded, whole = latents(other, "a robot", seed=1), latents(pipe, "a robot", seed=1)
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, whole)
        torch.testing.assert_close(rounded, whole, atol=0.2, rtol=0.1)
        assert other("a", seed=0, **FEW).settings["dtype"] == "bfloat16"
        assert torch.equal(latents(other.to("cpu", torch.float32), "a robot", seed=1), whole)

    def test_bf16_on_a_machine_that_only_says_it_can(self, model, monkeypatch):
        monkeypatch.setattr("atoll.tensors.runs_bf16", lambda: False)
        with pytest.raises(InputError, match="crashes on them in bf16: use float32"):
            AtollPipeline.from_pretrained(model, dtype=torch.bfloat16)("a", seed=0, **FEW)

    def test_a_dtype_alone_or_by_name(self, model):
        pipe = AtollPipeline.from_pretrained(model, dtype="bfloat16")
        assert pipe.dtype == torch.bfloat16
        assert pipe.to(torch.float16).dtype == torch.float16
        assert pipe.device == torch.device("cpu")
        assert pipe.to(dtype="float32").dtype == torch.float32

    def test_to_where_it_is_changes_nothing(self, model):
        pipe = AtollPipeline.from_pretrained(model)
        before = pipe.ensemble
        assert pipe.to("cpu").to().to(torch.device("cpu")).ensemble is before
        assert pipe.to(torch.float16).ensemble is not before

    def test_conversion(self, model, pipe):
        exact = AtollPipeline.from_pretrained(model, conversion="exact")
        assert not torch.equal(latents(exact, "a", seed=0, routing="full"), latents(pipe, "a", seed=0, routing="full"))

    def test_a_monolith(self, tmp_path_factory, tmp_path):
        data, run = parts(tmp_path_factory.getbasetemp())
        assemble([run / "monolith"], None, tmp_path / "model", data)
        made = AtollPipeline.from_pretrained(tmp_path / "model")(PROMPTS, seed=0, **FEW)
        assert torch.equal(made.trace[0].weights, torch.ones(4, 1))

    def test_a_router_from_centroids(self, tmp_path_factory, tmp_path):
        data, run = parts(tmp_path_factory.getbasetemp())
        assemble([run], run / "centroids", tmp_path / "model", data)
        made = AtollPipeline.from_pretrained(tmp_path / "model")(PROMPTS, seed=0, **FEW)
        torch.testing.assert_close(made.trace[0].weights.sum(1), torch.ones(4))

    def test_with_the_vae_and_clip_of_stable_diffusion(self, kl, clip, tmp_path, monkeypatch):
        """Tiny instances of the real classes, with a tokenizer, a codec with its own dtype, and truncated texts."""
        monkeypatch.setattr("atoll.training.expert.EVALUATED_AT_THE_END", 64)
        prepare(Source("shapes", num=40, size=32), tmp_path / "data",
                PrepareSettings(size=32, codec=f"vae:{kl}", text=f"clip:{clip}", holdout=0.2), 0,
                progress=False)  # fmt: skip
        train_expert(tmp_path / "data", None, replace(QUICK, steps=2), tmp_path / "expert", progress=False)
        index = assemble([tmp_path / "expert"], None, tmp_path / "model", tmp_path / "data")
        assert {Path(name).parts[0] for name in index.files} == {"expert_0", "vae", "text_encoder", "tokenizer"}
        shutil.rmtree(tmp_path / "data")
        pipe = AtollPipeline.from_pretrained(tmp_path / "model", verify=True)
        pipe.save_pretrained(tmp_path / "copy")
        copied = AtollPipeline.from_pretrained(tmp_path / "copy")
        assert torch.equal(latents(pipe, ["a cat", ""], seed=0), latents(copied, ["a cat", ""], seed=0))
        assert pipe("a cat", seed=0, **FEW).images[0].size == (32, 32)
        with pytest.warns(UserWarning, match="fills the 16 tokens"):
            pipe("a cat " * 20, seed=0, **FEW)

    @pytest.fixture
    def sent(self, monkeypatch) -> dict[str, bytes]:
        """Captures what would be uploaded to the hub, without a network."""
        sent = {}

        class Hub:
            def __init__(self, token):
                pass

            def create_repo(self, name, **options):
                if name == "no":
                    raise OSError("not allowed")

            def upload_folder(self, repo_id, folder_path, allow_patterns):
                paths = [path for pattern in allow_patterns for path in folder_path.glob(pattern)]
                sent.update({path.relative_to(folder_path).as_posix(): path.read_bytes() for path in paths})
                return "there"

        monkeypatch.setattr("atoll.networks.stored.HfApi", Hub)
        return sent

    def test_to_the_hub(self, pipe, sent):
        before = snapshot(pipe.folder)
        assert pipe.push_to_hub("me/model") == "there"
        assert snapshot(pipe.folder) == before
        assert sent.keys() == {"model_index.json", "README.md", "samples.png", *pipe.index.files}
        assert b"](samples.png)" in sent["README.md"]
        assert Image.open(io.BytesIO(sent["samples.png"])).width > 8 * 32
        sent.clear()
        pipe.push_to_hub("me/model", prompts=[])
        assert sent.keys() == {"model_index.json", "README.md", *pipe.index.files}
        assert sent["README.md"] == (pipe.folder / "README.md").read_bytes()
        with pytest.raises(InputError, match="the hub did not take no"):
            pipe.push_to_hub("no")

    def test_credits_go_with_the_model(self, mine, sent, tmp_path):
        pipe = AtollPipeline.from_pretrained(mine)
        (mine / "CREDITS.md").write_text(f"Ben. Hash of the model: `{pipe.index.hash}`.")
        pipe.push_to_hub("me/model", prompts=[])
        assert sent["CREDITS.md"] == (mine / "CREDITS.md").read_bytes()
        pipe.save_pretrained(tmp_path / "copy")
        AtollPipeline.from_pretrained(tmp_path / "copy").save_pretrained(tmp_path / "again")
        pipe.save_pretrained(tmp_path / "again")  # a model is replaced with its credits
        assert (tmp_path / "again" / "CREDITS.md").read_bytes() == (mine / "CREDITS.md").read_bytes()
        (tmp_path / "again" / "CREDITS.md").write_text("mine")
        with pytest.raises(InputError, match=r"holds CREDITS\.md, which is not of the model"):
            pipe.save_pretrained(tmp_path / "again")
        (mine / "CREDITS.md").unlink()
        (mine / "CREDITS.md").symlink_to("/etc/hostname")
        with pytest.raises(InputError, match=r"CREDITS\.md"):
            pipe.save_pretrained(tmp_path / "third")

    def test_a_page_that_people_wrote_goes_to_the_hub_as_it_is(self, mine, sent):
        (mine / "README.md").write_text("ours")
        AtollPipeline.from_pretrained(mine).push_to_hub("me/model", prompts=["a"])
        assert sent["README.md"] == b"ours"
        assert "samples.png" in sent
        assert not (mine / "samples.png").exists()


class TestSpoilt:
    @staticmethod
    def flip_a_bit(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

    def test_experts_are_hashed_when_they_are_first_needed(self, mine, monkeypatch):
        hashed = []
        monkeypatch.setattr(
            "atoll.cards.known_digest", lambda path, root: hashed.append(path.relative_to(mine)) or digest_of(path)
        )
        pipe = AtollPipeline.from_pretrained(mine)
        opened = {str(path) for path in hashed}
        assert "vae/model.safetensors" in opened
        assert "expert_0/config.json" in opened
        assert not any(name.startswith("expert_") and name.endswith(".safetensors") for name in opened)
        pipe.ensemble.take(1)
        new = {str(path) for path in hashed} - opened
        assert new == {"expert_1/model.safetensors", "expert_1/calibration.safetensors"}

    @pytest.mark.parametrize("name", ["model.safetensors", "calibration.safetensors"])
    def test_damaged_weights_make_no_image(self, mine, name, tmp_path):
        self.flip_a_bit(mine / "expert_1" / name)
        pipe = AtollPipeline.from_pretrained(mine)
        for use in (
            lambda: pipe("a", seed=0, routing="full", **FEW),
            lambda: pipe.to(torch.bfloat16)("a", seed=0, routing="full", **FEW),
            lambda: pipe.save_pretrained(tmp_path / "copy"),
            lambda: pipe.push_to_hub("me/model", prompts=[]),
            lambda: AtollPipeline.from_pretrained(mine, verify=True),
        ):
            with pytest.raises(InputError, match=f"expert_1/{name} is not the file that the model was made of"):
                use()
        assert not (tmp_path / "copy").exists()

    def test_a_missing_expert_warns(self, mine):
        shutil.rmtree(mine / "expert_1")
        with pytest.warns(UserWarning, match="expert_1 of 3 experts is missing"):
            pipe = AtollPipeline.from_pretrained(mine)
        made = pipe(PROMPTS, seed=0, routing="full", **FEW)
        assert all(float(trace.weights[:, 1].max()) == 0 for trace in made.trace)
        assert made.settings["missing"] == ["expert_1"]
        assert pipe.objectives == (KINDS[0], "missing", KINDS[2])

    def test_nor_do_they_on_their_own_schedule(self, tmp_path_factory, tmp_path):
        data, run = parts(tmp_path_factory.getbasetemp())
        assemble([run / "monolith"], None, tmp_path / "linked", data)
        model = Path(shutil.copytree(tmp_path / "linked", tmp_path / "model"))
        edit(model / "expert_0", "sha256", value={})  # so that only the index has the hash
        sign(model)
        self.flip_a_bit(model / "expert_0" / "model.safetensors")
        images = SampledImages(
            name="a", captions=["a"], pipe=AtollPipeline(model), sampling=Sampling(solver="ddim", guidance=1.0),
            first_seed=0, folder=tmp_path,
        )  # fmt: skip
        with pytest.raises(InputError, match="expert_0/model.safetensors is not the file that the model was made of"):
            images.latents(slice(0, 1))

    def test_assembled_without_one(self, tmp_path_factory, tmp_path):
        data, run = parts(tmp_path_factory.getbasetemp())
        assemble([run / "expert_0"], run / "router", tmp_path / "model", data, allow_missing=True)
        with pytest.warns(UserWarning, match="expert_1, expert_2 of 3 experts are missing"):
            pipe = AtollPipeline.from_pretrained(tmp_path / "model")
        assert pipe("a", seed=0, **FEW).trace[0].shares == [1, 0, 0]

    @pytest.mark.parametrize("part", ["expert_1", "router", "vae", "text_encoder"])
    def test_truncated(self, mine, part):
        path = mine / part / "model.safetensors"
        content = path.read_bytes()
        path.unlink()  # it is a link
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(InputError, match=f"{part}/model.safetensors is (truncated|not the file)"):
            AtollPipeline.from_pretrained(mine)
        sign(mine)
        with pytest.raises(InputError, match=f"{part}/model.safetensors is truncated"):
            AtollPipeline.from_pretrained(mine)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "calibration.safetensors"])
    def test_a_file_of_an_expert_is_missing(self, mine, name):
        (mine / "expert_1" / name).unlink()
        with pytest.raises(InputError, match=rf"expert_1/{name}"):
            AtollPipeline.from_pretrained(mine)("a", seed=0, routing="full", **FEW)

    @pytest.mark.parametrize("part", ["expert_1", "router"])
    @pytest.mark.parametrize("keys", [("latent_space", "codec", "fingerprint"), ("text_encoder", "fingerprint")])
    def test_foreign(self, mine, part, keys):
        edit(mine / part, *keys, value="0" * 64)
        sign(mine)
        with pytest.raises(InputError, match=f"{part} does not fit: its .* is not that of model_index.json"):
            AtollPipeline.from_pretrained(mine)

    @pytest.mark.parametrize(("part", "what"), [("vae", "codec"), ("text_encoder", "text encoder")])
    def test_a_foreign_codec_or_text_encoder(self, mine, part, what):
        path = mine / part / "model.safetensors"
        weights = {name: tensor + 1 for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(weights, path)
        with pytest.raises(InputError, match=f"{part}/model.safetensors is not the file"):
            AtollPipeline.from_pretrained(mine)
        sign(mine)
        with pytest.raises(InputError, match=f"{part} does not fit: its {what}"):
            AtollPipeline.from_pretrained(mine)

    def test_experts_that_were_exchanged(self, mine):
        (mine / "expert_0").rename(mine / "other")
        (mine / "expert_1").rename(mine / "expert_0")
        with pytest.raises(InputError, match="expert_0/config.json is not the file"):
            AtollPipeline.from_pretrained(mine)
        sign(mine)
        exchanged = pytest.raises(InputError, match="expert_0 is the expert of cluster 1, not of 0: assemble the model")
        with pytest.warns(UserWarning, match="expert_1 of 3 experts is missing"), exchanged:
            AtollPipeline.from_pretrained(mine)

    @pytest.mark.parametrize("part", ["expert_1", "router", "vae", "text_encoder"])
    def test_another_part_that_fits(self, mine, part):
        """It has the same latents, texts and cluster, but is not the one that was assembled."""
        about = json.loads((mine / part / "config.json").read_text())
        (mine / part / "config.json").write_text(json.dumps(about, indent=1))
        with pytest.raises(InputError, match=f"{part}/config.json is not the file"):
            AtollPipeline.from_pretrained(mine)

    def test_an_expert_of_another_objective(self, mine):
        shutil.rmtree(mine / "expert_1")
        shutil.copytree(mine / "expert_0", mine / "expert_1")
        edit(mine / "expert_1", "data", "cluster", value=1)
        with pytest.raises(InputError, match="expert_1/config.json is not the file"):
            AtollPipeline.from_pretrained(mine)

    @pytest.mark.parametrize(
        ("part", "keys", "value"),
        [
            ("expert_1", ("data",), [1]),
            ("expert_1", ("latent_space", "codec"), "x"),
            ("expert_1", ("latent_space", "codec"), None),
            ("expert_1", ("text_encoder",), "x"),
            ("router", ("latent_space", "codec"), "x"),
            ("router", ("text_encoder",), "x"),
        ],
    )
    def test_damaged_cards(self, mine, part, keys, value):
        edit(mine / part, *keys, value=value)
        sign(mine)
        named = ".".join(keys)
        with pytest.raises(InputError, match=f"{part}/config.json is damaged, its '{named}' must be a table"):
            AtollPipeline.from_pretrained(mine)

    def test_one_that_makes_nan(self, mine):
        path = mine / "expert_1" / "model.safetensors"
        weights = {name: torch.full_like(tensor, 3e38) for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(weights, path)
        with pytest.raises(InputError, match="expert_1/model.safetensors is not the file"):
            AtollPipeline.from_pretrained(mine)("a", seed=0, routing="full", **FEW)
        sign(mine)
        pipe = AtollPipeline.from_pretrained(mine)
        with pytest.warns(UserWarning, match="the velocity of expert_1 is not finite: it is left out"):
            made = pipe("a", seed=0, routing="full", **FEW)
        assert made.trace[0].shares[1] == 0


class TestMistakes:
    @pytest.mark.parametrize(
        ("prompt", "options", "sentence"),
        [
            ([], {}, "there is no prompt"),
            ("a", {"negative_prompt": ["b", "c"]}, "2 negative prompts for 1 prompt:"),
            ("a", {"num_inference_steps": 0}, "steps must be a whole number from 1 to 10000, but is 0"),
            ("a", {"num_inference_steps": 10**20}, "steps must be a whole number from 1 to 10000"),
            ("a", {"guidance_scale": float("nan")}, "guidance scale must be a finite number"),
            ("a", {"guidance_scale": -3}, "guidance scale must be a finite number of at least 0, but is -3"),
            ("a", {"guidance_scale": 1e38}, "not finite"),
            ("a", {"num_images_per_prompt": 0}, "num_images_per_prompt is below 1"),
            ("a", {"batch_size": -1}, "batch must be a whole number from 1"),
            ("a", {"routing": "topk:0"}, "the K of topk:K must be a whole number of at least 1"),
            ("a", {"routing": "topk:9"}, "routing topk:9 asks for more than the 3 experts of the model"),
            ("a", {"routing": "best"}, "unknown routing 'best'"),
            ("a", {"routing": "oracle"}, "unknown routing 'oracle': accepted are by_time, full, sample, thr[^']*$"),
            ("a", {"routing": "threshold:2"}, "threshold:2.0 must lie in"),
            ("a", {"routing": "threshold:x"}, "a number after the colon"),
            ("a", {"routing": "full:1"}, "takes no number"),
            ("a", {"routing": "topk:"}, "a number after the colon"),
            ("a", {"route_every": 0}, "route_every must be a whole number of at least 1"),
            ("a", {"confident": 0}, "confident must lie above 0 and be at most 1, but is 0"),
            ("a", {"solver": "eulr"}, "unknown solver 'eulr': did you mean 'euler'"),
            ("a", {"output_type": "jpeg"}, "unknown output type 'jpeg'"),
            ("a", {"seed": -1}, "a seed must be a whole number from 0"),
            ("a", {"seed": [1, 2]}, "2 seeds for 1 image:"),
            ("a", {"seed": 1, "generator": torch.Generator()}, "not both"),
            ("a", {"generator": [torch.Generator()] * 2}, "2 seeds for 1 image:"),
        ],
    )
    def test_they_get_a_sentence(self, pipe, prompt, options, sentence):
        with pytest.raises(InputError, match=sentence):
            pipe(prompt, **{**FEW, "seed": None if "generator" in options else 0, **options})

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"max_resident": 0}, "max_resident must be"),
            ({"conversion": "magic"}, "unknown conversion 'magic'"),
            ({"device": "gpu"}, "there is no device 'gpu' here"),
            ({"device": "cuda:99"}, "there is no device 'cuda:99' here"),
            ({"device": "meta"}, "there is no device 'meta' here: give auto, cpu, cuda or cuda:N"),
            ({"device": "mps"}, "there is no device 'mps' here"),
            ({"dtype": torch.int8}, "unknown dtype 'int8': .*accepted are"),
            ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ],
    )
    def test_also_when_it_is_opened(self, model, options, sentence):
        with pytest.raises(InputError, match=sentence):
            AtollPipeline.from_pretrained(model, **options)

    @pytest.mark.parametrize(
        "options",
        [{"num_inference_steps": 2.5}, {"seed": 1.5}, {"seed": [1.5]}, {"guidance_scale": "2"}, {"route_every": 1.5}],
    )
    def test_other_types_are_python_s_own_mistakes(self, pipe, options):
        with pytest.raises(TypeError):
            pipe("a", **{**FEW, "seed": 0, **options})

    def test_a_long_prompt_is_cut_with_a_warning(self, pipe):
        long = "a very long prompt " * 526
        with pytest.warns(UserWarning, match=r"'a very long prompt .*fills the 32 tokens"):
            made = latents(pipe, long, seed=0)
        with pytest.warns(UserWarning, match="fills the 32 tokens"):
            assert torch.equal(made, latents(pipe, long + " more", seed=0))

    def test_a_short_one_has_none(self, pipe):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe(["", "a robot", "word " * 30], seed=0, **FEW)


class TestFiles:
    def test_names_are_safe_and_one_prompt_s_own(self):
        prompts = ["a red car", "a red car!", "A red car", "a-red-car", "a  red car", " a red car", "", " ", "猫", "犬",
                   "../../etc/passwd", "x" * 300, "x" * 301, "a\0b", "a\nb", "CON", "\udce9"]  # fmt: skip
        names = [file_name(prompt, 7) for prompt in prompts]
        assert names[0] == "a-red-car-7.png"
        mark = names[1].removeprefix("a-red-car--").removesuffix("-7.png")
        assert len(mark) == 12
        assert file_name(f"a red car {mark}", 7) != names[1]  # a plain text that looks like one with a hash
        assert len(set(names)) == len(names)
        for name in names:
            assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
            assert len(name) < 100
            assert not name.startswith((".", "-"))

    @pytest.mark.parametrize("prompt", ["a red car", "", "naïve 猫 \u202e 👩‍🚀", "line\nbreak", "x" * 20000])
    def test_metadata_round_trip(self, tmp_path, prompt):
        about = {"prompt": prompt, "negative_prompt": "é", "seed": 2**62, "model": "f" * 64,
                 "settings": {"guidance": 2.5, "conversion": None}}  # fmt: skip
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
        write_image(image, tmp_path / "a.png", **about)
        assert read_metadata(tmp_path / "a.png") == about
        assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(image))

    def test_other_pictures_have_none(self, tmp_path):
        Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
        Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg")
        (tmp_path / "b.png").write_text("no picture")
        os.mkfifo(tmp_path / "d.png")
        for name in ("a.png", "a.jpg", "b.png", "c.png", "d.png"):
            with pytest.raises(InputError, match=f"{name}.*: give a PNG that `atoll sample` has made"):
                read_metadata(tmp_path / name)


class TestCommand:
    def run(self, model: Path, out: Path, *arguments: object) -> None:
        main(["sample", str(model), "--steps", "4", "--out", str(out), *map(str, arguments)])

    def test_pictures_that_say_how_they_were_made(self, model, pipe, tmp_path, capsys):
        self.run(model, tmp_path, "a robot", "a green frog", "--num", 2, "--seed", 3, "--negative", "a hat")
        assert "4 images of 2 prompts" in capsys.readouterr().out
        names = ["a-green-frog-3.png", "a-green-frog-4.png", "a-robot-3.png", "a-robot-4.png", "grid.png"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        about = read_metadata(tmp_path / "a-green-frog-4.png")
        assert (about["prompt"], about["negative_prompt"], about["seed"]) == ("a green frog", "a hat", 4)
        assert about["model"] == pipe.index.hash
        how = about["settings"]
        again = pipe(
            about["prompt"], negative_prompt=about["negative_prompt"], seed=about["seed"], solver=how["solver"],
            num_inference_steps=how["steps"], guidance_scale=how["guidance"], routing=how["routing"], progress=False,
        )  # fmt: skip
        made, seen = np.asarray(again.images[0]), np.asarray(Image.open(tmp_path / "a-green-frog-4.png"))
        assert np.abs(made.astype(int) - seen).max() <= 1

    def test_run_again_it_makes_the_same(self, model, tmp_path):
        for _ in range(2):
            self.run(model, tmp_path / "a", "a robot", "")
        self.run(model, tmp_path / "b", "a robot", "", "--batch", 1, "--max-resident", 1)
        for path in (tmp_path / "a").glob("*-0.png"):
            one, other = (np.asarray(Image.open(tmp_path / name / path.name)).astype(int) for name in "ab")
            assert np.abs(one - other).max() <= 1

    def test_nothing_of_an_earlier_run_is_lost(self, model, tmp_path, capsys):
        """The newest file has the plain name, older ones the next free number; a rerun changes nothing."""
        self.run(model, tmp_path, "a robot", "--trace", "--routing", "full")
        first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert "earlier runs" not in capsys.readouterr().out
        self.run(model, tmp_path, "a robot", "--trace", "--routing", "full")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
        self.run(model, tmp_path, "a robot", "--trace", "--routing", "full", "--solver", "euler")
        assert "4 files of earlier runs kept under other names, such as a-robot-0.1.png" in capsys.readouterr().out
        for name, content in first.items():
            stem, _, suffix = name.partition(".")
            assert (tmp_path / f"{stem}.1.{suffix}").read_bytes() == content
        solvers = [
            read_metadata(tmp_path / name)["settings"]["solver"] for name in ("a-robot-0.1.png", "a-robot-0.png")
        ]
        assert solvers == ["multistep", "euler"]
        self.run(model, tmp_path, "a fish")  # another prompt leaves the images, and keeps the grid
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [*first, *(f"{name[:-4]}.1.png" for name in first if name.endswith(".png")), "trace.1.json", "a-fish-0.png",
             "grid.2.png"]
        )  # fmt: skip
        assert "1 image of 1 prompt, and grid.png\n1 file of earlier runs" in capsys.readouterr().out

    def test_what_has_the_name_of_an_image(self, model, tmp_path, capsys):
        """A link, also to elsewhere, and a FIFO are renamed and not followed; a folder stays, with an error."""
        (tmp_path / "mine.txt").write_text("mine")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "a-0.png").symlink_to(tmp_path / "mine.txt")
        os.mkfifo(tmp_path / "a" / "grid.png")
        self.run(model, tmp_path / "a", "a")
        assert (tmp_path / "mine.txt").read_text() == "mine"
        assert (tmp_path / "a" / "a-0.1.png").is_symlink()
        assert (tmp_path / "a" / "grid.1.png").is_fifo()
        (tmp_path / "a" / "b-0.png").mkdir()
        with pytest.raises(SystemExit):
            self.run(model, tmp_path / "a", "b")
        assert "b-0.png (Is a directory)" in capsys.readouterr().err

    def test_one_run_at_a_time_in_a_folder(self, model, tmp_path, capsys):
        with alone(tmp_path), pytest.raises(SystemExit):
            self.run(model, tmp_path, "a robot")
        assert "another process is at work on" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_prompts_that_are_no_file(self, model, tmp_path, capsys, monkeypatch):
        with (tmp_path / "huge").open("wb") as file:
            file.truncate(1 << 40)
        os.mkfifo(tmp_path / "fifo")
        size = "larger than 16,777,216 bytes"
        told = {"fifo": "it is a FIFO", "huge": size, "/dev/zero": size, ".": "Is a directory"}
        for name, why in told.items():
            with pytest.raises(SystemExit):
                self.run(model, tmp_path / "a", "--prompts", tmp_path / name)
            error = capsys.readouterr().err
            assert why in error
            assert "or - for the standard input" in error
        end, start = os.pipe()  # as a shell makes of <(...)
        os.write(start, b"a cat")
        os.close(start)
        self.run(model, tmp_path / "a", "--prompts", f"/dev/fd/{end}")
        os.close(end)
        with open("/dev/zero", "rb") as zeros:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(zeros))
            with pytest.raises(SystemExit):
                self.run(model, tmp_path / "a", "-")
        assert "cannot read the standard input (it is larger than" in capsys.readouterr().err
        (tmp_path / "b").mkdir()
        (tmp_path / "p.txt").write_text("a cat")
        (tmp_path / "b" / "link").symlink_to(tmp_path / "p.txt")  # the user's own
        self.run(model, tmp_path / "a", "--prompts", tmp_path / "b" / "link")

    def test_trace(self, model, pipe, tmp_path):
        self.run(model, tmp_path, *"abcdef", "--trace", "--routing", "full", "--num", 2)
        told = json.loads((tmp_path / "trace.json").read_text())
        assert told["experts"] == list(KINDS)
        assert told["model"] == pipe.index.hash
        assert [image["file"] for image in told["images"][:3]] == ["a-0.png", "a-1.png", "b-0.png"]
        for image in told["images"]:
            assert (tmp_path / image["file"]).exists()
            assert [e["t"] for e in image["evaluations"]] == [1, 0.75, 0.5, 0.25]
            for evaluation in image["evaluations"]:
                assert sum(evaluation["weights"]) == pytest.approx(1, abs=1e-5)
        assert Image.open(tmp_path / "trace.png").height > 4 * 300

    def test_trace_of_what_is_missing(self, mine, tmp_path):
        shutil.rmtree(mine / "expert_1")
        self.run(mine, tmp_path / "a", "a", "--trace", "--confident", 0.5)
        assert json.loads((tmp_path / "a" / "trace.json").read_text())["experts"] == [KINDS[0], "missing", KINDS[2]]
        settings = read_metadata(tmp_path / "a" / "a-0.png")["settings"]
        assert (settings["missing"], settings["confident"]) == (["expert_1"], 0.5)

    def test_verify(self, mine, tmp_path, capsys):
        path = mine / "expert_1" / "model.safetensors"
        content = path.read_bytes()
        path.unlink()  # it is a link
        path.write_bytes(content[:-4] + b"\0\0\0\0")
        with pytest.raises(SystemExit):
            self.run(mine, tmp_path / "b", "a", "--verify")
        assert "expert_1/model.safetensors is not the file" in capsys.readouterr().err

    def test_the_same_prompt_twice(self, model, tmp_path, capsys):
        self.run(model, tmp_path, "a robot", "a fish", "a robot", "--num", 2)
        told = capsys.readouterr()
        assert "4 images of 2 prompts" in told.out
        assert told.err == "atoll: 1 of 3 prompts repeats an earlier one and is left out\n"
        assert len(list(tmp_path.glob("a-*.png"))) == 4

    def test_the_folder_is_tried_first(self, tmp_path, capsys):
        """The output folder is tried before the missing model is reported, and is removed again."""
        (tmp_path / "file").write_text("")
        for out, sentence in (("file", "cannot write"), ("a\0b", "cannot write"), ("new", "is not a folder")):
            with pytest.raises(SystemExit):
                self.run(tmp_path / "nowhere", tmp_path / out, "a")
            assert sentence in capsys.readouterr().err
        assert not (tmp_path / "new").exists()

    def test_input_that_is_no_text(self, model, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n")))
        with pytest.raises(SystemExit):
            self.run(model, tmp_path / "a", "-")
        assert "cannot read the standard input" in capsys.readouterr().err

    def test_prompts_from_a_file_and_from_the_input(self, model, tmp_path, monkeypatch):
        (tmp_path / "p.txt").write_text("a cat\n\n  a dog  \n", encoding="utf-8-sig")
        self.run(model, tmp_path / "a", "a robot", "--prompts", tmp_path / "p.txt")
        assert {path.name for path in (tmp_path / "a").iterdir()} == {
            "a-cat-0.png", "a-dog-0.png", "a-robot-0.png", "grid.png"
        }  # fmt: skip
        for arguments in (["-"], ["--prompts", "-"]):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffa fish\n".encode())))
            self.run(model, tmp_path / arguments[-1], *arguments)
            assert (tmp_path / "-" / "a-fish-0.png").exists()

    @pytest.mark.parametrize("routing", ["top1", "full", "threshold", "sample", "by_time"])
    def test_routings(self, model, tmp_path, routing):
        self.run(model, tmp_path, "a", "--routing", routing, "--route-every", 2, "--conversion", "exact")
        assert read_metadata(tmp_path / "a-0.png")["settings"]["conversion"] == "exact"

    def test_warnings_are_plain_lines_told_once(self, mine, tmp_path, capsys):
        shutil.rmtree(mine / "expert_1")
        self.run(mine, tmp_path / "a", "a", "b", "--batch", 1, "--prompts", self.long(tmp_path))
        told = capsys.readouterr().err.strip().split("\n")
        assert len(told) == 2
        assert told[0].startswith("atoll: expert_1 of 3 experts is missing")
        assert told[1].startswith("atoll: the prompt 'word word")

    def long(self, folder: Path) -> Path:
        (folder / "long.txt").write_text("word " * 2000)
        return folder / "long.txt"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ([], "there is no prompt: give one after the model, or --prompts FILE"),
            (["--prompts", "nowhere.txt"], "cannot read nowhere.txt (No such file or directory)"),
            (["a", "--steps", "0"], "steps must be a whole number from 1 to 10000, but is 0"),
            (["a", "--steps", "9" * 20], "steps must be a whole number from 1 to 10000"),
            (["a", "--routing", "full:1"], "routing 'full' takes no number"),
            (["a", "--device", "xla"], "there is no device 'xla' here"),
            (["a", "--guidance", "nan"], "guidance scale must be a finite number"),
            (["a", "--routing", "topk:9"], "asks for more than the 3 experts"),
            (["a", "--num", "0"], "--num must be at least 1"),
            (["a", "--batch", "0"], "batch must be a whole number from 1"),
            (["a", "--seed", "-1"], "--seed must be from 0 to"),
            (["a", "--seed", str(2**63)], "--seed must be from 0 to"),
            (["a", "--num", str(10**9)], "--num must be at least 1 and give at most 1,000,000 images"),
            (["a", "--guidance", "-3"], "guidance scale must be a finite number of at least 0, but is -3"),
            (["a", "--guidance", "inf"], "guidance scale must be a finite number of at least 0, but is inf"),
            (["a", "--solver", "magic"], "unknown solver 'magic'"),
            (["a", "--routing", "top2"], "unknown routing 'top2': did you mean"),
            (["a", "--dtype", "int8"], "unknown dtype 'int8'"),
            (["a", "--device", "gpu"], "there is no device 'gpu' here"),
            (["a", "--out", "/proc/samples"], "cannot write /proc/samples"),
        ],
    )
    def test_mistakes_get_one_sentence(self, model, tmp_path, capsys, arguments, sentence):
        with pytest.raises(SystemExit) as end:
            self.run(model, tmp_path / "a", *arguments)
        assert end.value.code == 2
        told = capsys.readouterr().err.strip()
        assert told.startswith("atoll: ")
        assert sentence in told
        assert "\n" not in told
        assert not (tmp_path / "a").exists()

    def test_a_folder_that_is_no_model(self, tmp_path, tmp_path_factory, capsys):
        _, run = parts(tmp_path_factory.getbasetemp())
        for folder, sentence in ((tmp_path, "there is no"), (run / "expert_0", "is a part, not a model")):
            with pytest.raises(SystemExit):
                self.run(folder, tmp_path / "a", "a")
            assert sentence in capsys.readouterr().err

    def test_help_is_quick(self):
        program = """
import sys
from atoll.cli.main import main
try:
    main([sys.argv[1], "--help"])
finally:
    assert "torch" not in sys.modules and "PIL" not in sys.modules
"""
        for name in ("sample", "assemble"):
            run = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
            assert "For example" in run.stdout


def test_the_command_as_a_process(model, tmp_path):
    """As a user runs it, with its output in a file: no bar, no Python in the warnings."""
    command = [sys.executable, "-m", "atoll.cli.main", "sample", str(model), "word " * 50, "--steps", "2"]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stderr.strip().split("\n")) == 1
    assert run.stderr.startswith("atoll: the prompt 'word word")
    assert (tmp_path / "samples" / "grid.png").exists()
