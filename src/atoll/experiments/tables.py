"""What `atoll evaluate` and `atoll reproduce` have found, as tables; each number is named with what measured it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from atoll.plots.charts import Bar, draw_panels

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


def name_of(key: str) -> str:
    """What a figure is called: `frechet/simple` is no FID, and says so."""
    metric, _, network = key.partition("/")
    by = _network_of(network)
    infinite = ", extrapolated to images without number" if metric == "frechet_infinity" else ""
    if metric in ("frechet", "frechet_infinity"):
        fid = "Inception of 2015-12-05, as pytorch-fid scales" if network == "inception" else f"{by}; not Inception FID"
        return f"Frechet distance ({fid}){infinite}"
    if metric == "kernel":
        kid = "Inception of 2015-12-05" if network == "inception" else f"{by}; not Inception KID"
        return f"Kernel distance ({kid})"
    names = {
        "lpips_per_prompt": f"distance between images of one prompt ({by}; not LPIPS itself)",
        "lpips": f"distance between all images ({by}; not LPIPS itself)",
        "clip_score": f"CLIP score ({network.partition(':')[2]})",
        "label_accuracy": f"images in which a linear classifier sees the prompt's label ({by})",
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


def mean_over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean of a figure over seeds, and the deviation among them where there are several."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def over_seeds(sets: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns each figure over seeds of training: its mean, the deviation and all values."""
    values = {key: [float(figures[key]["value"]) for figures in sets] for key in sets[0]}
    return {
        key: dict(zip(("value", "error"), mean_over_seeds(own), strict=True), values=own) for key, own in values.items()
    }


# --- of `atoll evaluate` ---------------------------------------------------------------------------------------------


def render_table(results: Mapping[str, Any]) -> str:
    """Markdown: a row a figure, a column a model, and below it what one must know to repeat or compare it."""
    models, prompts = results["models"], results["prompts"]
    lines = [f"# Evaluation on {plain(results['data']['name'])}", ""]
    lines += [f"| | | {' | '.join(plain(model['name']) for model in models)} |", "|---|---|" + "---|" * len(models)]
    lines.append(f"| images | | {' | '.join(_counted(model) for model in models)} |")
    for key in keys_of(results["models"]):
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
        f"- Reference: {reference['num']} images of the training split as the codec gives them back; what the codec "
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


def keys_of(models: Sequence[Mapping[str, Any]], metrics: Sequence[str] = tuple(BETTER)) -> list[str]:
    """Returns all figures of these metrics that any model has, in the order in which metrics are listed."""
    order = list(BETTER)
    keys = dict.fromkeys(key for model in models for key in model["figures"] if key.partition("/")[0] in metrics)
    return sorted(keys, key=lambda key: order.index(key.partition("/")[0]))


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
    for key in keys_of(results["models"]):
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
        "leaving out tenths": "a jackknife over tenths of the images",
        "the fit of the line": "that of the line's end",
        "prompts": "of the mean over prompts",
        "pictures": "of the mean over images",
    }
    return "; ".join(f"{told[source]} ({', '.join(metrics)})" for source, metrics in found.items())


def plain(text: str) -> str:
    """In one cell of a table, whatever a name holds."""
    return "".join(filter(str.isprintable, text)).replace("|", "\\|")


def draw_metrics(models: Sequence[Mapping[str, Any]], metrics: Sequence[str] = tuple(BETTER)) -> Image.Image:
    """Draws a panel of bars per figure, the real images in grey, with errors as whiskers."""
    panels = []
    for key in keys_of(models, metrics):
        bars = []
        for model in models:
            bar = Bar(model["name"], is_reference="hash" not in model)
            if figure := model["figures"].get(key):
                text = with_error(key, figure)
                bar = bar._replace(value=figure["value"], error=figure["error"] or 0.0, text=text)
            bars.append(bar)
        panels.append((name_of(key), better(key), bars))
    return draw_panels(panels)


# --- of `atoll reproduce` --------------------------------------------------------------------------------------------

SHOWN = (
    "frechet",
    "kernel",
    "coverage",
    "lpips_per_prompt",
    "clip_score",
    "prompt_accuracy",
    "label_accuracy",
    "flops_an_image",
)
HEADS = {"hddm": "HDDM, FID", "ddm": "DDM, FID"}


def render_results(results: Mapping[str, Any]) -> str:
    data, plan = results["data"], results["recipe"]["plan"]
    lines = [f"# The papers' comparisons on {plain(data['name'])}", ""]
    lines += [
        f"{data['pictures']:,} images; {plan['num_experts']} experts unless a row says otherwise; {plan['num']:,} "
        f"pictures of each model; mean ± deviation over {results['seeds']} seeds of training.",
        "",
        *_budget(results),
        "",
    ]
    every = [row for study in results["studies"].values() for row in study["rows"]]
    for name, study in results["studies"].items():
        lines += [f"## {study['title']}", "", f"*{study['claim']}*", "", *_table(study), ""]
        if study["cluster"] is not None:
            lines += [f"Experts, prompts and reference are of cluster {study['cluster']} alone.", ""]
        lines += [f"![the figures of {name}]({name}.png)", "", f"![samples of {name}]({name}_samples.png)", ""]
    lines += [
        "The papers' figures are Inception FID of large models on other data: compare the order of rows, not numbers. "
        "Bold is better than every other model by more than the root of the sum of both squared deviations.",
        "",
        *(f"- `{key}`: {name_of(key)}; {better(key)}." for key in keys_of(every, SHOWN)),
    ]
    return "\n".join(lines) + "\n"


def _budget(results: Mapping[str, Any]) -> list[str]:
    expert = results["recipe"]["expert"]
    flops = {name: f"{spoken('flops_an_image', value)}FLOPs" for name, value in results["training_flops"].items()}
    return [
        f"Budget: the monolith takes {expert['steps']:,} steps of {expert['batch']} images, each expert as many "
        f"steps with its share of the batch; both {flops['monolith']} of training, counted, and the router "
        f"{flops['router']} more.",
    ]


def _table(study: Mapping[str, Any]) -> list[str]:
    rows = study["rows"]
    keys = keys_of(rows, SHOWN)
    papers = [paper for paper in HEADS if any(row.get(paper) for row in rows)]
    heads = [*(f"`{key}`" for key in keys), *(HEADS[paper] for paper in papers)]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        cells = [cell_of(key, row, rows) for key in keys] + [row.get(paper) or "" for paper in papers]
        lines.append(f"| {plain(row['name'])} | " + " | ".join(cells) + " |")
    return lines
