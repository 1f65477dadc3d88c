"""`cem export` and `cem import`: there and back bit for bit, and what is refused."""

import json
import os
import stat
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_run import (
    tiny_config,
    tiny_dataset,
    tiny_parameters,
    tiny_tokenizer,
    write_run,
)

from cem_jax.cli import main
from cem_jax.config import Config
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.evaluation import evaluate
from cem_jax.runs.export import export_run, import_run, layer_by_layer, write_weights
from cem_jax.runs.generation import generate_text
from cem_jax.runs.run import Run

MODELS = {
    "full CEM": {},
    "tied embeddings, psd, no diagonal, learned steps": dict(
        tie_embeddings=True, preconditioner_form="psd", diagonal="none", learn_step_size=True
    ),
    "Llama": dict(kind="llama", mlp_kind="gated", self_bias=False, steps=1, mlp_steps=1),
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def exported(tmp_path, tokenizer):
    """An export of a tiny run at checkpoint 7, and the run."""
    config = tiny_config()
    parameters = tiny_parameters(config, seed=7)
    steps = {3: tiny_parameters(config, seed=3), 7: parameters}
    run = write_run(tmp_path / "run", config, tokenizer, steps)
    output(run, tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_decides_who_may_read(exported, tmp_path, umask):
    before = os.umask(umask)
    try:
        output(tmp_path / "run", tmp_path / "other")
        back(exported, tmp_path / "back")
    finally:
        os.umask(before)
    made = [*(tmp_path / "other").rglob("*"), *(tmp_path / "back").rglob("*")]
    assert {p.name for p in made} >= {"model.safetensors", "config.json", "checksums.sha256"}
    for path in made:
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


def output(workdir: Path, folder: Path, step=None) -> dict:
    return export_run(workdir, folder, step=step)


def back(folder: Path, workdir: Path) -> dict:
    return import_run(folder, workdir)


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_identical(name, tokenizer, tmp_path):
    config = tiny_config(model=MODELS[name])
    parameters = tiny_parameters(config, seed=1)
    run = write_run(tmp_path / "run", config, tokenizer, {7: parameters})
    out = output(run, tmp_path / "out")
    assert (out["step"], len(out["files"])) == (7, 4)
    result = back(tmp_path / "out", tmp_path / "again")
    assert result["step"] == 7 and result["parameters"] == out["parameters"]
    assert all(Path(file).is_file() for file in (*out["files"], *result["files"]))
    found = Run.open(tmp_path / "again")
    assert (found.config, found.tokenizer.hash) == (config, tokenizer.hash)
    restored = found.parameters
    assert found.step == 7
    assert jax.tree.structure(restored) == jax.tree.structure(parameters)
    jax.tree.map(np.testing.assert_array_equal, restored, parameters)
    output(tmp_path / "again", tmp_path / "out2")
    for file in ("model.safetensors", "config.json", "tokenizer.model", "checksums.sha256"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "out2" / file).read_bytes()


def test_arrays_in_fortran_order_are_written_with_their_values(tmp_path):
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    write_weights(tmp_path / "w", {"a": array, "b": array[:, ::2]}, {})
    read = load_file(tmp_path / "w")
    np.testing.assert_array_equal(read["a"], array)
    np.testing.assert_array_equal(read["b"], array[:, ::2])


@pytest.mark.parametrize("fields", [*MODELS.values(), {"step_norm": "separate"}])
def test_every_name_is_documented(fields):
    table = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    model = tiny_config(model=fields).model
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape), pure.abstract_parameters(model))
    for name in layer_by_layer(zeros):
        general = ".".join("LAYER" if part.isdecimal() else part for part in name.split("."))
        assert f"`{general}`" in table, name


def test_arrays_and_metadata_are_as_documented(exported):
    arrays = load_file(exported / "model.safetensors")
    config = Config.from_dict(json.loads((exported / "config.json").read_text()))
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    layers = {name.split(".")[1] for name in arrays if name.startswith("blocks.")}
    assert layers == {str(layer) for layer in range(config.model.layers)}
    tied = arrays["blocks.1.mlp.tied"]
    assert tied.shape == (config.model.mlp.dim, config.model.dim)
    np.testing.assert_array_equal(tied, tiny_parameters(config, seed=7)["blocks"]["mlp"]["tied"][1])
    with safe_open(exported / "model.safetensors", framework="numpy") as file:
        metadata = json.loads(file.metadata()["cem_jax"])
    assert metadata["step"] == 7
    assert metadata["separator"] == "bos" and metadata["tokenizer_hash"].startswith("sha256:")


def test_a_checkpoint_can_be_chosen(exported, tmp_path):
    assert output(tmp_path / "run", tmp_path / "third", step=3)["step"] == 3
    arrays = load_file(tmp_path / "third" / "model.safetensors")
    np.testing.assert_array_equal(arrays["norm"], tiny_parameters(tiny_config(), seed=3)["norm"])
    with pytest.raises(UserError, match=r"no complete checkpoint 5"):
        output(tmp_path / "run", tmp_path / "fifth", step=5)
    assert not (tmp_path / "fifth").exists()


def test_eval_and_generate_work_on_what_was_imported(tmp_path, tokenizer):
    config = tiny_config(tiny_dataset(tmp_path / "data", tokenizer))
    run = write_run(tmp_path / "run", config, tokenizer, {7: tiny_parameters(config, seed=2)})
    output(run, tmp_path / "out")
    back(tmp_path / "out", tmp_path / "again")
    timeless = lambda result: {k: v for k, v in result.items() if k != "seconds"}
    text = lambda where: generate_text(Run.open(where), "abc", max_tokens=8, temperature=0)
    assert timeless(evaluate(tmp_path / "again")) == timeless(evaluate(run))
    assert text(tmp_path / "again") == text(run)


