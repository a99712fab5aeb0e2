"""Tiny random checkpoints with the key names and shapes of published ones, and their forward passes in plain torch.

Written from the description of the architectures, not with the code under test.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, DEPTH, HEADS, SIZE, CLASSES = 32, 3, 4, 8, 10
Weights = dict[str, Tensor]


def draw(shapes: dict[str, tuple[int, ...]], seed: int = 0, std: float = 0.15) -> Weights:
    g = torch.Generator().manual_seed(seed)
    return {name: std * torch.randn(*shape, generator=g) for name, shape in shapes.items()}


def layer(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def places(width: int, side: int, step: float = 1.0) -> Tensor:
    """Returns the sines and cosines of columns, then of rows, `step` apart."""
    rows = []
    for y in range(side):
        for x in range(side):
            row: list[float] = []
            for at in (x, y):
                angles = [step * at / 10_000 ** (4 * i / width) for i in range(width // 4)]
                row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(row)
    return torch.tensor(rows)[None]


def class_dit(seed: int = 0, width: int = WIDTH, depth: int = DEPTH, classes: int = CLASSES) -> Weights:
    """Returns the state dict of facebookresearch's DiT and SiT: 4 channels in, 8 out, patches of 2."""
    shapes = {"x_embedder.proj.weight": (width, 4, 2, 2), "x_embedder.proj.bias": (width,)}
    shapes |= layer("t_embedder.mlp.0", width, 256) | layer("t_embedder.mlp.2", width, width)
    shapes |= {"y_embedder.embedding_table.weight": (classes + 1, width)}
    for i in range(depth):
        shapes |= layer(f"blocks.{i}.attn.qkv", 3 * width, width) | layer(f"blocks.{i}.attn.proj", width, width)
        shapes |= layer(f"blocks.{i}.mlp.fc1", 4 * width, width) | layer(f"blocks.{i}.mlp.fc2", width, 4 * width)
        shapes |= layer(f"blocks.{i}.adaLN_modulation.1", 6 * width, width)
    shapes |= layer("final_layer.linear", 2 * 2 * 8, width)
    shapes |= layer("final_layer.adaLN_modulation.1", 2 * width, width)
    w = {"pos_embed": places(width, SIZE // 2), **draw(shapes, seed)}
    # A trained network's modulation changes slowly: it hardly uses the waves with periods of a few of the 1000 steps.
    slow = torch.clamp(0.02 / torch.exp(-math.log(10_000) * torch.arange(128) / 128), max=1).repeat(2)
    return {**w, "t_embedder.mlp.0.weight": 3 * slow * w["t_embedder.mlp.0.weight"]}


def waves(t: Tensor) -> Tensor:
    f = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
    return torch.cat([torch.cos(t[:, None] * f), torch.sin(t[:, None] * f)], 1)


def apply_layer(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    scores = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), -1)
    return (scores @ v).transpose(1, 2).flatten(2)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def run_class_dit(w: Weights, x: Tensor, time: Tensor, label: int) -> Tensor:
    """Returns all 8 output channels, at the time in the network's own units."""
    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=2).flatten(2).transpose(1, 2)
    h = h + w["pos_embed"]
    c = apply_layer(w, "t_embedder.mlp.2", F.silu(apply_layer(w, "t_embedder.mlp.0", waves(time))))
    c = F.silu(c + w["y_embedder.embedding_table.weight"][label])
    depth = sum(name.endswith("attn.proj.weight") for name in w)
    for i in range(depth):
        six = apply_layer(w, f"blocks.{i}.adaLN_modulation.1", c).chunk(6, 1)
        n = modulate(h, six[0], six[1])
        mixed = attend(*apply_layer(w, f"blocks.{i}.attn.qkv", n).chunk(3, 2))
        h = h + six[2][:, None] * apply_layer(w, f"blocks.{i}.attn.proj", mixed)
        n = apply_layer(w, f"blocks.{i}.mlp.fc1", modulate(h, six[3], six[4]))
        h = h + six[5][:, None] * apply_layer(w, f"blocks.{i}.mlp.fc2", F.gelu(n, approximate="tanh"))
    h = modulate(h, *apply_layer(w, "final_layer.adaLN_modulation.1", c).chunk(2, 1))
    return unpatch(apply_layer(w, "final_layer.linear", h))


