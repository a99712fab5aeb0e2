"""torch.compile captures each network as one graph, and attention has the form that fast kernels need."""

import shutil

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.cli.main import main
from atoll.data.prepare import prepare
from atoll.data.settings import PrepareSettings
from atoll.data.sources import Source
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset
from atoll.networks.router import Router, RouterConfig
from atoll.tensors import read_tensors

SMALL = {"input_size": 8, "in_channels": 4, "hidden_size": 32, "depth": 2, "num_heads": 2}
SIZES = (4, 6, 5, 7)  # of batches, as routing produces them


def small(kind: str, text_dim: int | None = 16) -> DiT | Router:
    """Returns a network in which every weight matters."""
    torch.manual_seed(0)
    if kind == "router":
        network: DiT | Router = Router(RouterConfig(**SMALL, text_dim=text_dim, num_experts=3))
    else:
        network = DiT(DiTConfig(**SMALL, text_dim=text_dim))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return network


def batch_of(network: DiT | Router, length: int, num: int = 4) -> tuple[Tensor, ...]:
    """Returns x, t and, for a network that reads text, tokens and a mask that hides some of them."""
    x, t = torch.randn(num, 4, 8, 8), torch.rand(num)
    if network.config.text_dim is None:
        return x, t
    mask = torch.arange(length) < torch.randint(1, length, (num, 1))
    return x, t, torch.randn(num, length, network.config.text_dim), mask


def step(network: DiT | Router, forward, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the output and the gradients of a training step."""
    output = forward(*batch)
    output.square().mean().backward()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    return [output.detach(), *gradients]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class TestOneGraph:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("kind", "text_dim", "checkpointing"),
        [
            ("expert", 16, False),
            pytest.param("expert", 16, True, marks=pytest.mark.slow),
            pytest.param("expert", None, False, marks=pytest.mark.slow),
            pytest.param("router", 16, False, marks=pytest.mark.slow),
            pytest.param("router", None, True, marks=pytest.mark.slow),
        ],
    )
    def test_training(self, kind, text_dim, checkpointing):
        """There is one graph per text length, none for a length seen before; results are the plain network's."""
        network = small(kind, text_dim)
        network.gradient_checkpointing = checkpointing
        compiled = torch.compile(network, fullgraph=True, dynamic=False, backend="aot_eager")
        lengths = (16, 32, 16, 32, 16)
        for length in lengths:
            batch = batch_of(network, length)
            for ours, theirs in zip(*(step(network, way, batch) for way in (compiled, network)), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == (len(set(lengths)) if text_dim else 1)
        assert not counters["graph_break"]

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["expert", "router"])
    def test_sampling(self, kind):
        """With cached texts and one time for all samples, any number of samples uses the same graph."""
        network = small(kind).eval()
        tokens = batch_of(network, 16, max(SIZES))[2]
        compiled = torch.compile(network, fullgraph=True, backend="eager")
        with torch.no_grad():
            for num in SIZES:
                text = network.read_text(tokens[:num])
                x, t = torch.randn(num, 4, 8, 8), torch.rand(())
                torch.testing.assert_close(compiled(x, t, text), network(x, t, text), rtol=1e-4, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == 2  # the first size, then any size
        assert not counters["graph_break"]

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
    def test_a_run(self, tmp_path):
        """With the users' own compiler, the expert equals that of an uncompiled run."""
        prepare(Source("shapes", num=60, size=16), tmp_path / "data", PrepareSettings(size=16), 0, progress=False)
        for flags in ((), ("--compile",)):
            out = tmp_path / ("compiled" if flags else "plain")
            main(
                ["train", str(tmp_path / "data"), "--cluster", "all", "--model", "32x1", "--steps", "4", "--batch", "4",
                 "--sample-every", "0", "--out", str(out), *flags]
            )  # fmt: skip
        ours, theirs = (read_tensors(tmp_path / name / "model.safetensors", "") for name in ("compiled", "plain"))
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4, msg=name)


class TestAttention:
    @pytest.fixture
    def calls(self, monkeypatch) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Records the arguments of attention."""
        found = []
        attention = F.scaled_dot_product_attention

        def listen(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            found.append((q, k, v, attn_mask))
            return attention(q, k, v, attn_mask=attn_mask)

        monkeypatch.setattr(F, "scaled_dot_product_attention", listen)
        return found

    @pytest.mark.parametrize("kind", ["expert", "router"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_it_has_the_form_of_fast_kernels(self, calls, kind, masked):
        """bf16 with contiguous heads, and no mask in self-attention, which flash kernels do not support."""
        network = small(kind)
        x, t, tokens, mask = batch_of(network, 16)
        with torch.autocast("cpu", torch.bfloat16):
            network(x, t, tokens, mask if masked else None)
        tokens_in = 16 + (kind == "router")  # and the class token
        assert len(calls) == 2 * network.config.depth
        for place, (q, k, v, own_mask) in enumerate(calls):
            for part in (q, k, v):
                assert part.dtype == torch.bfloat16
                assert part.stride(-1) == 1
                assert part.shape[:2] == (4, 2)
            assert q.shape[2] == tokens_in
            if place % 2 == 0:
                assert own_mask is None
            elif masked:
                assert own_mask is not None
                assert own_mask.shape == (4, 1, 1, k.shape[2])  # one row for all heads and queries
                assert own_mask.dtype == torch.bool
            else:
                assert own_mask is None

    def test_flash_kernels_take_it(self):
        """The CPU's flash kernel is as strict about shapes and types; no other is allowed here."""
        network = small("expert")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cpu", torch.bfloat16):
            network(*batch_of(network, 16)[:3]).float().square().mean().backward()

    @pytest.mark.parametrize("name", ["xs", "mini", "s/2", "b/2", "l/2", "xl/2"])
    def test_heads_are_multiples_of_eight_wide(self, name):
        config = DiTConfig(**preset(name))
        assert (config.hidden_size // config.num_heads) % 8 == 0
        assert config.hidden_size // config.num_heads <= 256
