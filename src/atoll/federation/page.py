"""The page of `atoll federation status --html`."""

from atoll.federation.status import Status


def render_page(status: Status) -> str:
    return ""
