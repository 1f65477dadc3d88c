from pathlib import Path

import pytest

from cem_jax.data.corpus.files import file_format, find_files
from cem_jax.errors import UserError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def splits(*inputs) -> dict[str, str | None]:
    return {file.path.name: file.split for file in find_files([str(i) for i in inputs]).files}


def test_formats():
    assert file_format(Path("a.b.jsonl.zst")) == ".jsonl.zst"
    assert file_format(Path("A.JSON.GZ")) == ".json.gz"
    assert file_format(Path("a.parquet.xz")) == ".parquet.xz"
    assert file_format(Path("a.txt.bz2")) == ".txt.bz2"
    assert file_format(Path("a.zst")) is None
    assert file_format(Path("a.py")) is None


def test_folders_are_walked_and_other_formats_reported(tmp_path):
    touch(tmp_path / "c" / "train" / "chunk1" / "b.jsonl")
    touch(tmp_path / "c" / "valid" / "a.txt")
    touch(tmp_path / "c" / "test" / "t.json")
    touch(tmp_path / "c" / "x.parquet")
    touch(tmp_path / "c" / ".cache" / "hidden.txt")
    other = touch(tmp_path / "c" / "README.md")
    assert splits(tmp_path / "c") == {
        "b.jsonl": "train", "a.txt": "validation", "t.json": "test", "x.parquet": None,
    }  # fmt: skip
    assert find_files([str(tmp_path / "c")]).ignored == (other,)


def test_split_names_above_the_given_folder_do_not_count(tmp_path):
    touch(tmp_path / "test" / "corpus" / "part" / "a.txt")
    assert splits(tmp_path / "test" / "corpus") == {"a.txt": None}
    assert splits(tmp_path / "test") == {"a.txt": "test"}


def test_files_and_globs(tmp_path):
    a = touch(tmp_path / "train" / "chunk" / "a.txt")
    b = touch(tmp_path / "val" / "b.txt")
    assert splits(a, b) == {"a.txt": "train", "b.txt": "validation"}
    assert splits(tmp_path / "*" / "*.txt", tmp_path / "*" / "*" / "*.txt") == splits(a, b)


def test_each_file_once_and_sorted(tmp_path):
    b, a = touch(tmp_path / "b.txt"), touch(tmp_path / "a.txt")
    found = find_files([str(b), str(tmp_path), str(a), str(tmp_path / "*.txt")]).files
    assert [file.path.name for file in found] == ["a.txt", "b.txt"]


def test_a_file_in_two_splits(tmp_path):
    for folder in ("train", "test", "more"):
        (tmp_path / folder).mkdir()
    document = tmp_path / "more" / "a.txt"
    document.write_text("text")
    (tmp_path / "train" / "a.txt").symlink_to(document)
    (found,) = find_files([str(tmp_path)]).files
    assert found.split == "train"
    (tmp_path / "test" / "a.txt").symlink_to(document)
    with pytest.raises(UserError, match="it cannot be in test and train"):
        find_files([str(tmp_path)])


def test_every_fault_is_reported_at_once(tmp_path):
    touch(tmp_path / "code" / "a.py")
    (tmp_path / "empty").mkdir()
    inputs = ["nowhere", "no*match", str(tmp_path / "code"), str(tmp_path / "empty"),
              str(tmp_path / "code" / "a.py")]  # fmt: skip
    with pytest.raises(UserError) as caught:
        find_files(inputs)
    told = caught.value.messages
    expected = (
        "nowhere does not exist",
        "no*match matches no file",
        "code: no usable file, only .py;",
        "empty: no usable file;",
        "a.py: no usable file, only .py;",
    )
    for message, words in zip(told, expected, strict=True):
        assert words in message


def test_globs_report_what_they_leave_out(tmp_path):
    touch(tmp_path / "a.txt")
    other = touch(tmp_path / "b.md")
    found = find_files([str(tmp_path / "*")])
    assert [file.path.name for file in found.files] == ["a.txt"]
    assert found.ignored == (other,)


def test_links_are_followed_but_cycles_are_not(tmp_path):
    touch(tmp_path / "c" / "a.txt")
    touch(tmp_path / "elsewhere" / "b.txt")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "c" / "circle").symlink_to(tmp_path / "c")
    assert sorted(splits(tmp_path / "c")) == ["a.txt", "b.txt"]
    (tmp_path / "c" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt cannot be read"):
        splits(tmp_path / "c")
