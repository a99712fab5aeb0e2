"""What `atoll evaluate` has found, as a table and as pictures. Each number is named with what it was measured by."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from atoll.plots.contact_sheet import FAINT, INK, PAPER, colour_of
from atoll.storage import write_whole

EDGE, LINE = 24, "#d5dbe1"
NETWORKS = {
    "simple": "colour and edge features",
    "efficientnet": "EfficientNet-Lite0 features",
    "stlpips-alex": "shift-tolerant LPIPS on AlexNet",
}
LOWER, HIGHER = "lower is better", "higher is better"
BETTER = {
    "frechet": LOWER,
    "frechet_infinity": LOWER,
    "kernel": LOWER,
    "precision": HIGHER,
    "recall": HIGHER,
    "density": HIGHER,
    "coverage": HIGHER,
    "lpips_per_prompt": "higher is more varied",
    "lpips": "higher is more varied",
    "clip_score": HIGHER,
    "prompt_accuracy": HIGHER,
    "label_accuracy": HIGHER,
    "flops_an_image": LOWER,
}
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def name_of(key: str) -> str:
    """What a figure is called: `frechet/simple` is no FID, and says so."""
    metric, _, network = key.partition("/")
    by = _network_of(network)
    infinite = ", extrapolated to pictures without number" if metric == "frechet_infinity" else ""
    if metric in ("frechet", "frechet_infinity"):
        fid = "Inception of 2015-12-05, as pytorch-fid scales" if network == "inception" else f"{by}; not Inception FID"
        return f"Frechet distance ({fid}){infinite}"
    if metric == "kernel":
        kid = "Inception of 2015-12-05" if network == "inception" else f"{by}; not Inception KID"
        return f"Kernel distance ({kid})"
    names = {
        "lpips_per_prompt": f"distance between pictures of one prompt ({by}; not LPIPS itself)",
        "lpips": f"distance between all pictures ({by}; not LPIPS itself)",
        "clip_score": f"CLIP score ({network.partition(':')[2]})",
        "label_accuracy": f"pictures in which a linear classifier sees the prompt's label ({by})",
        "prompt_accuracy": "prompts followed in every attribute",
        "flops_an_image": "FLOPs per image",
    }
    return names.get(metric, f"{metric} ({by})")


def _network_of(spec: str) -> str:
    kind, _, size = spec.partition(":")
    if kind in NETWORKS and size:
        return f"{NETWORKS[kind]} at {size} pixels"
    return NETWORKS.get(spec, f"{spec} features")


def better(key: str) -> str:
    return BETTER[key.partition("/")[0]]


def over_seeds(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The mean of each figure over seeds of training, and the deviation among them."""
    combined: dict[str, dict[str, Any]] = {}
    for key in found[0]:
        values = [float(figures[key]["value"]) for figures in found]
        error = float(np.std(values, ddof=1)) if len(values) > 1 else None
        combined[key] = {"value": float(np.mean(values)), "error": error, "values": values}
    return combined


# --- the table -------------------------------------------------------------------------------------------------------


def write_table(results: Mapping[str, Any], path: Path) -> None:
    content = render_table(results)
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8", errors="backslashreplace"))


def render_table(results: Mapping[str, Any]) -> str:
    """Markdown: a row a figure, a column a model, and below it what one must know to repeat or compare it."""
    models, prompts = results["models"], results["prompts"]
    lines = [f"# Evaluation on {plain(results['data']['name'])}", ""]
    lines += [f"| | | {' | '.join(plain(model['name']) for model in models)} |", "|---|---|" + "---|" * len(models)]
    lines.append(f"| pictures | | {' | '.join(_counted(model) for model in models)} |")
    for key in keys_of(results):
        cells = [cell_of(key, model, models) for model in models]
        lines.append(f"| {name_of(key)} | {better(key)} | {' | '.join(cells)} |")
    lines += [
        "",
        f"After ± is the error: {_errors(results)}. Bold is what is better than all others by more than that.",
        "",
    ]
    lines += [f"- {plain(note)}" for note in results["notes"]]
    lines += [f"- Not measured: {plain(what)}, for {plain(why)}." for what, why in results["left_out"].items()]
    reference = results["reference"]
    lines += [
        f"- Prompts: {prompts['num']} captions of the split `{prompts['split']}`, SHA-256 `{prompts['hash']}`.",
        f"- Reference: {reference['num']} pictures of the training split as the codec gives them back; what the codec "
        "itself loses is not in these numbers.",
        f"- Data: SHA-256 `{results['data']['fingerprint']}`, licence {plain(results['data']['license'])}.",
    ]
    for name, about in results["networks"].items():
        lines.append(f"- {plain(name)}: {about['transform']}; fingerprint `{about['fingerprint']}`.")
    for model in models:
        if "hash" in model:
            told = ", ".join(f"{key} {value}" for key, value in model["sampling"].items() if value is not None)
            lines.append(f"- {plain(model['name'])}: {told}; model `{model['hash']}`.")
    lines += ["", "Compare columns of this table with each other, not with numbers of other networks, data or counts."]
    return "\n".join(lines) + "\n"


