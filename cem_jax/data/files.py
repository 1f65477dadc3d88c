"""Which files a corpus consists of, and the split that each one's folder names."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cem_jax.errors import UserError

_TEXT_FORMATS = (".txt", ".jsonl", ".json")
FORMATS = (*(f + packing for f in _TEXT_FORMATS for packing in ("", ".gz", ".zst")), ".parquet")
_SPLIT_FOLDERS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    size: int  # bytes on disk
    split: str | None  # train | validation | test by its folder's name; None: not named


@dataclass(frozen=True)
class FoundFiles:
    files: tuple[SourceFile, ...]
    ignored: tuple[Path, ...]  # found in a folder, but of no known format


def file_format(path: Path) -> str | None:
    """The entry of FORMATS that a file's name ends in; None for other names."""
    name = path.name.lower()
    return max((f for f in FORMATS if name.endswith(f)), key=len, default=None)


def find_files(inputs: Sequence[str]) -> FoundFiles:
    """The corpus files under paths, folders and globs: sorted by path, each once.

    A folder is walked (hidden files and files of other formats left out). The split is the
    nearest folder called train, validation (valid, val, dev) or test: looked for from the
    given folder down, or, for a file named directly, in the two folders above it.

    Raises UserError naming every input that is missing, unreadable, of an unknown format or
    without a usable file.
    """
    found: dict[Path, SourceFile] = {}
    ignored: set[Path] = set()
    problems: list[str] = []
    for given in inputs:
        usable = 0
        others: set[Path] = set()
        for root, path in _expand(given, problems):
            if file_format(path) is None:
                others.add(path)
                if root == path:
                    problems.append(f"{path}: unknown format; known are {', '.join(FORMATS)}")
                continue
            usable += 1
            if not os.access(path, os.R_OK):
                problems.append(f"{path} cannot be read: permission denied")
            else:
                file = SourceFile(path, path.stat().st_size, _split_of(root, path))
                found.setdefault(path.resolve(), file)
        if not usable and Path(given).is_dir():
            holds = f"only {_suffixes(others)} files" if others else "nothing"
            problems.append(f"{given} holds {holds}; known formats are {', '.join(FORMATS)}")
        ignored |= others
    if problems:
        raise UserError(*problems)
    files = sorted(found.values(), key=lambda file: str(file.path))
    return FoundFiles(tuple(files), tuple(sorted(ignored)))


def _expand(given: str, problems: list[str]) -> Iterator[tuple[Path, Path]]:
    """(the folder or file given, a file in it) pairs; adds what is wrong to `problems`."""
    path = Path(given)
    if path.is_dir():
        yield from ((path, inside) for inside in _walk(path))
    elif path.exists():
        yield path, path
    elif glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True))
        if not matches:
            problems.append(f"{given} matches no file")
        for match in map(Path, matches):
            if match.is_dir():
                yield from ((match, inside) for inside in _walk(match))
            elif file_format(match) is not None or len(matches) == 1:
                yield match, match
    else:
        problems.append(f"{given} does not exist")


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _split_of(root: Path, path: Path) -> str | None:
    if root == path:
        folders = Path(os.path.abspath(path)).parent.parts[1:][-2:]
    else:
        folders = (Path(os.path.abspath(root)).name, *path.relative_to(root).parent.parts)
    for folder in reversed(folders):
        if folder.lower() in _SPLIT_FOLDERS:
            return _SPLIT_FOLDERS[folder.lower()]
    return None


def _suffixes(paths: Iterable[Path]) -> str:
    return ", ".join(sorted({path.suffix or path.name for path in paths}))
