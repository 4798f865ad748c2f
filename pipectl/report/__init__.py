"""Reports of steps and runs: in words, as pictures, as a page of HTML, and for trace viewers.

Pictures and pages are the Jinja templates in ``templates/``, which escape all that they write:
names in a run directory may be those of another user. Jinja is imported only when one is rendered.
"""

from __future__ import annotations

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
    """The text of a picture or page."""
    return _environment().get_template(template).render(values)


def render_page(**values: Any) -> str:
    """The text of the page of a run.

    Its program is the only one that a browser lets run in it, by the hash in the page's head.
    """
    program = (_TEMPLATES / "zoom.js").read_text("utf-8")
    digest = b64encode(sha256(program.encode()).digest()).decode()
    return render("page.html.j2", program=program, program_hash=digest, **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"time": format_time, "bytes": format_bytes}
    return environment
