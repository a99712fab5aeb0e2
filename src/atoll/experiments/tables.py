"""The kinds of figures, and tables of them; each figure's name says what measured it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from atoll.plots.charts import Bar, draw_panels

LOWER, HIGHER, VARIED = "lower is better", "higher is better", "higher is more varied"
FLOPS, TRAINING_FLOPS, PARAMETERS = "flops_an_image", "training_flops", "parameters"
COUNTED = (FLOPS, TRAINING_FLOPS, PARAMETERS)


class Kind(NamedTuple):
    """A kind of figure; its key in results.json is followed by a slash and the feature network, if any."""

    title: str  # {by} is the network
    better: str = HIGHER
    error_from: str = "pictures"  # if there is only one set of images
    in_studies: bool = True  # whether it is in the tables of `atoll reproduce`


_FRECHET, _KERNEL = "Frechet distance ({by}; not Inception FID)", "Kernel distance ({by}; not Inception KID)"
_EXTRAPOLATED = f"{_FRECHET}, extrapolated to images without number"
_ONE_PROMPT = "distance between images of one prompt ({by}; not LPIPS itself)"
_LABELS = "images in which a linear classifier sees the prompt's label ({by})"
KINDS = {
    "frechet": Kind(_FRECHET, LOWER, "leaving out tenths"),
    "frechet_infinity": Kind(_EXTRAPOLATED, LOWER, "the fit of the line", in_studies=False),
    "kernel": Kind(_KERNEL, LOWER, "subsets"),
    "precision": Kind("precision ({by})", in_studies=False),
    "recall": Kind("recall ({by})", in_studies=False),
    "density": Kind("density ({by})", in_studies=False),
    "coverage": Kind("coverage ({by})"),
    "lpips_per_prompt": Kind(_ONE_PROMPT, VARIED, "prompts"),
    "lpips": Kind("distance between all images ({by}; not LPIPS itself)", VARIED),
    "clip_score": Kind("CLIP score ({id})"),
    "clip_spread": Kind("deviation of the CLIP score over images ({id})", VARIED),
    "same_noise": Kind("correlation with the first row's images of the same prompt and noise"),
    "other_noise": Kind("correlation with the first row's images of the same prompt and other noise"),
    "prompt_accuracy": Kind("prompts followed in every attribute"),
    "label_accuracy": Kind(_LABELS),
    FLOPS: Kind("FLOPs per image", LOWER),
    TRAINING_FLOPS: Kind("FLOPs of training, router included, pretraining not", LOWER),
    PARAMETERS: Kind("parameters of an expert", LOWER),
}
SHOWN = tuple(name for name, kind in KINDS.items() if kind.in_studies)
NETWORKS = {
    "simple": "colour and edge features",
    "efficientnet": "EfficientNet-Lite0 features",
    "stlpips-alex": "shift-tolerant LPIPS on AlexNet",
    "lpips-alex": "LPIPS on AlexNet",
    "inception": "Inception of 2015-12-05, as pytorch-fid scales",
}
HEADS = {"hddm": "HDDM, FID", "ddm": "DDM, FID"}

Figures = Mapping[str, Mapping[str, Any]]  # by key: value, error, error_from, and features if a network was used
Model = Mapping[str, Any]  # with "name" and "figures"; real images have no "hash"


# --- figures ---------------------------------------------------------------------------------------------------------


def kind_of(key: str) -> Kind:
    return KINDS[key.partition("/")[0]]


def name_of(key: str) -> str:
    """Returns the title of a figure, such as one for `frechet/simple` that says that it is not FID."""
    network = key.partition("/")[2]
    family, _, detail = network.partition(":")
    by = NETWORKS.get(family, f"{network} features")
    if family in NETWORKS and detail:
        by += f" at {detail} pixels"
    title = kind_of(key).title
    if network == "lpips-alex":
        title = title.replace("; not LPIPS itself", "")
    if network == "inception":
        title = title.replace("; not Inception FID", "").replace("; not Inception KID", "")
    return title.format(by=by, id=detail)


def over_seeds(sets: Sequence[Figures]) -> dict[str, dict[str, Any]]:
    """Returns each figure over seeds: its mean, the standard deviation if there are several seeds, and all values."""
    figures = {}
    for key, first in sets[0].items():
        values = [float(own[key]["value"]) for own in sets]
        error = float(np.std(values, ddof=1)) if len(values) > 1 else None
        about = {"value": float(np.mean(values)), "error": error, "error_from": "seeds", "values": values}
        figures[key] = {**first, **about}
    return figures


def keys_of(models: Sequence[Model], kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """Returns the keys of these kinds that any model has, in the order of `kinds`."""
    keys = dict.fromkeys(key for model in models for key in model["figures"])
    return [key for kind in kinds for key in keys if key.partition("/")[0] == kind]


def format_value(key: str, value: float) -> str:
    """Returns a figure with a sensible number of digits."""
    if key in COUNTED:
        power = max(0, min(6, int(math.log10(max(value, 1))) // 3))
        return f"{value / 1000**power:.3g}{['', ' k', ' M', ' G', ' T', ' P', ' E'][power]}"
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{max(0, min(4, 3 - len(str(int(abs(value))))))}f}" if abs(value) >= 10 else f"{value:.3f}"


def with_error(key: str, figure: Mapping[str, Any]) -> str:
    """Returns a figure and its error, both to two digits of the error; FLOPs and parameters have no error."""
    value, error = figure["value"], figure["error"]
    if error is None or key in COUNTED:
        return format_value(key, value)
    if error <= 1e-9 * abs(value):  # equal but for rounding
        return f"{format_value(key, value)} ± 0"
    digits = max(0, min(8, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def cell_of(key: str, model: Model, models: Sequence[Model]) -> str:
    """Returns a figure with its error, bold if it beats all others."""
    figure = model["figures"].get(key)
    if figure is None:
        return ""
    text = with_error(key, figure)
    rivals = [other for other in models if other is not model and "hash" in other and key in other["figures"]]
    wins = "hash" in model and rivals and all(_beats(key, figure, rival["figures"][key]) for rival in rivals)
    return f"**{text}**" if wins else text


def _beats(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether a figure is better by more than the combined error; for counted ones, by about a hundredth."""
    lead = one["value"] - other["value"]
    errors = [figure["value"] / 100 if key in COUNTED else figure["error"] for figure in (one, other)]
    return None not in errors and (-lead if kind_of(key).better == LOWER else lead) > math.hypot(*errors)


