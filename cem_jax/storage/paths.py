"""Where runs are kept: a local directory, or the URL of an object store (gs://, s3://).

An object store has no directories, no appending and no rename: a "directory" is what begins with
the same name, and renaming one means to copy each object, amid which the process may be killed. So
what is complete is told by one object written last, and what is to go is marked by
one object before its parts go.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator

from etils import epath

from cem_jax.errors import RunFailed, UserError
from cem_jax.storage.remote import is_url

# What the user has to put right, rather than what a later try may find gone, as a full disk.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST}
_DOOMED = "removed"  # `<name>.removed`: the marker of what is being removed, or its new name


def place(path: str | os.PathLike[str]) -> epath.Path:
    """A local path, made absolute, or a URL.

    Raises:
      UserError: the URL's kind is unknown, or the package that reads it is not installed.
    """
    text = os.fspath(path)
    if not is_url(text):
        return epath.Path(os.path.abspath(text))
    kind, _, rest = text.partition("://")
    if kind == "file":
        raise UserError(f"{text}: a local directory is named without the prefix: {rest}")
    import fsspec

    # Listings are remembered by default, and do not see what TensorStore or other processes write.
    fsspec.config.conf.setdefault({"gs": "gcs"}.get(kind, kind), {})["use_listings_cache"] = False
    os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow is not among our dependencies
    try:
        found = epath.Path(text)
        found.exists()
    except ImportError as error:
        raise UserError(f"{text}: {error}; pip install 'cem_jax[cloud]'") from None
    except (NotImplementedError, KeyError):
        raise UserError(f"{text}: runs are kept in directories, gs:// and s3://") from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{text}: cannot be reached: {type(error).__name__}: {reason}") from None
    return found


@contextlib.contextmanager
def writing(path: epath.Path) -> Iterator[None]:
    """Within it, `path` is written: a failure becomes one line that names it.

    Raises:
      UserError: it may not be written, or is a directory.
      RunFailed: it cannot be, for whatever other reason.
    """
    try:
        yield
    except OSError as error:
        kind = UserError if error.errno in _REFUSED else RunFailed
        raise kind(f"{path}: cannot be written: {error.strerror or error}") from None
    except Exception as error:
        if not is_url(path):
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]  # a driver's own error
        raise RunFailed(f"{path}: cannot be written: {type(error).__name__}: {reason}") from None


def write_whole(path: epath.Path, content: bytes) -> None:
    """The file `path`, whole or not at all, even if the machine stops; raises as `writing`."""
    with writing(path):
        if is_url(path):  # an object appears when it is complete
            path.write_bytes(content)
        else:
            _write_whole(path, content)


def _write_whole(path: epath.Path, content: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):  # it is not there, or on a disk that takes nothing
            os.unlink(scratch)


def clear_scratch(*paths: epath.Path) -> None:
    """Remove what `write_whole` left of `paths` when its process was killed; no other may write."""
    for path in paths:
        if not is_url(path):
            for scratch in path.parent.glob(f".{path.name}.*"):
                if scratch.suffix[1:].isdigit():
                    scratch.unlink()


def entries(directory: epath.Path) -> list[epath.Path]:
    """What `directory` holds, by name; nothing if it is not there."""
    if not directory.is_dir():
        return []
    return sorted(directory.iterdir(), key=lambda path: path.name)


def remove(path: epath.Path) -> None:
    """Remove the directory `path`; killed amid it, it is nothing that one could take for whole."""
    doomed = path.parent / f"{path.name.split('.')[0]}.{_DOOMED}"
    if is_url(path):
        doomed.write_text(path.name)
        _clear(path)
        doomed.unlink()
        return
    if doomed.exists():
        doomed.rmtree()
    path.rename(doomed)
    doomed.rmtree()


def doomed(listed: Iterable[epath.Path]) -> set[str]:
    """Names of what is being removed, or was when its process was killed, by `listed` markers."""
    names = set()
    for path in listed:
        if is_url(path) and path.name.endswith(f".{_DOOMED}"):
            with contextlib.suppress(FileNotFoundError):  # removed to its end meanwhile
                names.add(path.read_text())
    return names


def finish_removal(leftover: epath.Path) -> None:
    """Remove what a killed process left: something unfinished, or half removed."""
    if is_url(leftover) and leftover.name.endswith(f".{_DOOMED}"):
        _clear(leftover.parent / leftover.read_text())
        leftover.unlink()
    else:
        leftover.rmtree()


def set_aside(path: epath.Path, aside: epath.Path, *, last: str) -> None:
    """Give the directory `path` another name; at every moment it is complete under one of them.

    last: the file whose presence says that a directory is complete.
    """
    if aside.exists():
        remove(aside)
    if not is_url(path):
        path.rename(aside)
        return
    names = sorted(_names(path, ""), key=lambda name: (name == last, name))
    for name in names:
        (path / name).copy(aside / name)
    remove(path)


def _clear(directory: epath.Path) -> None:
    if directory.exists():
        directory.rmtree()


def _names(directory: epath.Path, prefix: str) -> Iterator[str]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _names(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name
