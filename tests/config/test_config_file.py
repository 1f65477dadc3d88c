"""Configuration files: their place, their imports, and the messages for their mistakes."""

import sys

import pytest

from cem_jax.config.file import read_config_file
from cem_jax.errors import UserError

HEADER = "import ml_collections\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def message(path):
    with pytest.raises(UserError) as caught:
        read_config_file(path)
    (text,) = caught.value.messages
    assert "\n" not in text
    return text


def test_imports_a_neighbour_and_the_shipped_configs(write, tmp_path, monkeypatch):
    write("SEED = 5\n", "neighbour.py")
    path = write(
        "import neighbour\nfrom configs import base\n"
        "def get_config():\n  c = base.get_config()\n  c.seed = neighbour.SEED\n  return c\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = list(sys.path)
    assert read_config_file(path)["seed"] == 5
    assert sys.path == before
    assert not {"neighbour", "configs", "configs.base"} & set(sys.modules)


def test_files_of_the_same_name_in_two_folders_are_kept_apart(write):
    text = "import sizes\n" + HEADER
    text += "def get_config():\n  return ml_collections.ConfigDict({'dim': sizes.DIM})\n"
    for folder, dim in (("one", 1), ("two", 2)):
        write(f"DIM = {dim}\n", f"{folder}/sizes.py")
        assert read_config_file(write(text, f"{folder}/c.py"))["dim"] == dim


def test_the_users_configs_folder_joins_the_shipped_one(write):
    write("from configs import base\nNAME = base.__name__\n", "configs/own.py")
    path = write(
        "from configs import own\n"
        + HEADER
        + "def get_config():\n  return ml_collections.ConfigDict({'name': own.NAME})\n",
        "configs/mine.py",
    )
    assert read_config_file(path) == {"name": "configs.base"}


def test_argument(write):
    path = write(HEADER + "def get_config(x):\n  return ml_collections.ConfigDict({'x': x})\n")
    assert read_config_file(f"{path}:a:b") == {"x": "a:b"}
    assert f"needs an argument: {path}:ARGUMENT" in message(path)


def test_unwanted_argument(write):
    path = write(HEADER + "def get_config():\n  return ml_collections.ConfigDict()\n")
    assert "takes no argument, but 'big' was given" in message(f"{path}:big")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", ":1: SyntaxError"),
        ("\n\nx = 1 / 0\n", ":3: ZeroDivisionError"),
        ("def get_config():\n  return {}['a']\n", ":2: KeyError: 'a'"),
        ("import nothing_of_the_kind\n", ":1: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)\n", ":2: SystemExit"),
        ("raise ValueError('two\\nlines')\n", ":1: ValueError: two lines"),
        ("get_config = 3\n", "defines no function get_config()"),
        (
            "def get_sweep(): pass\n",
            "defines no function get_config(), but get_sweep(): it describes a figure, for "
            "`cem sweep` and `cem report`",
        ),
        ("def get_config():\n  return {}\n", "must return an ml_collections.ConfigDict, not dict"),
        (
            "from configs import base\ndef get_config():\n  c = base.get_config()\n"
            "  c.model.dim = 'wide'\n  return c\n",
            ":4: TypeError: Could not override field 'dim'",
        ),
    ],
)
def test_mistakes_name_file_and_line(write, text, words):
    path = write(text)
    assert message(path).startswith(path)
    assert words in message(path)


def test_a_mistake_in_an_imported_file_names_that_file(write):
    write("x = (\n", "broken.py")
    path = write("import broken\n")
    assert "broken.py:1: SyntaxError" in message(path)


def test_missing_files_directories_and_other_formats(tmp_path):
    assert "No such file" in message(str(tmp_path / "none.py"))
    assert "a directory" in message(str(tmp_path))
    assert "not a Python file" in message(str(tmp_path / "config.json"))


def test_a_required_value_is_named(write):
    text = HEADER + "from ml_collections import config_dict\n"
    text += "def get_config():\n  c = ml_collections.ConfigDict()\n"
    text += "  c.seed = config_dict.required_placeholder(int)\n  return c\n"
    assert "required" in message(write(text))
