"""Fixtures: tiny versions of the real classes with random weights, saved to folders in the published layout."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def kl(tmp_path_factory) -> Path:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("kl")
    diffusers.AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
        scaling_factor=0.7,
        shift_factor=0.1,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
        scaling_factor=1.3,
        shift_factor=-0.2,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dino(tmp_path_factory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dino")
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    transformers.Dinov2Model(config).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> int:
    """Writes a byte-level CLIP tokenizer with two merges; returns its number of tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    units = [chr(code) for code in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*units, *(unit + "</w>" for unit in units), "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"model_max_length": 16, "tokenizer_class": "CLIPTokenizer"})
    )
    return len(tokens)


@pytest.fixture(scope="session")
def clip(tmp_path_factory) -> Path:
    """Returns a tiny CLIP in a pipeline's layout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    size = write_tokenizer(folder / "tokenizer")
    config = transformers.CLIPTextConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
    )
    transformers.CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    return folder
