"""A report as one HTML file that needs no other, and copies of its pictures and tables beside it.

The page names the files that were written with it, so that a later report can tell the files of an
earlier report from the user's own.
"""

import base64
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cem_jax.errors import UserError

_PAGE = "index.html"
_WRITTEN = "cem-report-file"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100% }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 2rem }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left }
"""


class Page:
    """A page and the files beside it in `folder`, which is created. The page is written last."""

    def __init__(self, folder: Path, title: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._title = folder, title
        self._files: list[Path] = []
        self._parts = [f"<h1>{html.escape(title)}</h1>"]

    def file(self, name: str) -> Path:
        """Return the path of a file that belongs to the report, for the caller to write."""
        self._files.append(self._folder / name)
        return self._files[-1]

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def picture(self, name: str, words: str, draw: Callable[[Path], None]) -> None:
        """Inline the PNG that `draw` writes beside the page; `words` describe it."""
        file = self.file(name)
        draw(file)
        data = base64.b64encode(file.read_bytes()).decode()
        alternative = html.escape(words, quote=True)
        self._parts.append(f'<img alt="{alternative}" src="data:image/png;base64,{data}">')

    def bullets(self, items: Iterable[str]) -> None:
        self._parts.append(_list(items))

    def collapsed(self, summary: str, sections: Mapping[str, Iterable[str]]) -> None:
        """Put lists with headings behind one line that opens them."""
        inner = "".join(f"<h3>{html.escape(name)}</h3>{_list(i)}" for name, i in sections.items())
        summary = html.escape(summary)
        self._parts.append(f"<details><summary>{summary}</summary>{inner}</details>")

    def table(self, lines: Sequence[Mapping[str, str]]) -> None:
        """Write one row per line, with the first line's keys as columns; nothing without lines."""
        if not lines:
            return
        head = "".join(f"<th>{html.escape(name)}</th>" for name in lines[0])
        rows = (
            "".join(f"<td>{html.escape(text)}</td>" for text in line.values()) for line in lines
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        self._parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def write(self) -> list[Path]:
        """Write the page and remove files of an earlier one; return all paths, the page last."""
        page = self.file(_PAGE)
        earlier, names = _written_with(page), {file.name for file in self._files}
        head = f'<meta charset="utf-8"><title>{html.escape(self._title)}</title>'
        head += "".join(
            f'<meta name="{_WRITTEN}" content="{html.escape(name)}">' for name in sorted(names)
        )
        text = "\n".join(self._parts)
        page.write_text(
            f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><body>{text}</body></html>",
            encoding="utf-8",
        )
        for name in earlier - names:
            (self._folder / name).unlink(missing_ok=True)
        return self._files


def require_own(folder: Path) -> None:
    """Raise UserError where `folder` has a page that no report wrote, or a link in its place."""
    page = folder / _PAGE
    if page.is_symlink() or (page.is_file() and not _names(page)):
        raise UserError(
            f"--output {folder}: {page.name} in it was not written by `cem report`; name another "
            "directory, or remove it"
        )


def _written_with(file: Path) -> set[str]:
    """Return the names of pictures and tables written with the page; none without a page."""
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
