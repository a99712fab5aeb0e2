"""Text encoders: captions in any script, the real CLIP classes, and the same ids and tokens in every process."""

import hashlib
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atoll.cards import TextEncoderCard, require_same
from atoll.cli.main import main
from atoll.encoders import pretrained, text
from atoll.encoders.text import (
    BEGIN,
    CHARACTERS,
    NUM_IDS,
    PADDING,
    CLIPText,
    WordLlama,
    WordLlamaConfig,
    load_text_encoder,
    make_text_encoder,
    split_words,
    word_id,
)
from atoll.errors import InputError
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.presets import preset
from tiny_models import write_tokenizer

CAPTIONS = ["", "a red hat, a blue body", "猫が好き", "a " * 100, "Größe naïve", "!?", "🐱 cat"]


def words(caption: str) -> list[str]:
    return list(split_words(caption))


class TestSplitWords:
    @pytest.mark.parametrize(
        ("caption", "expected"),
        [
            ("", []),
            ("  ,.!? -- ", []),
            (
                "A large RED ring, on a navy-blue ground.",
                ["a", "large", "red", "ring", "on", "a", "navy", "blue", "ground"],
            ),
            ("two 3d cubes_42", ["two", "3d", "cubes", "42"]),
            ("Straße STRASSE", ["strasse", "strasse"]),
            ("\ufb01ne \uff46\uff55ll \u2460", ["fine", "full", "1"]),
            ("cafe\u0301 café", ["café", "café"]),
            ("красная шляпа", ["красная", "шляпа"]),
            ("قبعة حمراء", ["قبعة", "حمراء"]),
            ("हिन्दी में", ["हिन्दी", "में"]),
            ("빨간 모자", ["빨간", "모자"]),
            ("红帽子cat猫", ["红", "帽", "子", "cat", "猫"]),
            ("ねこ、ネコ。", ["ね", "こ", "ネ", "コ"]),
            ("น้ำ", ["น้\u0e4d", "า"]),
            ("🐱cat❤️❤", ["🐱", "cat", "❤", "❤"]),
            ("soft\u00adhyphen zero\u200dwidth", ["softhyphen", "zerowidth"]),
            ("\ud800 lone \udfff half\x00null", ["lone", "half", "null"]),
        ],
    )
    def test_scripts(self, caption, expected):
        assert words(caption) == expected

    @given(st.text(alphabet=st.characters(), max_size=60))
    def test_any_script(self, caption):
        found = words(caption)
        assert all(word and not any(char.isspace() for char in word) for word in found)
        assert words(" ".join(found)) == found, "words are stable"
        assert words(f" {caption}\n.") == found, "spaces and punctuation around do not matter"
        if any(char.isalnum() for char in caption):
            assert found


