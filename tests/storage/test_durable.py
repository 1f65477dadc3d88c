"""Files that are whole or absent, locks, checksums and new directories."""

import hashlib
import multiprocessing
import os
import stat
import threading

import fsspec
import pytest

from cem_jax.errors import RunFailed, UserError
from cem_jax.storage.durable import (
    clear_scratch,
    lock,
    new_directory,
    sha256_of,
    write_durably,
    written_as,
)
from cem_jax.storage.paths import any_path, writing


def test_content_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a"
    write_durably(path, b"one")
    write_durably(path, iter([b"t", b"wo"]))
    assert path.read_bytes() == b"two" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_decides_who_may_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_durably(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_a_failure_within_the_content_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "a"
    write_durably(path, b"one")

    def broken():
        yield b"half"
        raise UserError("a wrong checksum")

    with pytest.raises(UserError, match="checksum"):
        write_durably(path, broken())
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["a"]


def test_an_object_is_written_whole():
    system = fsspec.filesystem("memory")
    write_durably(any_path("memory://durable/a"), iter([b"a", b"b"]))
    assert system.cat_file("/durable/a") == b"ab"
    assert sha256_of(any_path("memory://durable/a")) == hashlib.sha256(b"ab").hexdigest()


def test_missing_permission_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "config.json").mkdir()
    for path in (tmp_path / "file" / "config.json", tmp_path / "config.json"):
        with pytest.raises(UserError, match=r"config\.json: cannot be written: "), writing(path):
            write_durably(path, b"{}")
    assert sorted(os.listdir(tmp_path)) == ["config.json", "file"]
    with pytest.raises(RunFailed, match=r"a: cannot be written: No such"), writing(tmp_path / "a"):
        write_durably(tmp_path / "absent" / "a", b"{}")


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    for name in (".a.123", ".a.swp", ".ab.123", "a"):
        (tmp_path / name).write_text("")
    clear_scratch(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == [".a.swp", ".ab.123", "a"]
    assert [written_as(n) for n in (".journal.json.12", "journal.json", ".lock")] == [
        "journal.json", "journal.json", ".lock",
    ]  # fmt: skip


def _holds(path, held, done):
    with lock(path):
        held.set()
        done.wait(60)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_one_process_at_a_time(tmp_path, kind):
    path = tmp_path / ".lock" if kind == "file" else tmp_path
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_holds, args=(path, held, done))
    other.start()
    assert held.wait(60)
    with pytest.raises(UserError, match="it is taken"), lock(path, "it is taken"):
        pass
    threading.Timer(0.2, done.set).start()
    with lock(path):  # waits
        assert done.is_set()
    other.join()
    with lock(path, "it is taken"):
        pass


def test_new_directories(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "own").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert new_directory("--output", tmp_path / "absent") == tmp_path / "absent"
    assert new_directory("--output", tmp_path / "empty") == tmp_path / "empty"
    assert new_directory("--output", tmp_path / "full", but_for="own") == tmp_path / "full"
    for name, words in {"file": "is a file", "full": "exists and is not empty"}.items():
        with pytest.raises(UserError, match=f"--output .*{name} {words}"):
            new_directory("--output", tmp_path / name)
