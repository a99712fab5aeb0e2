"""What `atoll reproduce` has found, in Markdown: a table per comparison, with the papers' figures beside ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.experiments.comparison import BETTER, better, cell_of, keys_of, name_of, plain, spoken
from atoll.storage import write_whole

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


def write_results(results: Mapping[str, Any], path: Path) -> None:
    content = render_results(results)
    write_whole(path, lambda staged: staged.write_text(content, encoding="utf-8"))


def render_results(results: Mapping[str, Any]) -> str:
    data, plan = results["data"], results["recipe"]["plan"]
    lines = [f"# The papers' comparisons on {plain(data['name'])}", ""]
    lines += [
        f"{data['pictures']:,} pictures; {plan['num_experts']} experts unless a row says otherwise; {plan['num']:,} "
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
        *(f"- `{key}`: {name_of(key)}; {better(key)}." for key in shown_keys(every)),
    ]
    return "\n".join(lines) + "\n"


def _budget(results: Mapping[str, Any]) -> list[str]:
    expert = results["recipe"]["expert"]
    flops = {name: f"{spoken('flops_an_image', value)}FLOPs" for name, value in results["training_flops"].items()}
    return [
        f"Budget: the monolith takes {expert['steps']:,} steps of {expert['batch']} pictures, each expert as many "
        f"steps with its share of the batch; both {flops['monolith']} of training, counted, and the router "
        f"{flops['router']} more.",
    ]


def shown_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the figures that some of the rows have, those that a reader wants to see."""
    order = list(BETTER)
    chosen = [key for key in keys_of({"models": rows}) if key.partition("/")[0] in SHOWN]
    return sorted(chosen, key=lambda key: order.index(key.partition("/")[0]))


def _table(study: Mapping[str, Any]) -> list[str]:
    rows = study["rows"]
    keys = shown_keys(rows)
    papers = [paper for paper in HEADS if any(row.get(paper) for row in rows)]
    heads = [*(f"`{key}`" for key in keys), *(HEADS[paper] for paper in papers)]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        cells = [cell_of(key, row, rows) for key in keys] + [row.get(paper) or "" for paper in papers]
        lines.append(f"| {plain(row['name'])} | " + " | ".join(cells) + " |")
    return lines
