"""What the pages about several runs share: rendering with the style and the script inlined, and links between files.

    html = render_page("index.html", context)

The script is allowed by its hash alone; data for it is JSON in which no tag can end.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from .build import make_environment
from .text import visible

SCRIPT = "many.js"


def render_page(name: str, context: dict[str, Any]) -> str:
    """A template with `script`, `script_hash` (for the policy) and the page's own context."""
    environment = make_environment(True, visible)
    environment.filters.update({"embedded": embedded, "when": when})
    source, _, _ = environment.loader.get_source(environment, SCRIPT)  # type: ignore[union-attr]
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return environment.get_template(name).render(script=Markup(source), script_hash=f"sha256-{digest}", **context)


def embedded(value: Any) -> Markup:
    """JSON for a <script type="application/json">: no < within, so that nothing ends the element early."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def when(started: str) -> str:
    """A manifest's ISO time as it is read: 2026-10-01 12:00 UTC."""
    text = started.replace("T", " ", 1)
    return f"{text.removesuffix('+00:00')[:16]} UTC" if text.endswith("+00:00") else text


def relative_link(target: Path, page: Path) -> str:
    """A relative URL from the page's folder to a file."""
    return quote(os.path.relpath(target.resolve(), page.resolve().parent).replace(os.sep, "/"))
