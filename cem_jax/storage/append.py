"""Files that grow while a run goes on, wherever it is kept. They fail as `places.writing` does."""

import os
import time

from cem_jax.storage.paths import AnyPath, is_url, writing


def growing(path: AnyPath, content: bytes = b"") -> "Appended | Rewritten":
    """The file `path`, which holds `content` now, to be written on."""
    return Rewritten(path, content) if is_url(path) else Appended(path)


class Appended:
    """A local file: what is written is with the operating system at once."""

    def __init__(self, path: AnyPath):
        self._path = path
        with writing(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (held until close)

    def write(self, content: bytes) -> None:
        with writing(self._path):
            while content:  # a disk that is nearly full takes a part, and says so the next time
                content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Returns when what was written is kept, come what may."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """More than once does no harm."""
        with writing(self._path):
            self._file.close()


class Rewritten:
    """An object in a store, which cannot append: written anew, whole, now and then."""

    def __init__(self, path: AnyPath, content: bytes):
        self._path, self._content, self._uploaded = path, content, len(content)
        self._due = 0.0

    def write(self, content: bytes) -> None:
        """Uploaded if the last time is long enough ago: it should take 1 % of the time at most."""
        self._content += content
        if time.monotonic() >= self._due:
            self.sync()

    def sync(self) -> None:
        """Returns when what was written is kept."""
        if len(self._content) == self._uploaded:
            return
        began = time.monotonic()
        with writing(self._path):
            self._path.write_bytes(self._content)
        self._uploaded = len(self._content)
        now = time.monotonic()
        self._due = now + max(30.0, 100 * (now - began))

    def close(self) -> None:
        """More than once does no harm."""
        self.sync()
