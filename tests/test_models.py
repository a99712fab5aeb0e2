"""The expert and the router: parity with PixArt, sizes, text, time, gradients."""

import pytest
import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.errors import InputError
from atoll.networks.dit import DiT, DiTConfig, sincos_positions
from atoll.networks.presets import SIZES, preset
from atoll.networks.router import Router, RouterConfig
from pixart import SIZE, TEXT_DIM, make_pair


def small(**changes: object) -> DiT:
    """Returns an expert with no weight left at zero, so that everything has an effect."""
    torch.manual_seed(0)
    dit = DiT(DiTConfig(**{**preset("xs/2", input_size=SIZE, text_dim=TEXT_DIM), **changes}))
    for parameter in dit.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return dit.eval()


def inputs(batch: int = 3, length: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x, t, text and a mask of different lengths."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 4, SIZE, SIZE, generator=g)
    text = torch.randn(batch, length, TEXT_DIM, generator=g)
    mask = torch.arange(length) < torch.tensor([[2], [7], [4]] * batch)[:batch]
    return x, torch.rand(batch, generator=g), text, mask


class TestParity:
    """With the same weights, outputs equal those of diffusers' PixArtTransformer2DModel."""

    @pytest.mark.parametrize("masked", [False, True])
    def test_output(self, masked):
        pixart, dit = make_pair()
        x, t, text, mask = inputs()
        with torch.no_grad():
            theirs = pixart(
                x, text, timestep=999 * t, encoder_attention_mask=mask if masked else None, return_dict=False
            )[0]
            ours = dit(x, t, text, mask if masked else None)
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

    def test_gradients(self):
        pixart, dit = make_pair()
        x, t, text, mask = inputs()
        pixart(x, text, timestep=999 * t, encoder_attention_mask=mask, return_dict=False)[0].square().mean().backward()
        dit(x, t, text, mask).square().mean().backward()
        theirs = pixart.transformer_blocks[0].attn1
        qkv = torch.cat([theirs.to_q.weight.grad, theirs.to_k.weight.grad, theirs.to_v.weight.grad])
        torch.testing.assert_close(dit.blocks[0].attention.qkv.weight.grad, qkv, rtol=1e-4, atol=1e-6)
        theirs = pixart.transformer_blocks[2].attn2.to_k.weight.grad
        torch.testing.assert_close(dit.blocks[2].cross.kv.weight.grad[: len(theirs)], theirs, rtol=1e-4, atol=1e-6)


def test_positions_are_those_of_diffusers():
    theirs = torch.as_tensor(get_2d_sincos_pos_embed(64, 6, base_size=6)).float()
    torch.testing.assert_close(sincos_positions(64, 6), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "millions"), [("xl/2", 605.97), ("b/2", 118.6)])
def test_parameter_counts(name, millions, report):
    with torch.device("meta"):
        model = DiT(DiTConfig(**preset(name)))
    count = sum(p.numel() for p in model.parameters()) / 1e6
    report(f"parameters of {name}: {count:.2f}M")
    assert count == pytest.approx(millions, rel=0.001)


@pytest.mark.parametrize("name", SIZES)
def test_every_preset_builds(name):
    with torch.device("meta"):
        DiT(DiTConfig(**preset(name)))
        Router(RouterConfig(**preset(name, text_dim=None), num_experts=8))


