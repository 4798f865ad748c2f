"""Reports of steps and runs: text, SVG pictures, HTML pages, and files for trace viewers.

Pictures and pages are the Jinja templates in ``templates/``. They escape all values, since names in
a run directory may come from another user. Jinja is imported only to render.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.units import format_bytes, format_time

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Render a picture or page."""
    return _environment().get_template(template).render(values)


def render_page(**values: Any) -> str:
    """Render the page of a run; by the hash in its head, a browser runs only the page's script."""
    program = (_TEMPLATES / "zoom.js").read_text("utf-8")
    digest = b64encode(sha256(program.encode()).digest()).decode()
    return render("page.html.j2", program=program, program_hash=digest, **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def code(text: str) -> Markup:
        """Text in backticks as code."""
        return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))

    def image(svg: str) -> str:
        """An SVG document as the address of an image, in which nothing can run."""
        return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"

    filters = {"time": format_time, "bytes": format_bytes, "code": code, "image": image}
    environment.filters |= filters
    return environment
