"""The page of `atoll federation status --html`: one file without external requests, light and dark."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from atoll.errors import printable
from atoll.federation.status import SlotStatus, Status, describe_slot

STATES = {
    "accepted": "with an expert", "pending": "waiting for verdicts", "training": "in training", "refused": "refused",
    "revoked": "to be verified again", "wanted": "wanting an expert",
}  # fmt: skip
MOST_ROWS = 2000  # per table


def render_page(status: Status) -> str:
    """Returns the page; all text from strangers is escaped."""
    charter, counts = status.charter, status.counts
    total = max(1, len(status.slots))
    steps = sum(int(slot.expert.about.get("steps", 0)) for slot in status.slots if slot.expert is not None)
    people = {str(slot.expert.about.get("author")) for slot in status.slots if slot.expert is not None}
    tiles = [
        (f"{counts['accepted']} of {len(status.slots)}", "slots have an expert"),
        (f"{len(people)}", "people whose experts were accepted"),
        (f"{steps:,}", "steps of training in the model"),
        (f"{status.submissions:,}", "submissions"),
        (f"{status.num_verdicts} of {len(status.verifiers)}", "verifiers must accept an expert"),
    ]
    bar = "".join(
        f'<i class="{state}" style="width:{counts[state] / total:.3%}" title="{counts[state]} {words}"></i>'
        for state, words in STATES.items()
        if counts[state]
    )
    legend = "".join(
        f'<li><span class="dot {state}"></span>{counts[state]} {words}</li>'
        for state, words in STATES.items()
        if counts[state]
    )
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_text(charter.name)}</title>
<style>{style}</style>
</head>
<body><main>
<h1>{_text(charter.name)}</h1>
<p class="lede">{_text(charter.description or "One model, built by people who do not know each other.")}</p>
<div class="figures">{"".join(f"<div><b>{value}</b><span>{words}</span></div>" for value, words in tiles)}</div>
<div class="states" role="img" aria-label="states of slots">{bar}</div>
<ul class="legend">{legend}</ul>
<h2>Slots</h2>
<div class="slots">{"".join(_card(slot, status) for slot in status.slots[:MOST_ROWS])}</div>
{_credits(status)}
{_refusals(status)}
<h2>Trust</h2>
<dl>
<dt>Root</dt><dd><code>{status.fingerprint}</code></dd>
<dt>Founders</dt><dd>{_people(status, status.founders)}</dd>
<dt>Verifiers</dt><dd>{_people(status, status.verifiers)}</dd>
<dt>Signed until</dt><dd>{status.expires:%Y-%m-%d %H:%M} UTC</dd>
<dt>Licences</dt><dd>data: {_text(charter.license)}; experts: {_text(_licenses(status))}</dd>
</dl>
<footer><p><code>{_text(status.url)}</code></p>
<p><code>atoll sample {_text(status.url)} "a prompt"</code></p></footer>
</main></body>
</html>
"""


def _text(value: object) -> str:
    return escape(printable(str(value), 300))


def _card(slot: SlotStatus, status: Status) -> str:
    who, what, license = describe_slot(slot, status.num_verdicts)
    number = slot.slot.number
    name = "" if slot.slot.name == f"cluster {number}" else f" {_text(slot.slot.name)}"
    lines = [f'<h3><span class="dot {slot.state}"></span>{number}{name}</h3>']
    lines.append(f'<p class="state">{_text(who) or STATES[slot.state]}</p>')
    lines.append("" if slot.state == "wanted" else f'<p class="note">{_text(what)}</p>')
    if slot.lease is not None:
        share = min(1.0, slot.lease.step / max(1, slot.lease.steps))
        lines.append(f'<div class="progress"><i style="width:{share:.1%}"></i></div>')
        lines.append(f'<p class="note">last heartbeat {slot.beat:.0f} s ago</p>')
    images = "private images" if slot.slot.is_private else f"{slot.slot.images:,} images"
    lines.append(f'<p class="note">{images}{f" · {_text(license)}" if license else ""}</p>')
    return f'<div class="card">{"".join(lines)}</div>'


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{value}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _credits(status: Status) -> str:
    rows = []
    for slot in status.slots[:MOST_ROWS]:
        if slot.expert is None:
            continue
        about, share = slot.expert.about, status.shares.get(slot.slot.number)
        led = "" if share is None else f'{share:.1%}<span class="bar" style="width:{share:.1%}"></span>'
        rows.append(
            [
                f"{_text(about.get('name'))} <code>{_text(str(about.get('author'))[:8])}</code>",
                slot.slot.number, _text(about.get("objective")), f"{about.get('steps', 0):,}",
                f"{about.get('samples', 0):,}", _flops(about.get("flops")), led, _text(about.get("license")),
            ]
        )  # fmt: skip
    head = ("who", "slot", "objective", "steps", "samples", "FLOPs", "leads", "licence")
    return f"<h2>Credits</h2>{_table(head, rows)}" if rows else ""


def _flops(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, int) and value else ""


def _refusals(status: Status) -> str:
    if not status.refusals:
        return ""
    rows = [
        [f"<code>{verdict.submission[:12]}</code>", verdict.slot, _text(verdict.author.name), _text(verdict.reason)]
        for verdict in status.refusals
    ]
    return f"<h2>Refused</h2>{_table(('submission', 'slot', 'by', 'why'), rows)}"


def _people(status: Status, keys: list[str]) -> str:
    return ", ".join(f"{_text(status.charter.name_of(key))} <code>{key[:8]}</code>" for key in keys)


def _licenses(status: Status) -> str:
    found = {str(slot.expert.about.get("license")) for slot in status.slots if slot.expert is not None}
    return ", ".join(sorted(found)) or "none yet"