def keys_of(results: Mapping[str, Any]) -> list[str]:
    """All figures that any model has, in the order in which metrics are listed."""
    found = dict.fromkeys(key for model in results["models"] for key in model["figures"])
    order = list(BETTER)
    return sorted(found, key=lambda key: order.index(key.partition("/")[0]))


def spoken(key: str, value: float) -> str:
    """A figure with as many digits as it has use for."""
    if key == "flops_an_image":
        power = max(0, min(4, int(math.log10(max(value, 1))) // 3))
        return f"{value / 1000**power:.3g}{['', ' k', ' M', ' G', ' T'][power]}"
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{max(0, min(4, 3 - len(str(int(abs(value))))))}f}" if abs(value) >= 10 else f"{value:.3f}"


def with_error(key: str, figure: Mapping[str, Any]) -> str:
    """A figure and its error, both to the second digit of the error; FLOPs are counted, and have none."""
    value, error = figure["value"], figure["error"]
    if error is None or key == "flops_an_image":
        return spoken(key, value)
    if error <= 1e-9 * abs(value):  # all the same, but for rounding
        return f"{spoken(key, value)} ± 0"
    digits = max(0, min(8, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def cell_of(key: str, model: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> str:
    """A figure with its error, bold if it beats all others."""
    figure = model["figures"].get(key)
    if figure is None:
        return ""
    text = with_error(key, figure)
    rivals = [other for other in models if other is not model and "hash" in other and key in other["figures"]]
    wins = "hash" in model and rivals and all(_beats(key, figure, rival["figures"][key]) for rival in rivals)
    return f"**{text}**" if wins else text


def _beats(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether it is better by more than both errors together; of FLOPs, which are counted, by more than a hundredth."""
    lead = one["value"] - other["value"]
    counted = key == "flops_an_image"
    errors = [figure["value"] / 100 if counted else figure["error"] for figure in (one, other)]
    if None in errors:
        return False
    return (-lead if better(key) == LOWER else lead) > math.hypot(*errors)


def _counted(model: Mapping[str, Any]) -> str:
    return f"{model['num']}" if model["seeds"] == 1 else f"{model['seeds']} x {model['num']}"


def _errors(results: Mapping[str, Any]) -> str:
    """What the errors of the table are told from."""
    found: dict[str, list[str]] = {}
    for key in keys_of(results):
        for model in results["models"]:
            source = model["figures"].get(key, {}).get("error_from")
            metrics = found.setdefault(source, []) if source else []
            if (metric := key.partition("/")[0]) not in metrics:
                metrics.append(metric)
    if not found:
        return "there is none here"
    told = {
        "seeds": "the deviation over seeds",
        "subsets": "the deviation over subsets",
        "leaving out tenths": "a jackknife over tenths of the pictures",
        "the fit of the line": "that of the line's end",
        "prompts": "of the mean over prompts",
        "pictures": "of the mean over pictures",
    }
    return "; ".join(f"{told[source]} ({', '.join(metrics)})" for source, metrics in found.items())


def plain(text: str) -> str:
    """In one cell of a table, whatever a name holds."""
    return "".join(filter(str.isprintable, text)).replace("|", "\\|")


# --- pictures --------------------------------------------------------------------------------------------------------


def draw_samples(rows: Mapping[str, NDArray[np.uint8]], captions: Sequence[str]) -> Image.Image:
    """A row of pictures for each model, a column for each caption, which stands below."""
    num = min(len(captions), *(len(row) for row in rows.values()))
    size = max(row.shape[1] for row in rows.values())
    cell = size * max(1, 96 // size) if size <= 96 else 128
    gap, font, small = 8, ImageFont.load_default(14), ImageFont.load_default(11)
    left = EDGE + max(round(font.getlength(_shown(name))) for name in rows) + 16
    texts = [_lines(caption, cell + gap - 4, small, 6) for caption in captions[:num]]
    foot = 14 * max(map(len, texts)) + EDGE
    sheet = Image.new("RGB", (left + num * (cell + gap) + EDGE, EDGE + len(rows) * (cell + gap) + foot), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, (name, pictures) in enumerate(rows.items()):
        y = EDGE + i * (cell + gap)
        draw.text((left - 16, y + cell // 2), _shown(name), INK, font, anchor="rm")
        for j, picture in enumerate(pictures[:num]):
            grows = cell % picture.shape[0] == 0
            scaling = Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS
            sheet.paste(Image.fromarray(picture).resize((cell, cell), scaling), (left + j * (cell + gap), y))
    for j, lines in enumerate(texts):
        for k, line in enumerate(lines):
            place = (left + j * (cell + gap), EDGE + len(rows) * (cell + gap) + 14 * k)
            draw.text(place, line, FAINT, small)
    return sheet


def draw_metrics(results: Mapping[str, Any], keys: Sequence[str] | None = None) -> Image.Image:
    """A panel of bars for each figure, or for some, the real pictures in grey, with errors as whiskers."""
    keys, models = keys_of(results) if keys is None else keys, results["models"]
    bar, gap, width, columns = 22, 7, 460, min(2, len(keys))
    high = 62 + len(models) * (bar + gap) + 18
    rows = math.ceil(len(keys) / columns)
    sheet = Image.new("RGB", (EDGE + columns * (width + EDGE), EDGE + rows * high), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, key in enumerate(keys):
        left, top = EDGE + i % columns * (width + EDGE), EDGE + i // columns * high
        _draw_bars(draw, key, models, (left, top, left + width, bar, gap))
    return sheet


def _draw_bars(
    draw: ImageDraw.ImageDraw, key: str, models: Sequence[Mapping[str, Any]], box: tuple[int, int, int, int, int]
) -> None:
    left, top, right, bar, gap = box
    head, small = ImageFont.load_default(14), ImageFont.load_default(12)
    lines = _lines(name_of(key), right - left, head, 2)
    for j, line in enumerate(lines):
        draw.text((left, top + 17 * j + 17 * (2 - len(lines))), line, INK, head)
    draw.text((left, top + 37), better(key), FAINT, small)
    names = max(round(small.getlength(_shown(model["name"]))) for model in models)
    zero, room = left + names + 10, right - left - names - 10 - 110
    found = [model["figures"].get(key) for model in models]
    ends = [figure["value"] + (figure["error"] or 0) for figure in found if figure]
    largest = max([*ends, 1e-12])
    y, number = top + 60, 0
    for model, figure in zip(models, found, strict=True):
        middle = y + bar // 2
        draw.text((zero - 8, middle), _shown(model["name"]), INK, small, anchor="rm")
        colour = LINE if "hash" not in model else colour_of(number)
        number += "hash" in model
        if figure:
            end = zero + round(room * max(figure["value"], 0) / largest)
            draw.rectangle((zero, y, max(end, zero + 1), y + bar), colour)
            reach = round(room * (figure["error"] or 0) / largest)
            if reach:
                low, up = max(zero, end - reach), end + reach
                draw.line((low, middle, up, middle), INK)
                for x in (low, up):
                    draw.line((x, middle - 4, x, middle + 4), INK)
            draw.text((end + reach + 8, middle), with_error(key, figure), INK, small, anchor="lm")
        else:
            draw.text((zero, middle), "none", FAINT, small, anchor="lm")
        y += bar + gap


def _shown(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:25]}..."


def _lines(text: str, width: float, font: Font, most: int) -> list[str]:
    """Words in lines that fit; what does not is cut."""
    lines = [""]
    for word in "".join(char if char.isprintable() else " " for char in text).split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} ..."]
    return lines
