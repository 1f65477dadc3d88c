import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import abstract, assert_same, make_state, save_all

from cem_jax.errors import UserError
from cem_jax.runs.position import Position


def test_round_trip_is_bit_identical(opened):
    state = make_state(4)
    config = {"dim": 5, "tau": None, "é": [1.5]}
    position = Position(4, 99, 12, 1.5, True, None, config=config, tokenizer="AAEC")
    first = opened()
    first.save(state, position, metric=2.5)
    first.save(make_state(5), Position(5))
    first.wait()
    restored, info = opened().restore(4, abstract(state))
    assert info.position == position
    assert_same(restored, state)
    assert opened().restore(None, abstract(state))[1].step == 5
    assert opened().info(4) == info


def test_double_precision_special_values_and_integers(opened, x64):
    values = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, 1 / 3])
    state = {
        "f64": jnp.array(values),
        "f32": jnp.array(values, jnp.float32),
        "i64": jnp.array([2**62, -1]),
        "u8": jnp.array([0, 255], jnp.uint8),
        "flag": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "python": 7,
    }
    checkpointer = opened()
    checkpointer.save(state, Position(0))
    checkpointer.wait()
    state["python"] = jnp.asarray(7)
    assert_same(checkpointer.restore(0, abstract(state))[0], state)


def test_state_may_be_donated_while_it_is_saved(opened):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (300, 400))}
    before = np.asarray(state["w"]).copy()
    checkpointer = opened()
    checkpointer.save(state, Position(1))
    for _ in range(5):
        state = jax.block_until_ready(update(state))
    restored = checkpointer.restore(1, abstract(state))[0]
    np.testing.assert_array_equal(restored["w"], before)


def test_part_of_a_state_can_be_read_by_name(opened):
    save_all(opened(), 3)
    wanted = {"params": abstract(make_state().params)}
    with pytest.raises(UserError, match="opt_state/1/0/mu/head: bfloat16"):
        opened().restore(3, wanted)
    restored, _ = opened().restore(3, wanted, partial=True)
    assert_same(restored["params"], make_state(3).params)


