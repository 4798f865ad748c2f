"""What all pictures share: the document, its title, and colours for light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

LINE = 18
"""Pixels from one line of text to the next."""
_STYLE = """\
text { fill: #24292f } .title { font-size: 14px; font-weight: 600 } .faint { fill: #57606a }
.page { fill: #ffffff } .idle { fill: #eaeef2 } .tick { stroke: #d0d7de }
.bar { fill: #1b1f24; text-anchor: middle }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9198a1 } .bar { fill: #0d1117 }
  .page { fill: #0d1117 } .idle { fill: #21262d } .tick { stroke: #3d444d }
}
"""


def document(
    title: str, notes: Iterable[str], body: Iterable[str], size: tuple[int, int], style: str
) -> str:
    """A self-contained SVG document, light or dark as the reader's screen is.

    Args:
        title: shown at the top and as the picture's text alternative.
        notes: lines below the title.
        body: elements; they begin below the last note.
        size: width and height in pixels.
        style: of the classes that the body has beside those of all pictures.
    """
    width, height = size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}{style}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        text(8, 20, title, "title"),
        *(text(8, 20 + LINE * row, note, "faint") for row, note in enumerate(notes, 1)),
        *body,
    ]
    return "\n".join(lines) + "\n</svg>\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    """A line of text.

    Args:
        kind: ``title``, ``faint`` or ``bar``.
        anchor: ``middle`` or ``end`` if that is at ``x``, and not the start.
    """
    attributes = (f' class="{kind}"' if kind else "") + (
        f' text-anchor="{anchor}"' if anchor else ""
    )
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>'


def tick(x1: float, y1: float, x2: float, y2: float) -> str:
    """A thin line of a scale."""
    return f'<line class="tick" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
