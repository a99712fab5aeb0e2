"""The published Paris model as one of Atoll's: experts and router converted, codec and text encoder as they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from atoll.convert import convert, save
from atoll.convert.ledger import Options
from atoll.encoders.codecs import load_codec
from atoll.encoders.text import load_text_encoder
from atoll.errors import InputError
from atoll.sampling.assemble import ROUTER, assemble, check_free, expert_folders, inside
from atoll.storage import reason_of, resolved


def assemble_paris(folder: str | Path, out: str | Path, options: Options = Options()) -> Sequence[str]:  # noqa: B008
    """Converts one part after the other and assembles a model of them; returns what to print."""
    folder, out = Path(folder), resolved(out)
    for name in ("expert_0", ROUTER, "vae", "text_encoder", "tokenizer"):
        if not (folder / name).is_dir():
            raise InputError(f"{folder} has no {name}: give a folder with all of Paris, or a part of it --to expert")
    sources = [*expert_folders(folder), inside(folder / ROUTER, folder)]
    check_free(out)
    notes: dict[str, list[str]] = {}  # and of which parts
    codec, text = load_codec(folder), load_text_encoder(folder, hide_padding=False)  # its experts see the padding too
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
            parts = Path(place) / resolved(folder).name
            codec.save(parts)
            text.save(parts)
            space = {"text_encoder": text.describe().values()}
            for path in tqdm(sources, unit=" parts", disable=None, leave=False):
                is_router = path.name == ROUTER
                converted = convert(path, replace(options, objective=None) if is_router else options)
                for note in converted.notes:
                    notes.setdefault(note, []).append(path.name)
                config = converted.network.config
                shape = [config.in_channels, config.input_size, config.input_size]
                latents = {"shape": shape, "codec": codec.describe().values()}
                cluster = None if is_router else int(path.name[7:])
                save(converted, parts / path.name, {**space, "latent_space": latents}, {"cluster": cluster})
            index = assemble([parts], None, out, parts)
    except OSError as error:
        raise InputError(f"cannot write {out} ({reason_of(error)}): free the disk or choose another --out") from error
    kinds = ", ".join(f"{k} {kind}" for k, kind in enumerate(index.objectives))
    return [
        f"{out}: Paris, {index.num_experts} experts ({kinds}), licence {index.license}",
        *(f"note: {note} ({', '.join(names)})" for note, names in notes.items()),
        "what of it could not be verified is listed in docs/convert.md",
        f'next: atoll sample {out} "a prompt" --solver euler --steps 50 --routing topk:2 --guidance 7.5',
    ]