def test_another_architecture_is_refused_with_what_differs(opened):
    save_all(opened(), 1)
    other = abstract(make_state(1, width=6))
    other.params["extra"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    other.params["scale"] = jax.ShapeDtypeStruct((), jnp.bfloat16)
    with pytest.raises(UserError) as error:
        opened().restore(None, other)
    text = str(error.value)
    assert "params/blocks/query: float32[2, 3, 5] in the checkpoint, float32[2, 3, 6] here" in text
    assert "params/extra: absent in the checkpoint, float32[2] here" in text
    assert "params/scale: float32[] in the checkpoint, bfloat16[] here" in text
    assert "params/head" not in text


def test_narrowing_is_refused(opened):
    with pytest.raises(ValueError, match="w: JAX has no float64"):
        opened().save({"w": np.zeros(3)}, Position(1))


@pytest.mark.parametrize(
    ("metrics", "kept", "best"),
    [
        ([1.0, 2.0, 3.0, 4.0], [10, 30, 40], 10),
        ([4.0, 3.0, 2.0, 1.0], [30, 40], 40),
        ([2.0, float("nan"), 3.0, None], [10, 30, 40], 10),
        ([None, None, None, None], [30, 40], None),
        ([float("nan"), float("-inf"), float("nan"), float("nan")], [30, 40], None),
        ([1.0, 1.0, 5.0, 5.0], [20, 30, 40], 20),
    ],
)
def test_newest_and_best_are_kept(opened, metrics, kept, best):
    checkpointer = opened(keep=2)
    for index, metric in enumerate(metrics):
        checkpointer.save(make_state(index), Position(10 * index + 10), metric)
    checkpointer.wait()
    for one in (checkpointer, opened(keep=2)):
        assert one.steps() == kept
        assert one.latest_step() == 40
        assert one.best_step() == best
        for step in kept:
            assert_same(one.restore(step, abstract(make_state()))[0], make_state(step // 10 - 1))


def test_best_is_removed_without_keep_best(opened):
    checkpointer = opened(keep=1, keep_best=False)
    for step, metric in [(1, 1.0), (2, 2.0)]:
        checkpointer.save(make_state(), Position(step), metric)
    checkpointer.wait()
    assert checkpointer.steps() == [2]


def test_milestones_are_kept_forever(opened):
    checkpointer = opened(keep=1, keep_every=4)
    for step, metric in [(2, 1.0), (4, 5.0), (6, 2.0), (8, 6.0), (10, 3.0)]:
        checkpointer.save(make_state(step), Position(step), metric)
    checkpointer.wait()
    assert checkpointer.steps() == [2, 4, 8, 10]  # the best, two milestones, the newest
    for keep_every, step in ((None, 11), (3, 13)):  # dropped, changed
        save_all(opened(keep=1, keep_best=False, keep_every=keep_every), step)
        assert opened().steps() == [4, 8, step]


def test_nothing_is_removed_before_the_new_save_is_complete(opened):
    checkpointer = opened(keep=1)
    save_all(checkpointer, 1)
    checkpointer.save(make_state(2), Position(2))
    assert 1 in checkpointer.steps()
    checkpointer.wait()
    assert checkpointer.steps() == [2]


def test_saving_a_step_again_replaces_it(opened, tmp_path):
    checkpointer = opened()
    save_all(checkpointer, 1)
    checkpointer.save(make_state(9), Position(1, loss=1.0), 1.0)
    checkpointer.wait()
    assert_same(checkpointer.restore(1, abstract(make_state()))[0], make_state(9))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]


def test_one_set_aside_is_used_until_its_step_is_saved_again(opened, tmp_path):
    save_all(opened(), 1)
    (tmp_path / "c" / "1").rename(tmp_path / "c" / "1.replaced")  # killed right after the rename
    assert_same(opened().restore(None, abstract(make_state()))[0], make_state(1))
    save_all(opened(), 2)
    assert opened().steps() == [1, 2]


def test_resuming_from_an_earlier_step_drops_the_later_ones(opened):
    save_all(opened(), 1, 2, 3)
    save_all(opened(), 2)
    assert opened().steps() == [1, 2]


def test_directories_that_are_no_checkpoint_are_ignored(opened, lines, tmp_path):
    assert opened().latest_step() is None
    save_all(opened(), 5)
    (tmp_path / "c" / "7").mkdir()
    (tmp_path / "c" / "8.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "c" / "notes").mkdir()
    checkpointer = opened()
    assert checkpointer.steps() == [5]
    assert checkpointer.latest_step() == 5
    assert checkpointer.restore(None, abstract(make_state()))[1].step == 5
    assert len(lines) == 2
    assert "c/7 is not a complete checkpoint" in lines[0]
    assert "8.orbax-checkpoint-tmp is not" in lines[1]
    save_all(checkpointer, 7)
    assert opened().steps() == [5, 7]
    assert not (tmp_path / "c" / "8.orbax-checkpoint-tmp").exists()


def test_no_checkpoint_at_all(opened):
    with pytest.raises(UserError, match=r"no complete checkpoint in .*none at all"):
        opened().restore(None, abstract(make_state()))
    save_all(opened(), 5, 6)
    with pytest.raises(UserError, match=r"no complete checkpoint 4 in .*there are: 5, 6"):
        opened().restore(4, abstract(make_state()))


def test_info_is_plain_json(opened, tmp_path):
    checkpointer = opened()
    position = Position(3, tokens=9, dataset="abc")
    checkpointer.save({"w": jnp.zeros((2, 3))}, position, float("nan"))
    checkpointer.wait()
    text = (tmp_path / "c" / "3" / "info" / "metadata").read_text()
    assert json.loads(text) == {
        "step": 3,
        "metric": None,
        "measure": None,
        "milestone": False,
        "arrays": {"w": "float32[2, 3]"},
        "extra": position.stored(),
    }
