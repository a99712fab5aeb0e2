"""FLOPs and bytes are counted correctly: by hand, and as torch counts them on real tensors."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from atoll.networks.dit import DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import RouterConfig
from atoll.training.memory import network_of
from atoll.training.roofline import DEVICES, Device, Work, sampling_work, training_work
from atoll.training.traffic import Traffic

B, LENGTH = 3, 5
SMALL = preset("64x2/2", input_size=8, text_dim=32)
CONFIG = DiTConfig(**SMALL)
CONFIGS = {
    "expert": CONFIG,
    "text by an MLP, normed": replace(CONFIG, text_projection="mlp", cross_attention_norm=True),
    "a map of time per block": replace(CONFIG, adaln="block"),
    "without text": replace(CONFIG, text_dim=None),
    "router": RouterConfig(**SMALL, num_experts=3, head="mlp"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

training = cache(training_work)


def products(config, num_times):
    """Returns the FLOPs of a forward pass, written out.

    They are split into maps whose input needs no gradient, others outside of blocks, and per block the keys and values
    of the text, the other linear maps, and attention.
    """
    n, d, pixels = config.num_tokens, config.hidden_size, config.in_channels * config.patch_size**2
    ends = 2 * B * n * pixels * d + 2 * num_times * 256 * d + 2 * B * LENGTH * config.text_dim * d
    rest = 2 * num_times * d * d + 2 * num_times * d * 6 * d + 2 * B * n * d * pixels
    kv = 2 * B * LENGTH * d * 2 * d
    own, cross, mlp = 2 * B * n * d * (3 * d + d), 2 * B * n * d * (d + d), 2 * 2 * B * n * d * 4 * d
    attention = 2 * 2 * B * n * n * d + 2 * 2 * B * n * LENGTH * d  # scores, then values, of both
    return ends, rest, kv, own + cross + mlp, attention


def real_inputs(config):
    inputs = [torch.randn(B, config.in_channels, config.input_size, config.input_size), torch.rand(B)]
    return inputs if config.text_dim is None else [*inputs, torch.randn(B, LENGTH, config.text_dim)]


def count(function):
    """Counts the operations and bytes of a function, on real tensors."""
    with Traffic() as traffic:
        function()
    return Work(traffic.operations()), Work(traffic.operations(compiled=True))


def bytes_of(work, name):
    return sum(size for own, _, size in work.operations if own == name)


class TestFlops:
    def test_of_sampling_by_hand(self):
        ends, rest, _, linear, attention = products(CONFIG, num_times=1)
        read_before = 2 * B * LENGTH * CONFIG.text_dim * CONFIG.hidden_size
        expected = ends - read_before + rest + CONFIG.depth * (linear + attention)
        assert sampling_work(CONFIG, B, text_length=LENGTH).flops == expected

    def test_of_training_by_hand(self):
        ends, rest, kv, linear, attention = products(CONFIG, num_times=B)
        # A linear map has two products in the backward pass, or one; fused attention has five for two.
        expected = 2 * ends + 3 * (rest + CONFIG.depth * (kv + linear)) + 3.5 * CONFIG.depth * attention
        work = training(CONFIG, B, text_length=LENGTH)
        assert work.flops == expected
        again = training(CONFIG, B, text_length=LENGTH, checkpointing=True)
        assert again.flops - work.flops == CONFIG.depth * (linear + attention)

    @every_config
    def test_as_torch_counts(self, config):
        network, inputs = network_of(config), real_inputs(config)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss = network(*inputs).square().mean()
            forward = counter.get_total_flops()
            loss.backward()
        scores = sum(size for packet, size in counter.flop_counts["Global"].items() if packet is torch.ops.aten.bmm)
        work = training(config, B, text_length=LENGTH, bf16=False)
        # Plain attention keeps its scores: of seven products of fused attention, torch counts six.
        assert work.flops == counter.get_total_flops() + scores / 6
        assert 2.5 * forward < work.flops < 3.5 * forward

    def test_micro_batches(self):
        one, three = (training(CONFIG, B, text_length=LENGTH, **how) for how in ({}, {"micro_batches": 3}))
        assert three.flops == 3 * one.flops
        assert bytes_of(three, "_fused_adamw_") == bytes_of(one, "_fused_adamw_")
        assert 2 * one.bytes < three.bytes < 3 * one.bytes


class TestBytes:
    def test_of_a_linear_map(self):
        linear, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
        with torch.no_grad():
            work, _ = count(lambda: linear(x))
        assert work.operations == (("addmm", 2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16)),)

    @pytest.mark.parametrize(
        ("function", "numbers"),
        [
            (lambda x: x.t().unsqueeze(0).expand(3, -1, -1), 0),
            (torch.empty_like, 0),
            (lambda x: x[:, :2] + 1, 8 + 8),
            (lambda x: x[:1].expand(4, 8) + 1, 8 + 32),
            (lambda x: x * x, 32 + 32),
            (lambda x: x.add_(torch.ones(8)), 8 + 32 + 8 + 32),
            (lambda x: torch._foreach_lerp_([x], [x.clone()], 0.1), 64 + 96),
        ],
        ids=["views", "allocations", "a part", "an expanded part", "twice the same", "in place", "lists"],
    )
    def test_of_operations(self, function, numbers):
        assert count(lambda: function(torch.empty(4, 8)))[0].bytes == 4 * numbers

    def test_of_an_update(self):
        work = training(CONFIG, B, text_length=LENGTH)
        num = sum(p.numel() for p in network_of(CONFIG).parameters() if p.requires_grad)
        sizes = {"_foreach_norm": 4, "_foreach_mul_": 8, "_fused_adamw_": 28, "_foreach_lerp_": 12}
        for name, size in sizes.items():
            assert bytes_of(work, name) == pytest.approx(size * num, rel=0.01), name

    @pytest.mark.parametrize("name", [ATTENTION, f"{ATTENTION}_backward"])
    def test_attention_is_linear_in_tokens(self, name):
        works = [training(replace(CONFIG, text_dim=None, input_size=size), B, text_length=LENGTH) for size in (8, 16)]
        few, many = (bytes_of(work, name) for work in works)
        assert many == 4 * few
        few, many = (sum(flops for own, flops, _ in work.operations if own == name) for work in works)
        assert many == 16 * few

    def test_weights_in_bf16(self):
        half, full = (sampling_work(CONFIG, 1, text_length=LENGTH, bf16=bf16).bytes for bf16 in (True, False))
        assert 0.5 < half / full < 0.6


class TestFused:
    def test_between_products(self):
        x, weight = torch.randn(4, 8), torch.randn(8, 8)

        def run():
            h = F.gelu(x @ weight + 1)
            return (h @ weight) * h.exp()

        plain, fused = count(run)
        product, tensor = 4 * (32 + 64 + 32), 4 * 32
        assert [size for _, _, size in plain.operations] == [
            product, 2 * tensor, 2 * tensor, product, 2 * tensor, 3 * tensor
        ]  # fmt: skip
        assert [size for _, _, size in fused.operations] == [product, 2 * tensor, product, 3 * tensor]
        assert fused.flops == plain.flops

    def test_of_a_network(self):
        plain, fused = (training(CONFIG, B, text_length=LENGTH, **how) for how in ({}, {"compiled": True}))
        assert fused.flops == plain.flops
        assert fused.bytes < plain.bytes
        assert len(fused.operations) < len(plain.operations)
        assert bytes_of(fused, "mm") == bytes_of(plain, "mm")


class TestSeconds:
    work = Work((("product", 10.0, 1.0), ("sum", 0.0, 4.0)))

    def test_by_hand(self):
        assert self.work.seconds(Device("", flops=10, bandwidth=2, memory=1, launch=0)) == 1 + 2
        assert self.work.seconds(Device("", flops=10, bandwidth=2, memory=1, launch=5)) == 2 * 5

    def test_faster_devices(self):
        device = Device("", flops=10, bandwidth=2, memory=1, launch=1e-3)
        for faster in (replace(device, flops=20), replace(device, bandwidth=4)):
            assert self.work.seconds(faster) < self.work.seconds(device)
        work = training(CONFIG, B, text_length=LENGTH)
        seconds = [work.seconds(replace(device, launch=0)) for device in DEVICES.values()]
        assert seconds == sorted(seconds, reverse=True)
