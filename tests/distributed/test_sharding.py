"""The table from logical axes to mesh axes, the mesh, and arrays fetched from it."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cipo_jax.distributed.arrays import fetch
from cipo_jax.distributed.mesh import data_shards, mesh
from cipo_jax.distributed.sharding import GENERATION_RULES, TRAINING_RULES, ShardingRules
from cipo_jax.errors import UserError


def rules(replica=1, fsdp=2, tensor=2, table=TRAINING_RULES) -> ShardingRules:
    return ShardingRules(mesh(replica, fsdp, tensor, jax.devices()[: replica * fsdp * tensor]), table)


def test_the_mesh_takes_what_is_left_and_must_use_every_device():
    assert dict(mesh().shape) == {"replica": 1, "fsdp": 8, "tensor": 1}
    assert dict(mesh(replica=2, tensor=2).shape) == {"replica": 2, "fsdp": 2, "tensor": 2}
    assert data_shards(mesh(replica=2, tensor=2)) == 4
    for sizes in ({"tensor": 3}, {"fsdp": 4}, {"replica": 16}):
        with pytest.raises(UserError, match=r"there are 8; set mesh[.]replica, "):
            mesh(**sizes)


@pytest.mark.parametrize(
    ("axes", "shape", "training", "generation"),
    [
        (("vocab", "embed"), (10, 6), P("tensor", "fsdp"), P("tensor", None)),
        (
            ("layers", "embed", "heads", "head_dim"),
            (3, 6, 4, 5),
            P(None, "fsdp", "tensor", None),
            P(None, None, "tensor", None),
        ),
        (("batch", None), (4, 7), P(("replica", "fsdp"), None), P(("replica", "fsdp"), None)),
        (("embed", "kv_heads", "head_dim"), (6, 4, 5), P("fsdp", "tensor", None), P(None, "tensor", None)),
        (
            ("embed", "kv_heads", "head_dim"),
            (6, 1, 5),
            P("fsdp", None, None),
            P(None, None, None),
        ),  # fewer than devices
        (("norm",), (7,), P(None), P(None)),
    ],
)
def test_every_axis_has_its_place(axes, shape, training, generation):
    assert rules().sharding(axes, shape).spec == training
    assert rules(table=GENERATION_RULES).sharding(axes, shape).spec == generation


def test_each_device_holds_its_own_part():
    r = rules()
    value = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    placed = jax.device_put(value, r.sharding(("vocab", "embed"), value.shape))
    parts = {str(shard.index) for shard in placed.addressable_shards}
    assert len(parts) == 4 and all(shard.data.shape == (4, 3) for shard in placed.addressable_shards)
    np.testing.assert_array_equal(fetch(placed), value)
    rows = r.put_batch({"a": value, "b": np.arange(8)})
    assert {shard.data.shape for shard in rows["a"].addressable_shards} == {(4, 6)}
    np.testing.assert_array_equal(fetch(rows)["b"], np.arange(8))
    assert r.replicated.is_fully_replicated and not r.batch.is_fully_replicated


@pytest.mark.parametrize(
    ("axes", "shape", "told"),
    [
        (("embed", "colour"), (6, 4), "q names the logical axis 'colour', which no rule maps"),
        (("vocab", "ffn"), (4, 4), "q: 'ffn' and 'vocab' both map to mesh axis 'tensor'; change one rule"),
        (("embed", "ffn"), (6, 5), "q has 5 along 'ffn', which does not divide over 2 devices of mesh axis 'tensor'"),
        (("embed",), (6, 4), "q has shape (6, 4) but names the axes ('embed',); name one axis per dimension"),
    ],
)
def test_mistakes_name_the_array(axes, shape, told):
    with pytest.raises(UserError) as caught:
        rules().sharding(axes, shape, "q")
    assert told in str(caught.value)


def test_a_constraint_splits_what_divides_and_keeps_the_rest_whole():
    r = rules()
    split = jax.jit(lambda x: r.constrain(x * 2, ("batch", None)))(np.ones((4, 6), np.float32))
    assert split.sharding.is_equivalent_to(r.sharding(("batch", None)), 2)
    odd = jax.jit(lambda x: r.constrain(x * 2, ("batch", None)))(np.ones((3, 6), np.float32))
    np.testing.assert_array_equal(odd, np.full((3, 6), 2))
    one = rules(fsdp=1, tensor=1)
    x = jax.numpy.ones((3, 6))
    assert one.constrain(x, ("batch", None)) is x


def test_equal_tables_on_equal_meshes_are_one_static_argument():
    assert rules() == rules() and hash(rules()) == hash(rules())
    assert rules() != rules(table=GENERATION_RULES) and rules() != rules(fsdp=4, tensor=1)
