"""Paths, local and at URLs, and directories that are complete or absent in either."""

from pathlib import Path

import fsspec
import pytest

from cem_jax.errors import UserError
from cem_jax.storage import paths
from cem_jax.storage.paths import any_path, entries, files_below, is_url, place, remove, set_aside


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A local directory, and one in fsspec's memory store."""
    if request.param == "local":
        yield tmp_path
        return
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield any_path("memory://bucket/root")
    system.store.clear()


def fill(directory, *names):
    for name in names:
        if not is_url(directory):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


def test_the_home_directory_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert any_path("~/run") == place("~/run") == tmp_path / "run"
    assert any_path("~nobody-here/run") == Path("~nobody-here/run")


def test_local_paths_are_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert place("run/../a") == tmp_path / "a" and any_path("run") == Path("run")


def test_urls_keep_their_names():
    path = any_path("memory://bucket/a/b.jsonl.gz")
    assert str(path) == "memory://bucket/a/b.jsonl.gz" and path.suffix == ".gz"
    assert is_url(path) and is_url(str(path)) and not is_url(Path("/a"))
    assert any_path(path) is path


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense://x", "nonsense://x: .*nonsense"),
        ("abfs://host/x", "abfs://host/x: .*pip install"),
    ],
)
def test_urls_that_cannot_be_read(url, words):
    with pytest.raises(UserError, match=words):
        any_path(url)


@pytest.mark.parametrize("url", ["ftp://host/run", "memory://bucket/run"])
def test_runs_are_kept_where_orbax_writes(url):
    with pytest.raises(UserError, match=f"{url}: runs are kept in directories, gs:// and s3://"):
        place(url)


def test_a_local_url_is_named_without_its_prefix():
    with pytest.raises(UserError, match=r"file:///a/run: a local .* without the prefix: /a/run"):
        place("file:///a/run")


def test_entries_of_a_directory(root):
    fill(root / "d", "b", "a", "sub/c")
    assert [path.name for path in entries(root / "d")] == ["a", "b", "sub"]
    assert sorted(files_below(root / "d")) == ["a", "b", "sub/c"]
    assert entries(root / "absent") == []


def test_a_directory_is_removed(root):
    fill(root / "3", "a", "sub/b")
    fill(root / "4", "a")
    remove(root / "3")
    assert [path.name for path in entries(root)] == ["4"]


def test_an_interrupted_removal(root, monkeypatch):
    fill(root / "3", "a", "sub/b")

    def die(_):
        raise KeyboardInterrupt

    clear = die if is_url(root) else lambda path: path.exists() and die(path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(paths, "_clear", clear)
        remove(root / "3")
    names = {path.name for path in entries(root)}
    assert names == ({"3", "3.removed"} if is_url(root) else {"3.removed"})
    paths.finish_removal(root / "3.removed")
    assert entries(root) == []


def test_a_directory_is_set_aside(root):
    fill(root / "3", "a", "list", "sub/b")
    fill(root / "3.replaced", "old")
    set_aside(root / "3", root / "3.replaced", last="list")
    assert [path.name for path in entries(root)] == ["3.replaced"]
    assert sorted(files_below(root / "3.replaced")) == ["a", "list", "sub/b"]
    assert (root / "3.replaced" / "sub" / "b").read_text() == "sub/b"


def test_drivers_errors_take_one_line():
    class Strange(Exception):
        pass

    told = pytest.raises(UserError, match=r"^a cannot be read: Strange: first$")
    with told, paths.reading(UserError, "a cannot be read"):
        raise Strange("first\nsecond")
    told = pytest.raises(UserError, match=r"^a cannot be read: No such file or directory$")
    with told, paths.reading(UserError, "a cannot be read"):
        Path("/absent/file").read_bytes()