class TestWords:
    @given(st.lists(st.text(alphabet=st.characters(), max_size=80), max_size=4))
    def test_any_script(self, captions):
        encoder = make_text_encoder("words")
        ids = encoder.tokenize(captions)
        assert ids.dtype == torch.int32
        assert ids.shape == (len(captions), 32)
        for row, caption in zip(ids.tolist(), captions, strict=True):
            expected = [BEGIN, *(word_id(word) for word in words(caption))][:32]
            assert row == expected + [PADDING] * (32 - len(expected))
        tokens, mask = encoder.encode(ids)
        assert tokens.dtype == torch.float32
        assert tokens.shape == (len(captions), 32, 64)
        assert torch.equal(mask, ids != PADDING)
        assert mask[:, 0].all()
        assert not tokens[~mask].any()

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("part", ["a", "\u0301\u0316", "word ", "猫", " "])
    def test_time_does_not_grow_with_a_text(self, part):
        """20 million characters would take hours in quadratic time."""
        long = part * (20_000_000 // len(part))
        encoder = make_text_encoder("words")
        assert torch.equal(encoder.tokenize([long]), encoder.tokenize([long[: CHARACTERS * encoder.max_length]]))

    def test_null_text(self):
        encoder = make_text_encoder("words")
        null = encoder.null_ids()
        assert torch.equal(null, encoder.tokenize([""]))
        assert null.tolist() == [[BEGIN] + [PADDING] * 31]
        assert encoder.encode(null)[1].sum() == 1

    def test_order_and_words_are_visible(self):
        encoder = make_text_encoder("words")
        a, b = encoder.encode(encoder.tokenize(["red hat, blue body", "blue hat, red body"]))[0]
        torch.testing.assert_close(a.sum(0), b.sum(0))
        assert (a - b).abs().max() > 1

    def test_vectors_are_unit_variance_and_nearly_orthogonal(self):
        names = [f"word{i}" for i in range(500)]
        ids = torch.tensor([[word_id(name) for name in names]])
        signs = text._signs(ids, 256)[0]
        assert (signs.abs() == 1).all()
        assert signs.mean().abs() < 0.01
        overlap = (signs @ signs.T / 256).fill_diagonal_(0)
        assert overlap.abs().max() < 0.4
        assert overlap.square().mean().sqrt().item() == pytest.approx(256**-0.5, rel=0.02)

    def test_signs_are_splitmix64(self):
        """The integers equal those computed with Python's, which do not overflow."""

        def splitmix64(index: int) -> int:
            state = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
            state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
            return state ^ state >> 31

        ids = [0, 1, 2, 12345, NUM_IDS - 1]
        for dim in (64, 100):
            blocks = -(-dim // 64)
            for row, i in zip(text._signs(torch.tensor(ids), dim), ids, strict=True):
                bits = [splitmix64(i * blocks + d // 64) >> d % 64 & 1 for d in range(dim)]
                assert row.tolist() == [2 * bit - 1 for bit in bits]

    def test_ids_never_change(self):
        """Ids are stored in shards: another value here breaks every data set."""
        assert [word_id(word) for word in ("red", "猫")] == [RED, CAT]
        encoder = make_text_encoder("words")
        tokens, _ = encoder.encode(encoder.tokenize(["red"]))
        digest = hashlib.sha256((tokens[0, :2] * 1000).round().int().numpy().tobytes()).hexdigest()
        assert digest[:16] == TOKENS

    def test_sizes(self):
        encoder = make_text_encoder("words:128x8")
        assert (encoder.dim, encoder.max_length) == (128, 8)
        ids = encoder.tokenize(["a b c d e f g h i j"])
        assert (ids != PADDING).all()
        assert encoder.encode(ids)[0].shape == (1, 8, 128)
        assert torch.equal(encoder.encode(ids[:, :3])[0], encoder.encode(ids)[0][:, :3])

    def test_experts_read_it(self):
        encoder = make_text_encoder("words:16x8")
        expert = DiT(DiTConfig(**preset("xs/2", input_size=4, text_dim=16)))
        tokens, mask = encoder.encode(encoder.tokenize(["", "a cat"]))
        assert expert(torch.zeros(2, 4, 4, 4), torch.zeros(2), tokens, mask).shape == (2, 4, 4, 4)

    @pytest.mark.bits
    def test_round_trip(self, tmp_path):
        encoder = make_text_encoder("words:32x16")
        encoder.save(tmp_path)
        assert sorted(path.name for path in (tmp_path / "text_encoder").iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        again = load_text_encoder(tmp_path)
        ids = encoder.tokenize(CAPTIONS)
        assert torch.equal(again.tokenize(CAPTIONS), ids)
        assert torch.equal(again.encode(ids)[0], encoder.encode(ids)[0])
        assert again.describe() == encoder.describe()
        assert TextEncoderCard.parse(again.describe().values(), "") == again.describe()

    def test_fingerprints_differ(self):
        specs = ("words", "words:32x32", "words:64x16")
        assert len({make_text_encoder(spec).describe().fingerprint for spec in specs}) == 3

    def test_damage(self, tmp_path):
        with pytest.raises(InputError, match="there is no .*: give a folder in which it was saved"):
            load_text_encoder(tmp_path)
        make_text_encoder("words").save(tmp_path)
        weights = tmp_path / "text_encoder" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        with pytest.raises(InputError, match="is truncated or not a safetensors file"):
            load_text_encoder(tmp_path)
        config = tmp_path / "text_encoder" / "config.json"
        config.write_text(config.read_text().replace('"Words"', '"Router"'))
        with pytest.raises(InputError, match="describes a 'Router', not one of Words"):
            load_text_encoder(tmp_path)

    def test_bad_input(self):
        encoder = make_text_encoder("words")
        wrong = [torch.tensor(ids, dtype=torch.int32) for ids in ([[NUM_IDS]], [[-1]], [[1, 2**31 - 1]])]
        wrong += [torch.zeros(1, 33).int(), torch.zeros(1, 0).int(), torch.zeros(3).int(), torch.zeros(1, 3)]
        for ids in wrong:
            with pytest.raises(InputError, match=r"token ids must be integers \[batch, up to 32\] from 0"):
                encoder.encode(ids)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("word", "unknown text encoder 'word': did you mean 'words'"),
            ("clip", "unknown text encoder 'clip'"),
            ("words:64", "write it like words:64x32"),
            ("words:63x32", "the width even"),
            ("words:64x1", "at least 2"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(InputError, match=message):
            make_text_encoder(spec)


@pytest.fixture(scope="module")
def llama() -> WordLlama:
    encoder = make_text_encoder("wordllama")
    assert isinstance(encoder, WordLlama)
    return encoder


def no_files(package: str) -> None:
    raise PackageNotFoundError(package)


class TestWordLlama:
    def pieces(self, encoder: WordLlama, caption: str) -> list[str]:
        names = bytes(encoder.pieces.numpy()).decode().split("\n")
        return [names[i] for i in encoder.tokenize([caption])[0].tolist() if i != PADDING]

    @pytest.mark.parametrize(
        ("caption", "expected"),
        [
            ("", "<s>"),
            (" ,.!? ", "<s>"),
            ("A red CAT.", "<s> ▁a ▁red ▁cat"),
            ("kittens", "<s> ▁k itt ens"),
            ("in paris, Paris, PARIS", "<s> ▁in ▁Paris ▁Paris ▁Paris"),
            ("navy-blue <s> </s>", "<s> ▁Navy ▁blue ▁s ▁s"),
            ("中国猫cat", "<s> 中 国 <0xE7> <0x8C> <0xAB> ▁cat"),
            ("a\u2581b", "<s> ▁a ▁ ▁b"),
            ("🐱", "<s> <0xF0> <0x9F> <0x90> <0xB1>"),
            ("\ud800 half", "<s> ▁half"),
        ],
    )
    def test_known_pieces(self, llama, caption, expected):
        assert self.pieces(llama, caption) == expected.split()

    def test_pieces_are_those_of_the_tokenizers_library(self, llama):
        from tokenizers import Tokenizer

        path = pretrained.installed_files("wordllama", "text", text.LLAMA_FILES)[1]
        theirs = Tokenizer.from_file(str(path))

        @given(st.text(alphabet=st.characters(categories=("L", "N")), min_size=1, max_size=40))
        @example("aaaaaaaaaaa")
        @example("incomprehensibilities")
        @example("Größe")
        @example("قبعة")
        def check(word: str) -> None:
            assert llama._merge(text.SPACE + word) == theirs.encode(word).ids[1:]

        check()

    def test_like_words_are_near(self, llama):
        """Each word is nearer to its partner than to any other's, also if both have several pieces."""
        pairs = [("ship", "boat"), ("cat", "kitten"), ("dog", "puppy"), ("car", "automobile"), ("child", "kids"),
                 ("shirt", "shirts"), ("mountain", "hill"), ("ocean", "sea"), ("bicycle", "bike")]  # fmt: skip
        similar = self.vectors(llama, [a for a, _ in pairs]) @ self.vectors(llama, [b for _, b in pairs]).T
        assert similar.argmax(1).tolist() == list(range(len(pairs)))
        assert similar.diag().min() > 0.2
        assert similar.fill_diagonal_(0).mean().abs() < 0.1

    def vectors(self, encoder: WordLlama, names: list[str]) -> torch.Tensor:
        tokens, _ = encoder.encode(encoder.tokenize(names))
        return torch.nn.functional.normalize(tokens[:, 1] - encoder.positions[1], dim=1)

    def test_all_pieces_of_a_word_show_the_whole(self, llama):
        tokens, mask = llama.encode(llama.tokenize(["kittens"]))
        words = (tokens - llama.positions)[0, mask[0]]
        torch.testing.assert_close(words[1], words[2])
        torch.testing.assert_close(words[1], words[3])
        assert (words[0] - words[1]).abs().max() > 0.5
        torch.testing.assert_close(words.square().mean(1), torch.ones(4))

    def test_one_sum_is_the_package_s(self, llama):
        """A word's direction is that of the sum of its pieces in the published table."""
        weights = load_file(pretrained.installed_files("wordllama", "text", text.LLAMA_FILES)[0])["embedding.weight"]
        pieces = llama.tokenize(["kittens"])[0, 1:4].long()
        expected = torch.nn.functional.normalize(weights[pieces].float().sum(0), dim=0)
        torch.testing.assert_close(self.vectors(llama, ["kittens"])[0], expected, rtol=0, atol=1e-3)

    def test_null_text_and_order(self, llama):
        assert llama.null_ids().tolist() == [[BEGIN] + [PADDING] * 47]
        assert llama.encode(llama.null_ids())[1].sum() == 1
        assert llama.tokenize([]).shape == (0, 48)
        a, b = llama.encode(llama.tokenize(["red hat, blue body", "blue hat, red body"]))[0]
        torch.testing.assert_close(a.sum(0), b.sum(0), rtol=0, atol=1e-4)
        assert (a - b).abs().max() > 1

    def test_any_script(self, llama):
        @given(st.lists(st.text(alphabet=st.characters(), max_size=80), max_size=4))
        def check(captions: list[str]) -> None:
            ids = llama.tokenize(captions)
            assert (ids.dtype, ids.shape) == (torch.int32, (len(captions), 48))
            tokens, mask = llama.encode(ids)
            assert (tokens.dtype, tokens.shape) == (torch.float32, (len(captions), 48, 256))
            assert torch.equal(mask, ids != PADDING)
            assert torch.equal(llama.tokenize([f" {caption.upper().lower()}" for caption in captions])[:, 0], ids[:, 0])
            assert not tokens[~mask].any()
            assert tokens.isfinite().all()

        check()

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("part", ["a", "ab", "\u0301\u0316", "word ", "猫", "🐱", " "])
    def test_time_does_not_grow_with_a_text(self, llama, part):
        long = part * (20_000_000 // len(part))
        assert torch.equal(llama.tokenize([long]), llama.tokenize([long[: CHARACTERS * llama.max_length]]))

    @pytest.mark.timeout(60)
    def test_time_does_not_grow_with_a_word(self):
        """Splitting a word of a million letters would take days."""
        encoder = make_text_encoder("wordllama:64x65536")
        assert torch.equal(encoder.tokenize(["ab" * 500_000]), encoder.tokenize(["ab" * 32]))

    @pytest.mark.bits
    def test_tokens_do_not_depend_on_the_batch(self, llama):
        ids = llama.tokenize(CAPTIONS)
        tokens, _ = llama.encode(ids)
        for i, row in enumerate(ids):
            length = int((row != PADDING).sum())
            assert torch.equal(llama.encode(row[None, :length])[0][0], tokens[i, :length])

    def test_sizes(self, llama):
        small = make_text_encoder("wordllama:64x8")
        assert isinstance(small, WordLlama)
        assert (small.dim, small.max_length, small.num_ids) == (64, 8, 32000)
        assert torch.equal(small.embeddings, llama.embeddings[:, :64])
        assert (small.tokenize(["a b c d e f g h i j"]) != PADDING).all()
        assert small.describe().fingerprint != llama.describe().fingerprint
        assert small.describe().spec == "wordllama:64x8"

    @pytest.mark.bits
    def test_round_trip(self, llama, tmp_path, monkeypatch):
        llama.save(tmp_path)
        monkeypatch.setattr(pretrained, "files", no_files)
        again = load_text_encoder(tmp_path)
        ids = llama.tokenize(CAPTIONS)
        assert torch.equal(again.tokenize(CAPTIONS), ids)
        assert torch.equal(again.encode(ids)[0], llama.encode(ids)[0])
        assert again.describe() == llama.describe()
        assert TextEncoderCard.parse(again.describe().values(), "") == again.describe()

    @pytest.mark.slow
    def test_a_model_samples_without_the_package(self, tmp_path, monkeypatch):
        data, expert, model, out = (str(tmp_path / name) for name in ("data", "expert", "model", "out"))
        main(["prepare", "avatars", "--num", "24", "--workers", "0", "--text", "wordllama:64x16", "--out", data])
        main(["train", data, "--model", "xs", "--steps", "2", "--batch", "4", "--device", "cpu", "--out", expert])
        monkeypatch.setattr(pretrained, "files", no_files)
        for name in ("wordllama", "tokenizers", "transformers"):
            monkeypatch.setitem(sys.modules, name, None)
        main(["assemble", expert, "--data", data, "--out", model])
        main(["sample", model, "a red cat in a cap", "--steps", "2", "--device", "cpu", "--out", out])
        assert list(Path(out).glob("*.png"))

    def test_not_installed(self, monkeypatch):
        monkeypatch.setattr(pretrained, "files", no_files)
        with pytest.raises(InputError, match=r"^this needs the files of wordllama: pip install 'atoll\[text\]'$"):
            make_text_encoder("wordllama")

    @pytest.mark.slow
    def test_its_code_is_not_imported(self):
        program = (
            "import sys; from atoll.encoders.text import make_text_encoder; make_text_encoder('wordllama')\n"
            "assert not {'wordllama', 'tokenizers', 'requests'} & sys.modules.keys()"
        )
        subprocess.run([sys.executable, "-c", program], check=True)

    @pytest.mark.parametrize("content", [b"x" * 500, b"\xff\n" * 100, b"\n" * 31999, "é".encode() * 300])
    def test_damaged_vocabulary(self, llama, content, tmp_path):
        llama.save(tmp_path)
        path = tmp_path / "text_encoder" / "model.safetensors"
        weights = load_file(path)
        weights["pieces"][: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        save_file(weights, path)
        config = path.with_name("config.json")
        about = json.loads(config.read_text())
        del about["sha256"]
        config.write_text(json.dumps(about))
        with pytest.raises(InputError, match="the vocabulary in .* is not 32000 pieces with all bytes: copy it again"):
            load_text_encoder(tmp_path)

    def test_bad_input(self, llama):
        for ids in ([[32000]], [[-1]]):
            with pytest.raises(InputError, match=r"token ids must be integers \[batch, up to 48\] from 0 to 31999"):
                llama.encode(torch.tensor(ids))

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("wordlama", "unknown text encoder 'wordlama': did you mean 'wordllama'"),
            ("wordllama:64", "write it like wordllama:64x32"),
            ("wordllama:100x48", "wordllama has no tokens 100 wide: choose 64, 128, 256"),
            ("wordllama:64x1", "at least 2"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(InputError, match=message):
            make_text_encoder(spec)

    @pytest.mark.parametrize("sizes", [(64, 8, 10**9, 10), (64, 8, 1, 10), (64, 8, 300, 10**12), (3, 8, 300, 999)])
    def test_hostile_sizes(self, sizes):
        with pytest.raises(InputError, match="cannot be"):
            WordLlamaConfig(*sizes)


@pytest.fixture
def broken(clip, tmp_path) -> Path:
    """Returns a copy of it to damage."""
    for file in clip.rglob("*.*"):
        copy = tmp_path / file.relative_to(clip)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return tmp_path


class TestCLIP:
    @pytest.mark.bits
    def test_is_transformers(self, clip):
        from transformers import CLIPTextModel, CLIPTokenizer

        encoder = make_text_encoder(f"clip:{clip}")
        tokenizer = CLIPTokenizer.from_pretrained(clip / "tokenizer")
        model = CLIPTextModel.from_pretrained(clip / "text_encoder").eval()
        ids = encoder.tokenize(CAPTIONS)
        theirs = tokenizer(CAPTIONS, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
        assert ids.dtype == torch.int32
        assert torch.equal(ids.long(), theirs.input_ids)
        tokens, mask = encoder.encode(ids)
        assert torch.equal(mask, theirs.attention_mask.bool())
        with torch.no_grad():
            assert torch.equal(tokens, model(theirs.input_ids).last_hidden_state)
            masked = model(theirs.input_ids, attention_mask=theirs.attention_mask).last_hidden_state
        torch.testing.assert_close(tokens[mask], masked[mask])
        assert (encoder.dim, encoder.max_length) == (16, 16)
        assert not tokens.requires_grad

    def test_null_text(self, clip):
        encoder = make_text_encoder(f"clip:{clip}")
        assert torch.equal(encoder.null_ids(), encoder.tokenize([""]))
        assert encoder.encode(encoder.null_ids())[1].sum() == 2, "begin and end"
        assert encoder.tokenize([]).shape == (0, 16)

    def test_as_paris_does(self, clip):
        encoder = CLIPText.open(str(clip), torch.float32, hide_padding=False)
        tokens, mask = encoder.encode(encoder.null_ids())
        assert mask.all()
        hidden = make_text_encoder(f"clip:{clip}")
        assert torch.equal(tokens, hidden.encode(hidden.null_ids())[0])
        assert encoder.describe().fingerprint != hidden.describe().fingerprint

    def test_any_script(self, clip):
        encoder = make_text_encoder(f"clip:{clip}")

        @given(st.text(alphabet=st.characters(), max_size=20))
        def check(caption: str) -> None:
            ids = encoder.tokenize([caption])
            assert ids.shape == (1, 16)
            tokens, mask = encoder.encode(ids)
            assert tokens.isfinite().all()
            assert mask[0, :2].all()

        check()

    @pytest.mark.timeout(60)
    def test_time_does_not_grow_with_a_text(self, clip):
        encoder = make_text_encoder(f"clip:{clip}")
        for part in ("ca", "cat ", "\u0301\u0316", "<|endoftext|>"):
            long = part * (20_000_000 // len(part))
            assert torch.equal(encoder.tokenize([long]), encoder.tokenize([long[: CHARACTERS * encoder.max_length]]))

    def test_special_words_do_not_end_a_text(self, clip):
        encoder = make_text_encoder(f"clip:{clip}")
        ids = encoder.tokenize(["cat <|endoftext|> cat", "cat cat", "\ud83d"])
        assert torch.equal(ids[0], ids[1])

    @pytest.mark.bits
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("hide_padding", [True, False])
    def test_round_trip(self, clip, dtype, hide_padding, tmp_path):
        encoder = CLIPText.open(str(clip), dtype, hide_padding)
        encoder.save(tmp_path)
        again = load_text_encoder(tmp_path)
        ids = encoder.tokenize(CAPTIONS)
        assert torch.equal(again.tokenize(CAPTIONS), ids)
        for ours, theirs in zip(encoder.encode(ids), again.encode(ids), strict=True):
            assert torch.equal(ours, theirs)
        assert encoder.encode(ids)[0].dtype == torch.float32
        here, there = encoder.describe(), again.describe()
        assert {**here.values(), "spec": ""} == {**there.values(), "spec": ""}
        require_same(here, there, "text encoder", Path("here"), "there")

    def test_a_whole_clip_in_one_folder(self, clip, tmp_path):
        """As openai/clip-vit-large-patch14 is published: both towers and the tokenizer's files side by side."""
        from transformers import CLIPConfig, CLIPModel, CLIPTextConfig

        inner = CLIPTextConfig.from_pretrained(clip / "text_encoder").to_dict()
        vision = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        }
        whole = CLIPModel(CLIPConfig(text_config=inner, vision_config=vision)).eval()
        whole.save_pretrained(tmp_path)
        write_tokenizer(tmp_path)
        encoder = make_text_encoder(f"clip:{tmp_path}")
        ids = encoder.tokenize(["a cat"])
        with torch.no_grad():
            expected = whole.text_model(ids.long()).last_hidden_state
        assert torch.equal(encoder.encode(ids)[0], expected)

    def test_names_of_older_transformers(self, broken):
        before = make_text_encoder(f"clip:{broken}").describe().fingerprint
        path = broken / "text_encoder" / "model.safetensors"
        weights = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in load_file(path).items()}
        weights["text_model.embeddings.position_ids"] = torch.arange(16)[None]
        save_file(weights, path, metadata={"format": "pt"})
        assert make_text_encoder(f"clip:{broken}").describe().fingerprint == before

    def refused(self, where: object, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            make_text_encoder(f"clip:{where}")
        assert "\n" not in str(caught.value)

    def test_not_there(self, broken):
        self.refused("nobody/has-this", "there is no folder nobody/has-this, and the hub did not give it either")
        for file in (broken / "tokenizer").iterdir():
            file.unlink()
        self.refused(broken, "has no tokenizer: give a folder with vocab.json and merges.txt or a tokenizer.json")

    def test_damaged_tokenizer(self, broken):
        (broken / "tokenizer" / "vocab.json").write_text('{"a": 0')
        self.refused(broken, "has no tokenizer that can be read")

    def test_another_tokenizer(self, broken):
        path = broken / "tokenizer" / "vocab.json"
        vocabulary = json.loads(path.read_text())
        path.write_text(json.dumps({**vocabulary, "extra": len(vocabulary)}))
        self.refused(broken, "has 517 tokens and its text encoder 516: give a folder in which the two belong together")

    def test_foreign(self, broken):
        path = broken / "text_encoder" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "t5"}))
        self.refused(broken, "holds a 't5': give a model of the kind clip or clip_text_model")

    def test_damaged_weights(self, broken):
        path = broken / "text_encoder" / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in weights if name.endswith("final_layer_norm.bias"))
        save_file({key: value for key, value in weights.items() if key != name}, path, metadata={"format": "pt"})
        self.refused(broken, f"lacks {name}")
        save_file({**weights, "stray": torch.ones(1)}, path, metadata={"format": "pt"})
        self.refused(broken, "has the unknown tensor stray")
        path.write_bytes(path.read_bytes()[:500])
        self.refused(broken, "has no whole CLIPTextModel in safetensors")
        with pytest.raises(InputError, match="is truncated or not a safetensors file"):
            load_text_encoder(broken)

    def test_ids_out_of_range(self, clip):
        encoder = make_text_encoder(f"clip:{clip}")
        with pytest.raises(InputError, match="token ids must be integers .* from 0 to 515"):
            encoder.encode(torch.tensor([[516]]))

    def test_without_transformers(self, clip, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        self.refused(clip, r"this needs transformers: pip install 'atoll\[hf\]'")


@pytest.mark.slow
def test_a_fresh_process_agrees(clip):
    program = (
        "import sys, json, hashlib; from atoll.encoders.text import make_text_encoder\n"
        "for spec in ('words', 'clip:' + sys.argv[1]):\n"
        "    encoder = make_text_encoder(spec)\n"
        "    ids = encoder.tokenize(json.loads(sys.argv[2]))\n"
        "    tokens = hashlib.sha256(encoder.encode(ids)[0].numpy()).hexdigest()\n"
        "    print(json.dumps([ids.tolist(), tokens, encoder.describe().values()]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(clip), json.dumps(CAPTIONS)], capture_output=True, text=True, check=True
    )
    for line, spec in zip(run.stdout.splitlines(), ("words", f"clip:{clip}"), strict=True):
        encoder = make_text_encoder(spec)
        ids = encoder.tokenize(CAPTIONS)
        tokens = hashlib.sha256(encoder.encode(ids)[0].numpy()).hexdigest()  # type: ignore[arg-type]
        assert json.loads(line) == [ids.tolist(), tokens, encoder.describe().values()]
    assert run.stderr == "", "no progress bars, tables or warnings"


# What the words encoder gave when it was first released.
RED, CAT = 156777141, 216389708
TOKENS = "23a2b3482b0fd201"
