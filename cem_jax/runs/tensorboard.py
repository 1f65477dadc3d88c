"""TensorBoard events, written synchronously so that a full disk raises in the main thread."""

import socket
import struct
import time
from collections.abc import Mapping

from cem_jax.storage.append import growing
from cem_jax.storage.paths import AnyPath, writing


class Board:
    """An event file in `folder`; TensorBoard ignores other files' events from `step` on."""

    def __init__(self, folder: AnyPath, step: int):
        from tensorboardX.proto import event_pb2  # slow to import, and optional

        self._events = event_pb2
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file = growing(folder / name)
        self._write(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=step, session_log=start)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step, by name."""
        event = self._events.Event()
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(step=step, summary=event.summary)

    def close(self) -> None:
        """Close the file; may be called repeatedly."""
        self._file.close()

    def _write(self, **fields) -> None:
        from tensorboardX.record_writer import masked_crc32c

        content = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(content))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (size, content))
        self._file.write(size + next(sums) + content + next(sums))