class TestText:
    def test_padding_changes_nothing(self):
        dit = small()
        x, t, text, mask = inputs()
        longer = torch.cat([text, torch.randn(3, 20, TEXT_DIM)], 1)
        padded = torch.cat([mask, torch.zeros(3, 20, dtype=torch.bool)], 1)
        torch.testing.assert_close(dit(x, t, text, mask), dit(x, t, longer, padded), rtol=0, atol=1e-6)
        noisy = torch.where(mask[..., None], text, 1e3)
        torch.testing.assert_close(dit(x, t, text, mask), dit(x, t, noisy, mask), rtol=0, atol=1e-6)

    def test_each_text_stands_for_itself(self):
        """A sample in a batch of texts of other lengths gives the same as alone, without any mask."""
        dit = small()
        x, t, text, mask = inputs()
        together = dit(x, t, text, mask)
        for i in range(3):
            alone = dit(x[i : i + 1], t[i : i + 1], text[i : i + 1, : int(mask[i].sum())])
            torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5)

    def test_no_work_on_padding(self):
        """Counted by torch: padding to 77 costs no floating-point operation."""
        dit = small()
        x, t, text, mask = inputs(length=7)
        padded = torch.nn.functional.pad(text, (0, 0, 0, 70))
        padded_mask = torch.nn.functional.pad(mask, (0, 70))
        flops = []
        for tokens, real in ((text, mask), (padded, padded_mask), (padded, None)):
            with FlopCounterMode(display=False) as counter:
                dit(x, t, tokens, real)
            flops.append(counter.get_total_flops())
        assert flops[0] == flops[1] < 0.8 * flops[2]

    def test_read_once_use_often(self):
        dit = small()
        x, t, text, mask = inputs()
        context = dit.read_text(text, mask)
        for time in (t, t.flip(0), torch.tensor(0.3)):
            torch.testing.assert_close(dit(x, time, context), dit(x, time, text, mask), rtol=0, atol=1e-6)
        calls: list[int] = []
        for block in dit.blocks:
            block.cross.kv.register_forward_hook(lambda *_: calls.append(1))
        dit(x, t, context)
        assert not calls

    def test_one_text_for_all(self):
        dit = small()
        x, t, text, _ = inputs()
        torch.testing.assert_close(dit(x, t, text[:1]), dit(x, t, text[:1].expand(3, -1, -1)), rtol=0, atol=1e-6)

    def test_gradients_reach_the_text_layers(self):
        dit = small()
        x, t, text, mask = inputs()
        dit(x, t, text, mask).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in dit.parameters() if p.requires_grad)


def test_one_time_for_the_batch_is_a_time_for_each():
    dit = small()
    x, _, text, mask = inputs()
    torch.testing.assert_close(
        dit(x, torch.tensor(0.4), text, mask), dit(x, torch.full((3,), 0.4), text, mask), rtol=0, atol=1e-5
    )


def test_a_new_expert_is_near_the_identity():
    """With fresh weights the output is zero, and no block depends on the text."""
    torch.manual_seed(0)
    dit = DiT(DiTConfig(**preset("xs/2", input_size=SIZE, text_dim=TEXT_DIM)))
    x, t, text, _ = inputs()
    assert torch.all(dit(x, t, text) == 0)
    nn.init.normal_(dit.out.weight)
    torch.testing.assert_close(dit(x, t, text), dit(x, t, 5 * text))


@pytest.mark.parametrize("changes", [{"text_projection": "mlp"}, {"cross_attention_norm": True}, {"patch_size": 1}])
def test_variants(changes):
    dit = small(**changes)
    x, t, text, mask = inputs()
    assert dit(x, t, text, mask).shape == x.shape


def test_gradient_checkpointing_recomputes_and_changes_no_gradient():
    dit = small()
    x, t, text, mask = inputs()
    grads, runs = [], []
    dit.blocks[0].mlp.register_forward_hook(lambda *_: runs.append(dit.gradient_checkpointing))
    for dit.gradient_checkpointing in (False, True):
        dit.zero_grad()
        dit(x, t, text, mask).square().sum().backward()
        grads.append([p.grad.clone() for p in dit.parameters() if p.grad is not None])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)
    assert runs == [False, True, True]


def test_the_norm_of_equation_17():
    """With it, the scale of cross-attention's input does not matter; without it, it does."""
    _, _, text, mask = inputs()
    for norm in (True, False):
        block = small(cross_attention_norm=norm).blocks[0]
        keys, values = small().read_text(text, mask).keys_values[0]
        h, seen = torch.randn(3, 16, 64), []
        block.cross.q.register_forward_hook(lambda _, inputs, __, seen=seen: seen.append(inputs[0]))
        block(h, torch.zeros(1, 6, 64), (keys, values, None))
        assert torch.allclose(seen[0].std(-1), torch.ones(3, 16), atol=0.02) == norm