def plain(text: str) -> str:
    """Returns text escaped so that it stays in one cell of a table."""
    return "".join(filter(str.isprintable, text)).replace("|", "\\|")


def draw_metrics(models: Sequence[Model], kinds: Sequence[str] = tuple(KINDS)) -> Image.Image:
    """Draws a panel of bars per figure, with real images in grey and errors as whiskers."""

    def bar(model: Model, key: str) -> Bar:
        name, is_reference, figure = model["name"], "hash" not in model, model["figures"].get(key)
        if figure is None:
            return Bar(name, is_reference)
        return Bar(name, is_reference, figure["value"], figure["error"] or 0.0, with_error(key, figure))

    keys = keys_of(models, kinds)
    return draw_panels([(name_of(key), kind_of(key).better, [bar(model, key) for model in models]) for key in keys])


# --- of `atoll evaluate` ---------------------------------------------------------------------------------------------


def render_table(results: Mapping[str, Any]) -> str:
    """Returns Markdown: a row per figure, a column per model, and below it the details to reproduce or compare them."""
    models, prompts, reference, data = (results[key] for key in ("models", "prompts", "reference", "data"))
    sizes = [f"{model['num']}" if model["seeds"] == 1 else f"{model['seeds']} x {model['num']}" for model in models]
    lines = [
        f"# Evaluation on {plain(data['name'])}",
        "",
        f"| | | {' | '.join(plain(model['name']) for model in models)} |",
        "|---|---|" + "---|" * len(models),
        f"| images | | {' | '.join(sizes)} |",
    ]
    for key in keys_of(models):
        cells = [cell_of(key, model, models) for model in models]
        lines.append(f"| {name_of(key)} | {kind_of(key).better} | {' | '.join(cells)} |")
    lines += [
        "",
        f"After ± is the error, from {_errors(models)}. Bold is what is better than all others by more than that.",
        "",
        *(f"- {plain(note)}" for note in results["notes"]),
        *(f"- Not measured: {plain(what)}, for {plain(why)}." for what, why in results["left_out"].items()),
        f"- Prompts: {prompts['num']} captions of the split `{prompts['split']}`, SHA-256 `{prompts['hash']}`.",
        f"- Reference: {reference['num']} images of the split `{reference['split']}`, {reference['pictures']}"
        + ("; what the codec itself loses is not in these numbers." if "latents" in reference["pictures"] else "."),
        f"- Data: SHA-256 `{data['fingerprint']}`, licence {plain(data['license'])}.",
    ]
    for name, about in results["networks"].items():
        lines.append(f"- {plain(name)}: {about['transform']}; fingerprint `{about['fingerprint']}`.")
    for model in models:
        if "hash" in model:
            sampling = ", ".join(f"{key} {value}" for key, value in model["sampling"].items() if value is not None)
            lines.append(f"- {plain(model['name'])}: {sampling}; model `{model['hash']}`.")
    lines += ["", "Compare columns of this table with each other, not with numbers of other networks, data or counts."]
    return "\n".join(lines) + "\n"


