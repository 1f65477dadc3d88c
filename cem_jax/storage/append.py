"""Files that grow during a run, local or in a store. Errors are those of `paths.writing`."""

import os
import time

from cem_jax.storage.paths import AnyPath, is_url, writing


def growing(path: AnyPath, content: bytes = b"") -> "Appended | Rewritten":
    """Open the file `path`, which now holds `content`, for appending."""
    return Rewritten(path, content) if is_url(path) else Appended(path)


class Appended:
    """A local file, written without buffering in this process."""

    def __init__(self, path: AnyPath):
        self._path = path
        with writing(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (held until close)

    def write(self, content: bytes) -> None:
        with writing(self._path):
            while content:  # a nearly full disk takes a part, and fails on the next write
                content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Return once what was written is on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; may be called repeatedly."""
        with writing(self._path):
            self._file.close()


class Rewritten:
    """An object in a store, which cannot append: rewritten whole at intervals."""

    def __init__(self, path: AnyPath, content: bytes):
        self._path, self._content, self._uploaded = path, content, len(content)
        self._due = 0.0

    def write(self, content: bytes) -> None:
        """Append `content`; upload only so often that uploading takes at most 1 % of the time."""
        self._content += content
        if time.monotonic() >= self._due:
            self.sync()

    def sync(self) -> None:
        """Upload whatever is not yet uploaded."""
        if len(self._content) == self._uploaded:
            return
        began = time.monotonic()
        with writing(self._path):
            self._path.write_bytes(self._content)
        self._uploaded = len(self._content)
        now = time.monotonic()
        self._due = now + max(30.0, 100 * (now - began))

    def close(self) -> None:
        """Upload the rest; may be called repeatedly."""
        self.sync()
