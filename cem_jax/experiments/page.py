"""A report as one HTML file that needs no other: pictures inlined, tables beside them."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100% }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 2rem }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left }
"""


class Page:
    """Sections of a page, written at the end."""

    def __init__(self, title: str):
        self._title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def picture(self, file: Path, words: str) -> None:
        """A PNG, inlined; `words` for those who cannot see it."""
        data = base64.b64encode(file.read_bytes()).decode()
        alternative = html.escape(words, quote=True)
        self._parts.append(f'<img alt="{alternative}" src="data:image/png;base64,{data}">')

    def list(self, items: Iterable[str]) -> None:
        self._parts.append("<ul>" + "".join(f"<li>{html.escape(i)}</li>" for i in items) + "</ul>")

    def table(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """One row a line; the columns are the first one's names. Nothing for no lines."""
        if not lines:
            return
        head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in lines[0])
        rows = (
            "".join(f"<td>{html.escape(shown(value))}</td>" for value in line.values())
            for line in lines
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        self._parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def write(self, file: Path) -> None:
        head = f'<meta charset="utf-8"><title>{html.escape(self._title)}</title>'
        text = "\n".join(self._parts)
        page = (
            f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><body>{text}</body></html>"
        )
        file.write_text(page, encoding="utf-8")


def shown(value: Any) -> str:
    """A number in few digits; an absent one as a dash."""
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3g}"
    return str(value)
