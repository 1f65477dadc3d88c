"""Datasets at URLs: fetched once into a local cache, checked, and used from there."""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from cem_jax.data.dataset.store import DESCRIPTION, MODEL, inside
from cem_jax.errors import UserError
from cem_jax.storage.durable import write_durably
from cem_jax.storage.remote import RemotePath, open_url, reading

_COPY_BYTES = 8 << 20
_TELL_SECONDS = 15.0


def fetched(url: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """The local copy of the dataset at `url`, below `cache` (default ~/.cache/cem_jax/datasets).

    What is there already is used if the store's dataset.json is the same. Every file's checksum is
    compared as it arrives; a broken-off fetch goes on with the files that are missing. Processes
    that share the cache fetch once. Raises UserError when the dataset is not there, cannot be
    read, is not what its description says, or does not fit the disk.
    """
    url = url.rstrip("/")
    remote = open_url(url)
    described = _read(remote / DESCRIPTION, url)
    files = dict(_files(described, url))
    key = hashlib.sha256(f"{url}\0".encode() + described).hexdigest()[:16]
    home = Path(cache).expanduser() if cache else _default_cache()
    local = home / f"{PurePosixPath(remote.inner).name or 'dataset'}-{key}"
    if (local / DESCRIPTION).is_file():
        return local
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / f".{local.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be fetching: wait for it
            if not (local / DESCRIPTION).is_file():
                _fetch(remote, files, described, local)
    except OSError as error:
        raise UserError(f"{url} cannot be kept in {home}: {error.strerror or error}") from None
    return local


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "cem_jax" / "datasets"


def _read(path: RemotePath, url: str) -> bytes:
    with reading(UserError, f"dataset {url}: its {path.name} cannot be read"), path.open() as file:
        return file.read()


def _files(described: bytes, url: str) -> Iterator[tuple[str, str]]:
    """(name, checksum) of everything that a description names."""
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


def _fetch(remote: RemotePath, files: dict[str, str], described: bytes, local: Path) -> None:
    partial = local.with_name(local.name + ".partial")
    partial.mkdir(exist_ok=True)
    told = time.monotonic()
    print(f"cem: fetching {remote} into {local}", file=sys.stderr)
    for number, (name, checksum) in enumerate(files.items(), start=1):
        target = partial / name
        if not target.exists():
            _fetch_file(remote / name, target, checksum)
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            print(f"cem: fetched {number} of {len(files)} files", file=sys.stderr)
    write_durably(partial / DESCRIPTION, described)
    partial.rename(local)


def _fetch_file(remote: RemotePath, target: Path, checksum: str) -> None:
    target.parent.mkdir(exist_ok=True)
    scratch = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    with scratch.open("wb") as out:
        with reading(UserError, f"{remote} cannot be read"):
            source = remote.open()
        with source:
            while chunk := _next(source, remote):
                digest.update(chunk)
                out.write(chunk)
    if f"sha256:{digest.hexdigest()}" != checksum:
        scratch.unlink()
        raise UserError(f"{remote} is not the file that its {DESCRIPTION} describes: its checksum")
    scratch.rename(target)


def _next(source, remote: RemotePath) -> bytes:
    with reading(UserError, f"{remote} cannot be read"):
        return source.read(_COPY_BYTES)
