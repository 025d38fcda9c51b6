"""All sharding decisions: one table from logical axis names to mesh axes.

Parameters and activations name logical axes; nothing else in the project mentions mesh axes.
"""

import math
from collections.abc import Mapping, Sequence

import gin
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cipo_jax.distributed.mesh import DATA_AXES
from cipo_jax.errors import UserError

# FSDP + tensor parallelism for training: every matrix is split once over `fsdp` and once over `tensor`.
TRAINING_RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": DATA_AXES,
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "ffn": "tensor",
    "norm": None,
}
# Generation reads every weight for every token: gathering over `fsdp` each step would cost more than the memory it saves.
GENERATION_RULES = {**TRAINING_RULES, "embed": None}


@gin.configurable
class ShardingRules:
    """Maps logical axes to mesh axes and builds `NamedSharding`s from them."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, str | tuple[str, ...] | None] = TRAINING_RULES):
        self.mesh = mesh
        self.rules = dict(rules)

    def _size(self, axis) -> int:
        return math.prod(self.mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int] | None = None, name: str = "array"):
        """The sharding of an array whose dimensions are named `axes`.

        With a `shape`, `kv_heads` that do not divide over `tensor` are replicated (more tensor devices than key-value
        heads); any other dimension that does not divide is an error.

        Raises:
          UserError: an unknown axis, two dimensions on one mesh axis, or a dimension that does not divide; the message
            names the tensor.
        """
        if shape is not None and len(shape) != len(axes):
            raise UserError(
                f"{name} has shape {tuple(shape)} but names the axes {tuple(axes)}; name one axis per dimension"
            )
        spec, used = [], {}
        for dim, axis in enumerate(axes):
            if axis is not None and axis not in self.rules:
                raise UserError(
                    f"{name} names the logical axis {axis!r}, which no rule maps; known: {sorted(self.rules)}"
                )
            target = self.rules[axis] if axis is not None else None
            size = self._size(target)
            if shape is not None and size > 1 and shape[dim] % size:
                if axis != "kv_heads":
                    raise UserError(
                        f"{name} has {shape[dim]} along {axis!r}, which does not divide over {size} devices of mesh axis "
                        f"{target!r}; change the mesh or that size"
                    )
                target = None
            for mesh_axis in (target,) if isinstance(target, str) else target or ():
                if mesh_axis in used:
                    raise UserError(
                        f"{name}: {axis!r} and {used[mesh_axis]!r} both map to mesh axis {mesh_axis!r}; change one rule"
                    )
                used[mesh_axis] = axis
            spec.append(target)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def constrain(self, x, axes: Sequence[str | None]):
        """`x` (an array inside jit) with its dimensions laid out as `axes` say; one that does not divide stays whole.

        Left alone, the compiler may well follow the weights and split activations along the width.
        """
        if self.mesh.size == 1:
            return x
        fits = [a if a is not None and n % self._size(self.rules[a]) == 0 else None for a, n in zip(axes, x.shape)]
        return jax.lax.with_sharding_constraint(x, self.sharding(fits, x.shape, "an activation"))

    def __eq__(self, other) -> bool:
        return isinstance(other, ShardingRules) and (self.mesh, self.rules) == (other.mesh, other.rules)

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(sorted(self.rules.items(), key=str))))

    @property
    def batch(self) -> NamedSharding:
        """The sharding of an array whose first dimension is the batch."""
        return NamedSharding(self.mesh, PartitionSpec(self.rules["batch"]))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put_batch(self, tree):
        """Places a pytree of host arrays, each split along its first dimension."""
        return jax.device_put(tree, self.batch)
