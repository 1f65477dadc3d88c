"""Which files a corpus consists of, and the split that each one's folder names."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from upath import UPath

from cem_jax.data.corpus.compression import PACKINGS
from cem_jax.data.corpus.workspace import LOCK, PARTIAL
from cem_jax.data.dataset.store import DESCRIPTION, MODEL
from cem_jax.errors import UserError
from cem_jax.storage.paths import AnyPath, any_path, is_url, reading

_CONTENTS = (".txt", ".jsonl", ".json", ".parquet")
FORMATS = tuple(content + packing for content in _CONTENTS for packing in ("", *PACKINGS))
FORMATS_TOLD = f"{', '.join(_CONTENTS)}, each also {', '.join(PACKINGS)}"
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
    split: str | None  # train | validation | test by its folder's name; None: not named

    def version(self) -> str:
        """Differs when the file was written again."""
        path = self.path
        # a store tells by its own means, without reading
        return str(path.fs.ukey(path.path) if is_url(path) else path.stat().st_mtime_ns)


@dataclass(frozen=True)
class FoundFiles:
    files: tuple[SourceFile, ...]
    ignored: tuple[AnyPath, ...]  # found in a folder, but of no known format


def file_format(path: PurePath | AnyPath) -> str | None:
    """The entry of FORMATS that a file's name ends in; None for other names."""
    name = path.name.lower()
    return max((f for f in FORMATS if name.endswith(f)), key=len, default=None)


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> FoundFiles:
    """The corpus files under paths, folders, globs and URLs of them: sorted by path, each once.

    One file under several names is one file; under names of several splits it is a mistake.

    A folder is walked (hidden files and files of other formats left out). The split is the
    nearest folder called train, validation (valid, val, dev) or test: looked for from the
    given folder down, or, for a file named directly, in the two folders above it.

    Raises UserError naming every input that is missing, unreadable, of an unknown format,
    without a usable file or in two splits.
    """
    found: dict[str, SourceFile] = {}
    ignored: set[AnyPath] = set()
    problems: list[str] = []
    for given in map(os.fspath, inputs):
        others: set[AnyPath] = set()
        told = len(problems)
        usable = 0
        for path, split in _expand(given, problems):
            if file_format(path) is None:
                others.add(path)
                continue
            usable += 1
            if problem := _add(found, path, split):
                problems.append(problem)
        if not usable and len(problems) == told:
            holds = f"only {_suffixes(others)} files" if others else "nothing"
            problems.append(f"{given} gives {holds}; known formats are {FORMATS_TOLD}")
        ignored |= others
    if problems:
        raise UserError(*problems)
    files = sorted(found.values(), key=lambda file: str(file.path))
    return FoundFiles(tuple(files), tuple(sorted(ignored, key=str)))


def _add(found: dict[str, SourceFile], path: AnyPath, split: str | None) -> str | None:
    """Put a file into `found`, by what it is under all its names; or say why it cannot be used."""
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
        return f"{path} is the file {known.path} too: it cannot go to {known.split} and to {split}"
    return None


def _expand(given: str, problems: list[str]) -> Iterator[tuple[AnyPath, str | None]]:
    """(file, split) for everything an input stands for; adds what is wrong to `problems`."""
    if is_url(given):
        try:
            with reading(UserError, f"{given} cannot be read"):
                yield from _expand_url(given, problems)
        except UserError as error:
            problems += error.messages
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
    at = lambda inner: UPath(path.fs.unstrip_protocol(str(inner)))
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
    """Files below a folder, hidden ones apart; links are followed, each folder is entered once.

    A folder that `cem prepare` made, or is making, comes as itself, for what is in it is no corpus.
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
    """Whether a folder with files of these names was made by `cem prepare`, if only in part."""
    return {DESCRIPTION, MODEL} <= set(names) or (folder.endswith(PARTIAL) and LOCK in names)


def _split_of(folders: Sequence[str]) -> str | None:
    """The split that the innermost telling folder names."""
    named = (_SPLIT_FOLDERS.get(folder.lower()) for folder in reversed(folders))
    return next(filter(None, named), None)


def _suffixes(paths: Iterable[AnyPath]) -> str:
    return ", ".join(sorted({path.suffix or path.name for path in paths}))