def test_time_is_shown_as_steps():
    """Eq. 20, against diffusers' own sinusoids."""
    dit, seen = small(), []
    dit.time_embed.mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    x, t, text, mask = inputs()
    dit(x, t, text, mask)
    theirs = get_timestep_embedding(999 * t, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    torch.testing.assert_close(seen[0], theirs, rtol=0, atol=1e-4)


def test_bfloat16():
    dit = small()
    x, t, text, mask = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = dit(x, t, text, mask)
    low = dit.to(torch.bfloat16)(x.bfloat16(), t, text.bfloat16(), mask)
    assert low.dtype == torch.bfloat16
    full = small()(x, t, text, mask).detach()
    for rough in (mixed.detach().float(), low.detach().float()):
        assert float((rough - full).norm() / full.norm()) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_papers_expert_trains():
    """xl/2, batch 1, forward and backward: about 5 GB."""
    torch.manual_seed(0)
    dit = DiT(DiTConfig(**preset("xl/2")))
    dit.gradient_checkpointing = True
    nn.init.normal_(dit.out.weight, std=0.02)  # zero-initialised, which would block the gradient
    loss = dit(torch.randn(1, 4, 32, 32), torch.rand(1), torch.randn(1, 12, 768)).square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in dit.parameters() if p.grad is not None)
    assert float(dit.blocks[0].attention.qkv.weight.grad.abs().sum()) > 0


class TestRouter:
    def test_with_and_without_text(self):
        x, t, text, mask = inputs()
        torch.manual_seed(0)
        for text_dim in (TEXT_DIM, None):
            router = Router(RouterConfig(**preset("xs/2", input_size=SIZE, text_dim=text_dim), num_experts=5))
            arguments = (text, mask) if text_dim else ()
            assert torch.all(router(x, t, *arguments) == 0)  # a new router gives equal logits
            for parameter in router.parameters():
                nn.init.normal_(parameter, std=0.2)
            logits = router(x, t, *arguments)
            assert logits.shape == (3, 5)
            torch.testing.assert_close(router(x[:1], t[:1], *(a[:1] for a in arguments)), logits[:1], rtol=0, atol=1e-5)
            torch.testing.assert_close(
                router(x, torch.tensor(0.3), *arguments),
                router(x, torch.full((3,), 0.3), *arguments),
                rtol=0,
                atol=1e-4,
            )

    def test_it_learns(self):
        """Two clusters apart in their mean, told apart under noise."""
        torch.manual_seed(0)
        router = Router(RouterConfig(**preset("xs/2", input_size=SIZE, text_dim=None), num_experts=2))
        optimizer = torch.optim.AdamW(router.parameters(), 1e-3)
        for _ in range(40):
            label, t = torch.randint(0, 2, (32,)), torch.rand(32)
            x0 = (2.0 * label - 1)[:, None, None, None] + 0.3 * torch.randn(32, 4, SIZE, SIZE)
            time = t[:, None, None, None]
            loss = nn.functional.cross_entropy(router((1 - time) * x0 + time * torch.randn_like(x0), t), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < 0.3


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": torch.zeros(3, 4, 9, 9)}, r"x must have shape \[batch, 4, 8, 8\], but has \[3, 4, 9, 9\]"),
            ({"x": torch.zeros(4, 8, 8)}, "x must have shape"),
            ({"t": torch.rand(2)}, "t must be one time or 3"),
            ({"t": torch.tensor([0.0, 999.0, 1.0])}, r"t must lie in \[0, 1\]"),
            ({"t": torch.tensor(500)}, "not step numbers"),
            ({"text": None, "mask": None}, "for none, encode the empty string"),
            ({"text": torch.zeros(3, 9, 7)}, "text must be 24 wide, but is 7"),
            ({"text": torch.zeros(2, 9, TEXT_DIM), "mask": None}, "2 texts for 3 samples"),
            ({"mask": torch.ones(3, 5, dtype=torch.bool)}, r"text mask has shape \[3, 5\]"),
            ({"mask": torch.tensor([[1] * 9, [0] * 9, [1] * 9])}, "a text has no token at all"),
        ],
    )
    def test_forward(self, change, message):
        x, t, text, mask = inputs()
        arguments = {"x": x, "t": t, "text": text, "mask": mask, **change}
        with pytest.raises((InputError, AssertionError), match=message):
            small()(**arguments)

    def test_text_for_a_network_without(self):
        x, t, text, _ = inputs()
        with pytest.raises(AssertionError, match="built without text"):
            Router(RouterConfig(**preset("xs/2", input_size=SIZE, text_dim=None)))(x, t, text)

    def test_text_read_by_another(self):
        x, t, text, _ = inputs()
        with pytest.raises(AssertionError, match="not read by this network"):
            small()(x, t, small(depth=3).read_text(text))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"depth": 0}, "depth must be a whole number from 1 to 1024, but is 0"),
            ({"depth": 2.5}, "depth must be a whole number"),
            ({"mlp_ratio": float("nan")}, "mlp_ratio must be a number from 0.01"),
            ({"out_channels": 0}, "out_channels must be a whole number"),
            ({"input_size": 9}, "not a multiple of patch_size"),
            ({"num_heads": 7}, "multiple of 4 and of num_heads"),
            ({"text_projection": "cubic"}, "unknown text_projection 'cubic'"),
        ],
    )
    def test_config(self, values, message):
        with pytest.raises(InputError, match=message):
            DiTConfig(**values)

    def test_preset(self):
        with pytest.raises(InputError, match=r"unknown model size 'xxl/2': did you mean 'xl/2'\?"):
            preset("xxl/2")


