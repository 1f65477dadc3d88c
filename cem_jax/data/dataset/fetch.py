"""Datasets at URLs: fetched once into a local cache, checked, and used from there."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from upath import UPath

from cem_jax.data.dataset.store import DESCRIPTION, MODEL, inside
from cem_jax.errors import UserError
from cem_jax.storage.durable import lock, write_durably
from cem_jax.storage.paths import any_path, cache_home, reading
from cem_jax.text import Pace, ProgressLine, format_duration

_COPY_BYTES = 8 << 20
_TELL_SECONDS = 15.0


def fetched(url: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the local copy of the dataset at `url`, fetching it if necessary.

    Copies are in `cache` (default ~/.cache/cem_jax/datasets) and are reused while the remote
    dataset.json is the same. Every file's checksum is checked as it arrives; an interrupted fetch
    continues with the missing files. Processes that share the cache fetch once. Raises UserError
    when the dataset does not exist, cannot be read, contradicts its description, or does not fit
    on the disk.
    """
    url = url.rstrip("/")
    remote = any_path(url)
    described = _read(remote / DESCRIPTION, url)
    files = dict(_files(described, url))
    key = hashlib.sha256(f"{url}\0".encode() + described).hexdigest()[:16]
    home = any_path(cache) if cache else _default_cache()
    local = home / f"{remote.name or 'dataset'}-{key}"
    if (local / DESCRIPTION).is_file():
        return local
    try:
        home.mkdir(parents=True, exist_ok=True)
        with lock(home / f".{local.name}.lock"):  # another process may be fetching: wait for it
            if not (local / DESCRIPTION).is_file():
                _fetch(remote, files, described, local)
    except OSError as error:
        raise UserError(f"{url} cannot be stored in {home}: {error.strerror or error}") from None
    return local


def _default_cache() -> Path:
    home = cache_home()
    if home is None:
        raise UserError("no home directory to keep datasets of URLs in: set XDG_CACHE_HOME")
    return home / "cem_jax" / "datasets"


def _read(path: UPath, url: str) -> bytes:
    with reading(UserError, f"dataset {url}: its {path.name} cannot be read"):
        return path.read_bytes()


def _files(described: bytes, url: str) -> Iterator[tuple[str, str]]:
    """Yield (name, checksum) of every file that a description names."""
    try:
        description = json.loads(described)
        yield MODEL, description["tokenizer"]["hash"]
        for split in description["splits"].values():
            for shard in split["shards"]:
                yield inside(shard["file"]), shard["checksum"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"dataset {url}: its {DESCRIPTION} is damaged ({type(error).__name__}: {error})"
        ) from None


def _fetch(remote: UPath, files: dict[str, str], described: bytes, local: Path) -> None:
    partial = local.with_name(local.name + ".partial")
    partial.mkdir(exist_ok=True)
    print(f"cem: fetching {remote} into {local}", file=sys.stderr)
    line, pace = ProgressLine(sys.stderr, every=_TELL_SECONDS), Pace(len(files))
    for number, (name, checksum) in enumerate(files.items(), start=1):
        target = partial / name
        if not target.exists():
            _fetch_file(remote / name, target, checksum)
        left = pace.seconds_left(number)
        if line.is_due():
            done = f"cem: fetched {number} of {len(files)} files"
            line.show(done, f"ETA {format_duration(left)}")
    line.finish()
    write_durably(partial / DESCRIPTION, described)
    partial.rename(local)


def _fetch_file(remote: UPath, target: Path, checksum: str) -> None:
    target.parent.mkdir(exist_ok=True)
    write_durably(target, _checked(remote, checksum))


def _checked(remote: UPath, checksum: str) -> Iterator[bytes]:
    """Yield the content; raise UserError at its end if its checksum is not the described one."""
    digest = hashlib.sha256()
    with reading(UserError, f"{remote} cannot be read"):
        source = remote.open("rb")
    with source:
        while chunk := _next(source, remote):
            digest.update(chunk)
            yield chunk
    if f"sha256:{digest.hexdigest()}" != checksum:
        raise UserError(
            f"{remote} is not the file that its {DESCRIPTION} describes: checksums differ"
        )


def _next(source: BinaryIO, remote: UPath) -> bytes:
    with reading(UserError, f"{remote} cannot be read"):
        return source.read(_COPY_BYTES)