def _errors(models: Sequence[Model]) -> str:
    """Returns what the errors in the table are computed over, with the figures of each kind."""
    kinds: dict[str, dict[str, None]] = {}
    for key in keys_of(models):
        for model in models:
            if source := model["figures"].get(key, {}).get("error_from"):
                kinds.setdefault(source, {})[key.partition("/")[0]] = None
    return "; ".join(f"{source} ({', '.join(own)})" for source, own in kinds.items()) or "nothing"


# --- of `atoll reproduce` --------------------------------------------------------------------------------------------


def render_results(results: Mapping[str, Any]) -> str:
    """Returns Markdown with a table per comparison."""
    data, plan, expert = results["data"], results["recipe"]["plan"], results["recipe"]["expert"]
    reference = results["reference"]
    flops = {name: f"{format_value(FLOPS, value)}FLOPs" for name, value in results["training_flops"].items()}
    lines = [
        f"# The papers' comparisons on {plain(data['name'])}",
        "",
        f"{data['pictures']:,} images; {plan['num_experts']} experts unless a row says otherwise; {plan['num']:,} "
        f"pictures of each model; mean ± deviation over {results['seeds']} seeds of training. Compared with "
        f"{reference['pictures']} of the split {reference['split']}.",
        "",
        f"Budget: the monolith takes {expert['steps']:,} steps of {expert['batch']} images, each expert as many "
        f"steps with its share of the batch; both {flops['monolith']} of training, counted, and the router "
        f"{flops['router']} more.",
        "",
    ]
    for name, study in results["studies"].items():
        lines += [f"## {study['title']}", "", f"*{study['claim']}*", "", *_table(study["rows"]), ""]
        if study["cluster"] is not None:
            lines += [f"Experts, prompts and reference are of cluster {study['cluster']} alone.", ""]
        lines += [f"![the figures of {name}]({name}.png)", "", f"![samples of {name}]({name}_samples.png)", ""]
    rows = [row for study in results["studies"].values() for row in study["rows"]]
    lines += [
        "The papers' figures are Inception FID of large models on other data: compare the order of rows, not numbers. "
        "Bold is better than every other model by more than the root of the sum of both squared deviations.",
        "",
        *(f"- `{key}`: {name_of(key)}; {kind_of(key).better}." for key in keys_of(rows, SHOWN)),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Model]) -> list[str]:
    keys = keys_of(rows, SHOWN)
    papers = [paper for paper in HEADS if any(row.get(paper) for row in rows)]
    heads = [*(f"`{key}`" for key in keys), *(HEADS[paper] for paper in papers)]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        cells = [cell_of(key, row, rows) for key in keys] + [row.get(paper) or "" for paper in papers]
        lines.append(f"| {plain(row['name'])} | " + " | ".join(cells) + " |")
    return lines