def test_a_nonempty_output_is_left_alone(exported, tmp_path):
    before = files_of(exported)
    with pytest.raises(UserError, match="exists and is not empty"):
        output(tmp_path / "run", exported)
    with pytest.raises(UserError, match="exists and is not empty"):
        back(exported, tmp_path / "run")
    assert files_of(exported) == before


def test_an_empty_directory_is_filled_in_place(exported, tmp_path, monkeypatch):
    wanted = files_of(exported)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "first":
            Path(".cem.partial").mkdir()  # left by a killed export
            assert output(tmp_path / "run", Path("."))["step"] == 7
        else:
            assert back(exported, Path("."))["step"] == 7
            assert Run.open(tmp_path / name).step == 7
        assert os.path.samefile(".", tmp_path / name)  # as for a shell inside it
    assert files_of(tmp_path / "first") == wanted
    (tmp_path / "third").mkdir()
    harm = tmp_path / "out" / "model.safetensors"
    no_list_and_cut(harm)
    with pytest.raises(UserError):
        back(exported, tmp_path / "third")
    assert files_of(tmp_path / "third") == []


@pytest.mark.parametrize("url", ["gs://bucket/y", "memory://y", "s3:/x/y"])
def test_only_local_directories_are_written(url, exported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = files_of(tmp_path)
    assert main(["export", "--workdir", "run", "--output", url]) == 2
    assert main(["import", "--input", "out", "--workdir", url]) == 2
    assert main(["import", "--input", url, "--workdir", "new"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(url in line for line in lines)
    assert files_of(tmp_path) == before


def test_a_place_that_cannot_be_written(exported, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        output(tmp_path / "run", tmp_path / "file" / "out")
    with pytest.raises(UserError, match="cannot be written"):
        back(exported, tmp_path / "file" / "again")


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def no_config(path):
    path.with_name("config.json").unlink()


def other_shape(path):
    arrays = load_file(path)
    arrays["norm"] = arrays["norm"][:-1]
    arrays["stranger"] = arrays.pop("head")
    save_file(arrays, path, metadata={"cem_jax": "{}"})
    path.with_name("checksums.sha256").unlink()


def other_dtype(path):
    arrays = load_file(path)
    arrays["norm"] = arrays["norm"].astype(np.float16)
    save_file(arrays, path, metadata={"cem_jax": "{}"})
    path.with_name("checksums.sha256").unlink()


def other_format(path):
    save_file(load_file(path), path)
    path.with_name("checksums.sha256").unlink()


def no_list_and_cut(path):
    path.with_name("checksums.sha256").unlink()
    cut(path)


def told(metadata):
    """Return a function that replaces the metadata of `cem export` with another text."""

    def harm(path):
        save_file(load_file(path), path, metadata={"cem_jax": metadata})
        path.with_name("checksums.sha256").unlink()

    return harm


def not_finite(path):
    arrays = load_file(path)
    arrays["norm"][2] = np.nan
    arrays["blocks.1.mlp.tied"][:, 3] = -np.inf
    save_file(arrays, path, metadata={"cem_jax": "{}"})
    path.with_name("checksums.sha256").unlink()


def low_precision(path):
    header = json.dumps({"norm": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    path.with_name("checksums.sha256").unlink()


def other_tokenizer(path):
    model = path.with_name("tokenizer.model")
    model.write_bytes(model.read_bytes() + b"\x1a\x00")
    path.with_name("checksums.sha256").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "is damaged: model.safetensors has been altered"),
        (flip, "is damaged: model.safetensors has been altered"),
        (Path.unlink, "holds no model.safetensors"),
        (no_config, "holds no config.json"),
        (other_shape, "norm: float32[7] in the file, float32[8] expected"),
        (other_shape, "stranger: float32[320, 8] in the file, absent expected"),
        (other_shape, "head: absent in the file, float32[320, 8] expected"),
        (other_dtype, "norm: float16[8] in the file, float32[8] expected"),
        (other_format, "was not written by `cem export`"),
        (no_list_and_cut, "not a readable safetensors file"),
        (other_tokenizer, "was trained with sha256:"),
        (
            told('{"step": "abc"}'),
            "its step must be a whole number from 0 to 2,147,483,647",
        ),
        (told('{"step": null}'), "not null"),
        (told('{"step": -5}'), "not -5"),
        (told('{"step": true}'), "not true"),
        (told('{"step": 1e400}'), "not Infinity"),
        (told('{"step": 2147483648}'), "not 2147483648"),
        (told('{"tokenizer_hash": 5}'), "was trained with 5"),
        (told("[" * 100_000), "not a readable safetensors file"),
        (not_finite, "norm: 1 of 8"),
        (not_finite, "blocks.1.mlp.tied: 12 of "),
        (low_precision, "model.safetensors"),
    ],
)
def test_faults_are_named_and_nothing_is_written(harm, words, exported, tmp_path):
    harm(exported / "model.safetensors")
    with pytest.raises(UserError) as refused:
        back(exported, tmp_path / "again")
    assert words in str(refused.value)
    assert not (tmp_path / "again").exists()
    assert not list(tmp_path.glob(".*partial"))
