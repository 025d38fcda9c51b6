"""Train state and optimiser: AdamW with float32 moments, its learning rate an argument of every update."""

import dataclasses
import re
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cipo_jax.errors import UserError

# Parameters that scale or shift a feature. Layers are stacked, so the number of axes tells nothing about them.
NO_DECAY = r"(norm|bias|scale|A_log|dt_bias)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """What an update reads and writes.

    Attributes:
      params: pytree of parameters, any float dtype.
      opt_state: optimiser state; moments are float32 (or `moment_dtype`) and shaped like the parameters.
      step: int32 scalar, updates tried so far, skipped ones included.
    """

    params: Any
    opt_state: Any
    step: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A gradient transformation without its learning rate, and the schedule of that rate.

    Attributes:
      transform: maps float32 gradients to the step at learning rate -1: what is added to the parameters is
        `-learning_rate * transform`.
      learning_rate: peak.
      warmup_steps: updates of linear warm-up; update 0 already has rate `peak / warmup_steps`.
      decay_steps: updates from the end of the warm-up over which the rate falls; None for a constant rate.
      decay_to: fraction of the peak that is left at the end of the decay, and stays.
      decay_shape: `"linear"` or `"cosine"`.
      max_grad_norm: gradients are scaled down to this global norm; None for no clip.
    """

    transform: optax.GradientTransformation
    learning_rate: float
    warmup_steps: int = 0
    decay_steps: int | None = None
    decay_to: float = 0.0
    decay_shape: str = "linear"
    max_grad_norm: float | None = 1.0

    def rate(self, step: int) -> np.float32:
        """Learning rate of update `step` (from 0). On the host, so that a new rate or schedule compiles nothing."""
        if step < self.warmup_steps:
            return np.float32(self.learning_rate * (step + 1) / self.warmup_steps)
        if self.decay_steps is None:
            return np.float32(self.learning_rate)
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        left = 1.0 - done if self.decay_shape == "linear" else 0.5 * (1.0 + np.cos(np.pi * done))
        return np.float32(self.learning_rate * (self.decay_to + (1.0 - self.decay_to) * left))

    def init(self, params: Any) -> TrainState:
        """Fresh state around `params`. Traceable: run it under `jit` with `out_shardings` for sharded moments."""
        # Moments must not inherit bfloat16 from the parameters: the second one would stop moving.
        opt_state = self.transform.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return TrainState(params=params, opt_state=opt_state, step=jnp.zeros((), jnp.int32))

    def state_sharding(self, params: Any, param_sharding: Any) -> TrainState:
        """Where a state lives: moments lie with their parameters, counters on every device.

        Args:
          params: parameters or their `ShapeDtypeStruct`s.
          param_sharding: the same tree of `NamedSharding`s.

        Returns:
          A `TrainState` of shardings, for `jit(init, out_shardings=...)` and `make_update`.
        """
        shapes = jax.eval_shape(self.init, params)
        mesh = jax.tree.leaves(param_sharding)[0].mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        opt_state = optax.tree.map_params(
            self.transform,
            lambda _, sharding: sharding,
            shapes.opt_state,
            param_sharding,
            transform_non_params=lambda _: replicated,
        )
        return TrainState(params=param_sharding, opt_state=opt_state, step=replicated)


@gin.configurable
def adamw(
    learning_rate: float = 1e-6,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    decay_to: float = 0.0,
    decay_shape: str = "linear",
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    no_decay: str = NO_DECAY,
    max_grad_norm: float | None = 1.0,
    moment_dtype: str = "float32",
) -> Optimizer:
    """AdamW (arXiv 1711.05101) through optax; defaults are the small-agents paper's (arXiv 2609.28765).

    Args:
      learning_rate: peak.
      warmup_steps: see `Optimizer`.
      decay_steps: see `Optimizer`.
      decay_to: see `Optimizer`.
      decay_shape: see `Optimizer`.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, multiplied by the learning rate.
      no_decay: regular expression; parameters whose path it is found in, and those of fewer than two axes, do not decay
        (our choice; the papers' software decays all of them). `"$^"` decays every matrix.
      max_grad_norm: see `Optimizer`.
      moment_dtype: dtype of the first moment; the second is always float32.

    Raises:
      UserError: a rate, fraction or number of steps out of range.
    """
    if not learning_rate >= 0:
        raise UserError(f"adamw.learning_rate={learning_rate} must not be negative")
    if warmup_steps < 0 or (decay_steps is not None and decay_steps < 1):
        raise UserError(
            f"adamw.warmup_steps={warmup_steps}, decay_steps={decay_steps}: use 0 or more, and None or 1 or more"
        )
    if not 0.0 <= decay_to <= 1.0:
        raise UserError(f"adamw.decay_to={decay_to} is a fraction of the peak; use a value within [0, 1]")
    if decay_shape not in ("linear", "cosine"):
        raise UserError(f"adamw.decay_shape={decay_shape!r} is not an option; use 'linear' or 'cosine'")
    pattern = re.compile(no_decay)

    def decays(params):
        def leaf(path, p):
            return p.ndim >= 2 and not pattern.search(jax.tree_util.keystr(path))

        return jax.tree_util.tree_map_with_path(leaf, params)

    transform = optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=jnp.dtype(moment_dtype)),
        optax.add_decayed_weights(weight_decay, mask=decays),
    )
    return Optimizer(transform, learning_rate, warmup_steps, decay_steps, decay_to, decay_shape, max_grad_norm)
