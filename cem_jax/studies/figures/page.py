"""A report as one HTML file that needs no other: pictures inlined, tables beside them.

It names the files that were written with it, so that a later report knows which are an earlier
one's and not the user's own.
"""

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_WRITTEN = "cem-report-file"

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
        self._parts.append(_list(items))

    def collapsed(self, summary: str, sections: Mapping[str, Iterable[str]]) -> None:
        """Lists under their headings, behind one line that opens them."""
        inner = "".join(f"<h3>{html.escape(name)}</h3>{_list(i)}" for name, i in sections.items())
        summary = html.escape(summary)
        self._parts.append(f"<details><summary>{summary}</summary>{inner}</details>")

    def table(self, lines: Sequence[Mapping[str, str]]) -> None:
        """One row a line; the columns are the first one's names. Nothing for no lines."""
        if not lines:
            return
        head = "".join(f"<th>{html.escape(name)}</th>" for name in lines[0])
        rows = (
            "".join(f"<td>{html.escape(text)}</td>" for text in line.values()) for line in lines
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        self._parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def write(self, file: Path, written: Iterable[str]) -> None:
        """`written`: names of the files of this report, the page too."""
        head = f'<meta charset="utf-8"><title>{html.escape(self._title)}</title>'
        head += "".join(f'<meta name="{_WRITTEN}" content="{html.escape(n)}">' for n in written)
        text = "\n".join(self._parts)
        page = (
            f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><body>{text}</body></html>"
        )
        file.write_text(page, encoding="utf-8")


def is_report(file: Path) -> bool:
    """Whether the page was written by a report."""
    return bool(_names(file))


def written_with(file: Path) -> set[str]:
    """Names of the pictures and tables that were written with the page; none without a page."""
    return {n for n in _names(file) if n.endswith((".png", ".csv")) and Path(n).name == n}


def _names(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    head = text.partition("<style>")[0]
    found = re.findall(f'<meta name="{_WRITTEN}" content="([^"]*)">', head)
    return [html.unescape(name) for name in found]


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
