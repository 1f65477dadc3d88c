"""Paths, local or URLs of a store, and directories that are whole or absent in either.

URLs use universal-pathlib, which has pathlib's interface and supports every scheme that fsspec has
a driver for, as corpora need (http://, hf://, memory:// in tests). Orbax uses etils.epath, which
only knows gs:// and s3://, and is given paths as text.

An object store has no directories, appending or renaming: a "directory" is a common prefix of
names, and renaming one copies each object, during which the process may be killed. So one object,
written last, marks a directory as complete, and another marks it for removal before its parts are
removed.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from upath import UPath

from cem_jax.errors import RunFailed, UserError

AnyPath = Path | UPath  # local | URL
_PACKAGES = {"gs": "'cem_jax[cloud]'", "s3": "'cem_jax[cloud]'", "hf": "huggingface_hub"}
# Faults that the user has to fix, unlike those that may pass, such as a full disk.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST}
_DOOMED = "removed"  # `<name>.removed` marks `name` as being removed, or is its new name


def cache_home() -> Path | None:
    """Return the user's directory of caches; None for a user without a home directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification says to ignore others
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor a passwd entry, as in some containers
        return None


def is_url(path: AnyPath | str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as gs://bucket/corpus."""
    return "://" in str(path)


def any_path(path: AnyPath | str | os.PathLike[str]) -> AnyPath:
    """Return a local path with ~ expanded, or a URL with its driver loaded.

    Raises UserError when fsspec does not know the scheme, or its driver is missing or fails.
    """
    if not is_url(path):
        return Path(os.path.expanduser(path))
    try:
        found = path if isinstance(path, UPath) else UPath(str(path))
        _ = found.fs  # loads the driver
    except ImportError as error:
        kind = str(path).partition("://")[0]
        package = _PACKAGES.get(kind, f"fsspec and its driver for {kind}://")
        raise UserError(f"{path}: {error}; pip install {package}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a driver's own, such as for missing credentials
        raise UserError(f"{path}: cannot be reached: {_reason(error)}") from None
    return found


def place(path: AnyPath | str | os.PathLike[str]) -> AnyPath:
    """Return a run's directory as an absolute local path, or a gs:// or s3:// URL.

    Raises UserError for other URLs, and when the store cannot be reached.
    """
    if not is_url(path):
        return Path(os.path.abspath(any_path(path)))
    kind, _, rest = str(path).partition("://")
    if kind == "file":
        raise UserError(f"{path}: a local directory is named without the prefix: {rest}")
    if kind not in ("gs", "s3"):  # Orbax supports no others
        raise UserError(f"{path}: runs are kept in directories, gs:// and s3://")
    import fsspec

    # fsspec caches listings by default, which hides what TensorStore and other processes write.
    fsspec.config.conf.setdefault({"gs": "gcs"}.get(kind, kind), {})["use_listings_cache"] = False
    os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow is not among our dependencies
    found = any_path(path)
    with reading(UserError, f"{path}: cannot be reached"):
        found.exists()
    return found


@contextlib.contextmanager
def reading(fault: type[Exception], what: str = "cannot be read") -> Iterator[None]:
    """Turn errors of reading a file, including a driver's own, into `fault`."""
    try:
        yield
    except OSError as error:
        raise fault(f"{what}: {error.strerror or error}") from None
    except (fault, UserError, MemoryError):
        raise
    except Exception as error:
        raise fault(f"{what}: {_reason(error)}") from None


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Turn errors of writing `path`, including a driver's own, into one-line messages.

    Raises:
      UserError: it may not be written, or is a directory.
      RunFailed: it cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        kind = UserError if error.errno in _REFUSED else RunFailed
        raise kind(f"{path}: cannot be written: {error.strerror or error}") from None
    except Exception as error:
        if not is_url(path):
            raise
        raise RunFailed(f"{path}: cannot be written: {_reason(error)}") from None


def entries(directory: AnyPath) -> list[AnyPath]:
    """Return the entries of `directory`, sorted by name; none if it does not exist."""
    if not directory.is_dir():
        return []
    return sorted(directory.iterdir(), key=lambda path: path.name)


def remove(path: AnyPath) -> None:
    """Remove a directory; if killed midway, the remains cannot be mistaken for a complete one."""
    doomed = path.parent / f"{path.name.split('.')[0]}.{_DOOMED}"
    if is_url(path):
        doomed.write_text(path.name)
        _clear(path)
        doomed.unlink()
        return
    _clear(doomed)
    path.rename(doomed)
    _clear(doomed)


def doomed(listed: Iterable[AnyPath]) -> set[str]:
    """Return the names that markers among `listed` paths mark as (partly) removed."""
    names = set()
    for path in listed:
        if is_url(path) and path.name.endswith(f".{_DOOMED}"):
            with contextlib.suppress(FileNotFoundError):  # its removal has just finished
                names.add(path.read_text())
    return names


def finish_removal(leftover: AnyPath) -> None:
    """Remove what a killed process left unfinished or partly removed."""
    if is_url(leftover) and leftover.name.endswith(f".{_DOOMED}"):
        _clear(leftover.parent / leftover.read_text())
        leftover.unlink()
    else:
        _clear(leftover)


def set_aside(path: AnyPath, aside: AnyPath, *, last: str) -> None:
    """Rename a complete directory so that at any time it is complete under one of the two names.

    `last`: the file that marks a directory as complete.
    """
    if aside.exists():
        remove(aside)
    if not is_url(path):
        path.rename(aside)
        return
    for name in sorted(files_below(path), key=lambda name: (name == last, name)):
        path.fs.cp_file((path / name).path, (aside / name).path)
    remove(path)


def files_below(directory: AnyPath, prefix: str = "") -> Iterator[str]:
    """Yield the path within `directory` of every file below it."""
    for path in directory.iterdir():
        if path.is_dir():
            yield from files_below(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name


def _clear(directory: AnyPath) -> None:
    if not directory.exists():
        return
    if is_url(directory):
        directory.fs.rm(directory.path, recursive=True)
    else:
        shutil.rmtree(directory)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0]