def unpatch(patches: Tensor) -> Tensor:
    """Returns tokens [B, N, p p C], p = 2, as images [B, C, S, S]."""
    batch, num, numbers = patches.shape
    side, channels = math.isqrt(num), numbers // 4
    out = patches.new_zeros(batch, channels, 2 * side, 2 * side)
    for row in range(2):
        for column in range(2):
            part = patches[:, :, (2 * row + column) * channels : (2 * row + column + 1) * channels]
            out[:, :, row::2, column::2] = part.transpose(1, 2).unflatten(2, (side, side))
    return out


def pixart(seed: int = 0, text_dim: int = 24) -> Weights:
    """Returns the state dict of PixArt-alpha's .pth files."""
    shapes = {"x_embedder.proj.weight": (WIDTH, 4, 2, 2), "x_embedder.proj.bias": (WIDTH,)}
    shapes |= layer("t_embedder.mlp.0", WIDTH, 256) | layer("t_embedder.mlp.2", WIDTH, WIDTH)
    shapes |= layer("t_block.1", 6 * WIDTH, WIDTH) | {"y_embedder.y_embedding": (120, text_dim)}
    shapes |= layer("y_embedder.y_proj.fc1", WIDTH, text_dim) | layer("y_embedder.y_proj.fc2", WIDTH, WIDTH)
    for i in range(DEPTH):
        block = f"blocks.{i}"
        shapes |= {f"{block}.scale_shift_table": (6, WIDTH)}
        shapes |= layer(f"{block}.attn.qkv", 3 * WIDTH, WIDTH) | layer(f"{block}.attn.proj", WIDTH, WIDTH)
        shapes |= layer(f"{block}.cross_attn.q_linear", WIDTH, WIDTH)
        shapes |= layer(f"{block}.cross_attn.kv_linear", 2 * WIDTH, WIDTH)
        shapes |= layer(f"{block}.cross_attn.proj", WIDTH, WIDTH)
        shapes |= layer(f"{block}.mlp.fc1", 4 * WIDTH, WIDTH) | layer(f"{block}.mlp.fc2", WIDTH, 4 * WIDTH)
    shapes |= layer("final_layer.linear", 32, WIDTH) | {"final_layer.scale_shift_table": (2, WIDTH)}
    return {"pos_embed": places(WIDTH, SIZE // 2), **draw(shapes, seed)}


def run_pixart(w: Weights, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=2).flatten(2).transpose(1, 2)
    h = h + w["pos_embed"]
    tau = apply_layer(w, "t_embedder.mlp.2", F.silu(apply_layer(w, "t_embedder.mlp.0", waves(time))))
    shared = apply_layer(w, "t_block.1", F.silu(tau)).unflatten(1, (6, -1))
    y = F.gelu(apply_layer(w, "y_embedder.y_proj.fc1", text), approximate="tanh")
    y = apply_layer(w, "y_embedder.y_proj.fc2", y)
    for i in range(DEPTH):
        block = f"blocks.{i}"
        six = (shared + w[f"{block}.scale_shift_table"]).unbind(1)
        mixed = attend(*apply_layer(w, f"{block}.attn.qkv", modulate(h, six[0], six[1])).chunk(3, 2))
        h = h + six[2][:, None] * apply_layer(w, f"{block}.attn.proj", mixed)
        q = apply_layer(w, f"{block}.cross_attn.q_linear", h)
        k, v = apply_layer(w, f"{block}.cross_attn.kv_linear", y).chunk(2, 2)
        h = h + apply_layer(w, f"{block}.cross_attn.proj", attend(q, k, v))
        n = apply_layer(w, f"{block}.mlp.fc1", modulate(h, six[3], six[4]))
        h = h + six[5][:, None] * apply_layer(w, f"{block}.mlp.fc2", F.gelu(n, approximate="tanh"))
    table = w["final_layer.scale_shift_table"]
    return unpatch(apply_layer(w, "final_layer.linear", modulate(h, tau + table[0], tau + table[1])))


# --- Paris ----------------------------------------------------------------------------------------------------------


def _paris_trunk(width: int, depth: int, learned: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.weight": (width, 4, 2, 2), "patch_embed.bias": (width,)}
    shapes |= {"pos_embed": (1, (SIZE // 2) ** 2, width)} if learned else {}
    shapes |= layer("time_embed.mlp.0", width, 256) | layer("time_embed.mlp.2", width, width)
    for i in range(depth):
        shapes |= _mha(f"layers.{i}.attn", width)
        shapes |= layer(f"layers.{i}.mlp.0", 4 * width, width) | layer(f"layers.{i}.mlp.2", width, 4 * width)
    return shapes


def _mha(name: str, width: int) -> dict[str, tuple[int, ...]]:
    joined = {f"{name}.in_proj_weight": (3 * width, width), f"{name}.in_proj_bias": (3 * width,)}
    return joined | layer(f"{name}.out_proj", width, width)


def paris_expert(seed: int = 0, text_dim: int = 16) -> Weights:
    shapes = _paris_trunk(WIDTH, DEPTH, True) | layer("t_block.1", 6 * WIDTH, WIDTH)
    shapes |= layer("text_proj", WIDTH, text_dim) | layer("final_layer.linear", 16, WIDTH)
    shapes |= {"final_layer.scale_shift_table": (2, WIDTH)}
    for i in range(DEPTH):
        shapes |= _mha(f"layers.{i}.cross_attn", WIDTH) | {f"layers.{i}.scale_shift_table": (6, WIDTH)}
    return draw(shapes, seed)


def paris_router(seed: int = 0, num: int = 3) -> Weights:
    shapes = _paris_trunk(WIDTH, DEPTH, True) | {"cls_token": (1, 1, WIDTH)}
    shapes |= layer("head.0", WIDTH, WIDTH) | {"head.2.weight": (WIDTH,), "head.2.bias": (WIDTH,)}
    shapes |= layer("head.4", num, WIDTH)
    for i in range(DEPTH):
        shapes |= layer(f"layers.{i}.adaLN_modulation.1", 6 * WIDTH, WIDTH)
    return draw(shapes, seed)


def _multihead(w: Weights, name: str, q: Tensor, kv: Tensor) -> Tensor:
    """Computes torch's own nn.MultiheadAttention with these weights."""
    attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    attention.load_state_dict({key.removeprefix(f"{name}."): w[key] for key in w if key.startswith(f"{name}.")})
    with torch.no_grad():
        return attention(q, kv, kv, need_weights=False)[0]


def _paris_start(w: Weights, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    h = F.conv2d(x, w["patch_embed.weight"], w["patch_embed.bias"], stride=2).flatten(2).transpose(1, 2)
    tau = apply_layer(w, "time_embed.mlp.2", F.silu(apply_layer(w, "time_embed.mlp.0", waves(time))))
    return h + w["pos_embed"], tau


def _paris_mlp(w: Weights, i: int, x: Tensor) -> Tensor:
    return apply_layer(w, f"layers.{i}.mlp.2", F.gelu(apply_layer(w, f"layers.{i}.mlp.0", x), approximate="tanh"))


def run_paris_expert(w: Weights, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
    h, tau = _paris_start(w, x, time)
    shared = apply_layer(w, "t_block.1", F.silu(tau)).unflatten(1, (6, -1))
    y = apply_layer(w, "text_proj", text)
    for i in range(DEPTH):
        six = (shared + w[f"layers.{i}.scale_shift_table"]).unbind(1)
        n = modulate(h, six[0], six[1])
        h = h + six[2][:, None] * _multihead(w, f"layers.{i}.attn", n, n)
        h = h + _multihead(w, f"layers.{i}.cross_attn", h, y)
        h = h + six[5][:, None] * _paris_mlp(w, i, modulate(h, six[3], six[4]))
    table = w["final_layer.scale_shift_table"]
    return unpatch(apply_layer(w, "final_layer.linear", modulate(h, tau + table[0], tau + table[1])))


def run_paris_router(w: Weights, x: Tensor, time: Tensor) -> Tensor:
    h, tau = _paris_start(w, x, time)
    h = torch.cat([w["cls_token"].expand(len(x), -1, -1), h], 1)
    for i in range(DEPTH):
        six = apply_layer(w, f"layers.{i}.adaLN_modulation.1", F.silu(tau)).chunk(6, 1)
        n = modulate(h, six[0], six[1])
        h = h + six[2][:, None] * _multihead(w, f"layers.{i}.attn", n, n)
        h = h + six[5][:, None] * _paris_mlp(w, i, modulate(h, six[3], six[4]))
    token = F.gelu(apply_layer(w, "head.0", h[:, 0]), approximate="tanh")
    token = F.layer_norm(token, (WIDTH,), w["head.2.weight"], w["head.2.bias"])
    return apply_layer(w, "head.4", F.gelu(token, approximate="tanh"))
