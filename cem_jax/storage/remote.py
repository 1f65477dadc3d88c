"""Files at URLs, by fsspec, beside local ones: what corpora and datasets need of a path."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from cem_jax.errors import UserError

_PACKAGES = {"gs": "'cem_jax[cloud]'", "s3": "'cem_jax[cloud]'", "hf": "huggingface_hub"}


@dataclass(frozen=True)
class RemotePath:
    """A file or folder that fsspec reaches; the part of pathlib's interface that is needed."""

    url: str
    system: Any  # an fsspec file system
    inner: str  # the path within it

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.inner).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.inner).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        return PurePosixPath(self.inner).parts

    def open(self, mode: str = "rb") -> BinaryIO:
        return self.system.open(self.inner, mode)

    def size(self) -> int:
        return self.system.size(self.inner) or 0

    def version(self) -> str:
        """Differs when the content does, as far as the store can tell without reading it."""
        return str(self.system.ukey(self.inner))

    def is_dir(self) -> bool:
        return self.system.isdir(self.inner)

    def exists(self) -> bool:
        return self.system.exists(self.inner)

    def at(self, inner: str) -> "RemotePath":
        """Another path of the same file system."""
        protocol = self.url.partition("://")[0]
        return RemotePath(f"{protocol}://{inner}", self.system, inner)

    def __truediv__(self, name: str) -> "RemotePath":
        return self.at(f"{self.inner.rstrip('/')}/{name}")


AnyPath = Path | RemotePath


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a store, such as gs://bucket/corpus."""
    return "://" in os.fspath(path)


def open_url(url: str) -> RemotePath:
    """Reach a URL's store; UserError when fsspec, or its driver for that store, is missing."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        system, inner = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol, f"fsspec and its driver for {protocol}://")
        raise UserError(f"{url}: {error}; pip install {package}") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None
    except Exception as error:  # a driver's own, such as for missing credentials
        raise UserError(f"{url} cannot be reached: {_told(error)}") from None
    return RemotePath(url, system, inner)


def stored_size(path: AnyPath) -> int:
    """Bytes as stored."""
    return path.stat().st_size if isinstance(path, Path) else path.size()


@contextlib.contextmanager
def reading(fault: type[Exception], what: str = "cannot be read") -> Iterator[None]:
    """Turn what reading a file may raise, drivers' own errors included, into `fault`."""
    try:
        yield
    except OSError as error:
        raise fault(f"{what}: {error.strerror or error}") from None
    except (fault, UserError, MemoryError):
        raise
    except Exception as error:
        raise fault(f"{what}: {_told(error)}") from None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
