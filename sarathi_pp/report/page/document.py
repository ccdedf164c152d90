"""The frame of a page in one self-contained file: no network, no fonts, no second file.

    render_document --> head     Content-Security-Policy: it forbids the network and every script but page.js
                        body     HTML of the sections
                        data     JSON for the timeline (series.py)
                        script   page.js

The sections escape all text from a run (titles, notes, ids). If some text still held a script, the browser would refuse
it because of the Content-Security-Policy.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape
from importlib.resources import files


def render_document(title: str, sections: Iterable[str], data: object) -> str:
    """Return one HTML document.

    Args:
        title: text of the browser's tab.
        sections: HTML, in the order of the page.
        data: JSON document that page.js reads.
    """
    script = _own("page.js")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}: bubbles</title>\n<style>{_own('page.css')}</style>\n</head>\n<body>\n<main>",
            *sections,
            '<noscript><p class="note">Only the timeline needs JavaScript.</p></noscript>\n</main>',
            f'<script type="application/json" id="page-data">{_json(data)}</script>',
            f"<script>{script}</script>",
            "</body>\n</html>\n",
        )
    )


def section(name: str, heading: str, content: str) -> str:
    """Return a section as HTML, with `name` as its id. Both the heading and the content are HTML."""
    return f'<section id="{name}">\n<h2>{heading}</h2>\n{content}\n</section>'


def table(heads: Iterable[str], *sections: Iterable[Iterable[str]], kind: str = "figures") -> str:
    """Return a table as HTML. It scrolls if the page is too narrow for it.

    Args:
        heads: HTML of the column headings.
        sections: groups of rows. A row is a sequence of cells, which are HTML.
        kind: class of the table in page.css.
    """
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    bodies = (
        "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows) for rows in sections
    )
    parts = f"<thead><tr>{head}</tr></thead>" + "".join(f"<tbody>{body}</tbody>" for body in bodies)
    return f'<div class="scroll"><table class="{kind}">{parts}</table></div>'


def notes(texts: Iterable[object]) -> str:
    """Return warnings as HTML, one per paragraph. The texts are plain text."""
    return "\n".join(f'<p class="note">{escape(str(text))}</p>' for text in texts)


def _own(name: str) -> str:
    return (files("sarathi_pp.report.page") / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"


def _json(data: object) -> str:
    """Return JSON in which no text can end the script element that holds it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
