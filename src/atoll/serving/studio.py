"""The studio: one page built from three files, with a policy that allows requests only to this server."""

import base64
import hashlib
from importlib.resources import files


def page() -> tuple[str, str]:
    """Returns the page and its content security policy, which allows only its own script and style."""
    folder = files("atoll.serving") / "page"
    html, css, js = (folder.joinpath(f"studio.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (css, js)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.replace("/*STYLE*/", css).replace("/*SCRIPT*/", js), policy
