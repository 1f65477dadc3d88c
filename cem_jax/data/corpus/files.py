"""Find the files of a corpus, and the split that each one's folder names."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from upath import UPath

from cem_jax.data.corpus.compression import PACKINGS
from cem_jax.data.corpus.workspace import LOCK, PARTIAL
from cem_jax.data.dataset.store import DESCRIPTION, MODEL
from cem_jax.errors import UserError, collecting
from cem_jax.storage.paths import AnyPath, any_path, is_url, reading

_CONTENTS = (".txt", ".jsonl", ".json", ".parquet")
FORMATS = tuple(content + packing for content in _CONTENTS for packing in ("", *PACKINGS))
FORMATS_TOLD = f"{', '.join(_CONTENTS)}, each optionally with {', '.join(PACKINGS)}"
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
    path: AnyPath
    size: int  # bytes as stored
    split: str | None  # train | validation | test, by its folder's name; None: no such name

    def version(self) -> str:
        """Return a text that changes when the file is rewritten."""
        path = self.path
        # stores have their own version keys, which need no reading
        return str(path.fs.ukey(path.path) if is_url(path) else path.stat().st_mtime_ns)


@dataclass(frozen=True)
class FoundFiles:
    files: tuple[SourceFile, ...]
    ignored: tuple[AnyPath, ...]  # found in a folder, but of no known format


def file_format(path: PurePath | AnyPath) -> str | None:
    """Return the entry of FORMATS that a file's name ends in, or None."""
    name = path.name.lower()
    return max((f for f in FORMATS if name.endswith(f)), key=len, default=None)


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> FoundFiles:
    """Find the corpus files under paths, folders, globs and URLs: sorted by path, each once.

    A file found under several names counts once; finding it in several splits is an error.

    Folders are walked; hidden files and other formats are left out. The split is that of the
    nearest folder called train, validation (valid, val, dev) or test, among those from the given
    folder down or, for a file given directly, the two folders above it.

    Raises UserError naming every input that is missing, unreadable, of an unknown format, without
    a usable file, or in two splits.
    """
    found: dict[str, SourceFile] = {}
    ignored: set[AnyPath] = set()
    problems: list[str] = []
    for given in map(os.fspath, inputs):
        others: set[AnyPath] = set()
        before = len(problems)
        usable = 0
        for path, split in _expand(given, problems):
            if file_format(path) is None:
                others.add(path)
                continue
            usable += 1
            if problem := _add(found, path, split):
                problems.append(problem)
        if not usable and len(problems) == before:
            only = f", only {_suffixes(others)}" if others else ""
            problems.append(f"{given}: no usable file{only}; known formats are {FORMATS_TOLD}")
        ignored |= others
    if problems:
        raise UserError(*problems)
    files = sorted(found.values(), key=lambda file: str(file.path))
    return FoundFiles(tuple(files), tuple(sorted(ignored, key=str)))


def _add(found: dict[str, SourceFile], path: AnyPath, split: str | None) -> str | None:
    """Add a file to `found` under its one identity, or return why it cannot be used."""
    if is_url(path):
        identity = os.path.realpath(path.path) if path.protocol == "file" else str(path)
    elif path.exists() and not path.is_file():
        return f"{path} is not a regular file"
    elif not os.access(path, os.R_OK):
        return f"{path} cannot be read"
    else:
        identity = os.path.realpath(path)
    known = found.setdefault(identity, SourceFile(path, path.stat().st_size, split))
    if split and known.split is None:
        found[identity] = replace(known, split=split)
    elif split and split != known.split:
        return f"{path} is the same file as {known.path}: it cannot be in {known.split} and {split}"
    return None


def _expand(given: str, problems: list[str]) -> Iterator[tuple[AnyPath, str | None]]:
    """Yield (file, split) for every file of an input; append errors to `problems`."""
    if is_url(given):
        with collecting(problems), reading(UserError, f"{given} cannot be read"):
            yield from _expand_url(given, problems)
        return
    path = any_path(given)
    given = str(path)
    if path.exists():
        yield from _below(path, problems)
    elif glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True))
        if not matches:
            problems.append(f"{given} matches no file")
        for match in matches:
            yield from _below(Path(match), problems)
    else:
        problems.append(f"{given} does not exist")


def _expand_url(given: str, problems: list[str]) -> Iterator[tuple[UPath, str | None]]:
    path = any_path(given)

    def at(inner: object) -> UPath:
        return UPath(path.fs.unstrip_protocol(str(inner)))

    if path.exists():
        matches = [path]
    elif glob.has_magic(given):
        matches = [at(inner) for inner in sorted(path.fs.glob(path.path))]
        if not matches:
            problems.append(f"{given} matches no file")
    else:
        matches = []
        problems.append(f"{given} does not exist")
    for match in matches:
        if not match.is_dir():
            yield match, _split_of(match.parts[:-1][-2:])
            continue
        above = len(match.parts) - 1
        for inner in sorted(match.fs.find(match.path)):
            inside = at(inner)
            if not any(part.startswith(".") for part in inside.parts[above + 1 :]):
                yield inside, _split_of(inside.parts[above:-1])


def _below(path: Path, problems: list[str]) -> Iterator[tuple[Path, str | None]]:
    if not path.is_dir():
        yield path, _split_of(Path(os.path.abspath(path)).parts[1:-1][-2:])
        return
    own = Path(os.path.abspath(path)).name
    for inside in _walk(path, problems):
        yield inside, _split_of((own, *inside.relative_to(path).parent.parts))


def _walk(folder: Path, problems: list[str]) -> Iterator[Path]:
    """Yield the files below a folder, except hidden ones; follow links, but no folder twice.

    A folder that `cem prepare` made, or is making, is yielded itself: its files are not a corpus.
    """
    entered: set[str] = set()

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename} cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unreadable):
        real = os.path.realpath(parent)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        if is_dataset(parent, names):
            folders.clear()
            yield Path(parent)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def is_dataset(folder: str, names: Sequence[str]) -> bool:
    """Return whether `cem prepare` made a folder with these files, at least in part."""
    return {DESCRIPTION, MODEL} <= set(names) or (folder.endswith(PARTIAL) and LOCK in names)


def _split_of(folders: Sequence[str]) -> str | None:
    """Return the split named by the innermost folder that names one."""
    named = (_SPLIT_FOLDERS.get(folder.lower()) for folder in reversed(folders))
    return next(filter(None, named), None)


def _suffixes(paths: Iterable[AnyPath]) -> str:
    return ", ".join(sorted({path.suffix or path.name for path in paths}))