class TestLocal:
    """Convolutions between neighbouring tokens, before each MLP."""

    def test_changes_nothing_at_first(self):
        torch.manual_seed(0)
        plain = DiT(DiTConfig(**preset("xs/2", input_size=SIZE, text_dim=TEXT_DIM)))
        local = DiT(DiTConfig(**preset("xs/2:local", input_size=SIZE, text_dim=TEXT_DIM)))
        missing, unexpected = local.load_state_dict(plain.state_dict(), strict=False)
        assert not unexpected
        assert {name.split(".", 2)[2] for name in missing} == {"local.weight", "local.bias"}
        x, t, text, mask = inputs()
        for parameter in plain.parameters():
            nn.init.normal_(parameter, std=0.1)
        local.load_state_dict(plain.state_dict(), strict=False)
        with torch.no_grad():
            assert torch.equal(local(x, t, text, mask), plain(x, t, text, mask))

    def test_reaches_the_neighbours(self):
        """With attention switched off, each block extends a token's neighbourhood by one ring."""
        dit = small(local=True)
        for block in dit.blocks:
            nn.init.zeros_(block.attention.out.weight)
        x, t, text, _ = inputs(1)
        x.requires_grad_()
        middle = SIZE // 2
        dit(x, t, text)[0, 0, middle, middle].backward()
        reached = x.grad.abs().sum((0, 1)) > 0
        rings = 2 * len(dit.blocks)  # a ring of 2 x 2 patches for each block
        near = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        near[max(middle - rings, 0) : middle + rings + 2, max(middle - rings, 0) : middle + rings + 2] = True
        assert torch.equal(reached, near)

    def test_is_stored(self, tmp_path):
        dit = small(local=True)
        dit.save_pretrained(tmp_path)
        again = DiT.from_pretrained(tmp_path)
        assert again.config.local
        x, t, text, mask = inputs()
        with torch.no_grad():
            assert torch.equal(again(x, t, text, mask), dit(x, t, text, mask))

    def test_a_router_has_none(self):
        with pytest.raises(InputError, match="local"):
            RouterConfig(**preset("xs/2:local", input_size=SIZE, text_dim=TEXT_DIM), num_experts=4)
