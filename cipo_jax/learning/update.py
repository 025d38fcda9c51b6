"""One update: gradients accumulated over microbatches, one optimiser step, in one jitted and donated function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.objective import Metrics
from cipo_jax.learning.state import Optimizer, TrainState
from cipo_jax.types import Array

LogprobFn = Callable[..., tuple[Array, Array | None]]
Objective = Callable[[Array, UpdateBatch, Array | None], tuple[Array, Metrics]]


def make_update(
    logprob_fn: LogprobFn,
    objective: Objective,
    optimizer: Optimizer,
    *,
    state_sharding: Any = None,
    donate: bool = True,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Builds `update(state, batch, learning_rate, *logprob_args) -> (state, metrics)`.

    The gradient is that of `sum(loss) / count` over the whole batch: both are summed over microbatches and divided
    once, so it does not depend on how rows were split. A batch with a non-finite loss or gradient, or with no token in
    the loss, leaves parameters and optimiser state as they are, bit for bit; only `step` advances. This is decided on
    the device.

    Args:
      logprob_fn: `(params, tokens [b, L] i32, length [b] i32, active [b, L] bool, *logprob_args) -> (logprob [b, L] f32,
        entropy [b, L] f32 or None)`. The log-prob of token `j` is read at row `j - 1`; position 0 and tokens that are not
        active may hold anything.
      objective: see `objective.py`.
      optimizer: see `state.py`.
      state_sharding: a `TrainState` of shardings; the new state and the summed gradients (as the parameters) get them.
        None leaves placement to jit.
      donate: reuse the memory of the state passed in; it must not be read afterwards. The batch is never donated.

    Returns:
      The jitted function. `batch` is an `UpdateBatch` of `[M, b, ...]` arrays, `learning_rate` a float32 scalar (it is
      traced: a new rate compiles nothing), `logprob_args` traced arguments such as the temperature. The metrics are
      float32 scalars: those of the objective, `loss_count` (the denominator), `grad_norm` before clipping,
      `update_norm` of the step that was taken, `param_norm` before it, `learning_rate`, and `skipped` (1 for a
      non-finite batch) and `empty` (1 for a batch without a token in the loss).
    """
    param_sharding = None if state_sharding is None else state_sharding.params

    def place(grads):
        return grads if param_sharding is None else jax.lax.with_sharding_constraint(grads, param_sharding)

    def update(state: TrainState, batch: UpdateBatch, learning_rate: Array, *logprob_args):
        def loss_fn(params, micro):
            logprob, entropy = logprob_fn(params, micro.tokens, micro.length, micro.action_mask, *logprob_args)
            return objective(logprob, micro, entropy)

        def accumulate(total, micro):
            grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, micro)
            return place(jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)), metrics

        with jax.named_scope("gradients"):
            zeros = place(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params))
            grads, per_micro = jax.lax.scan(accumulate, zeros, batch)
            sums = {name: _reduce(metric) for name, metric in per_micro.items()}
            loss_sum, count = sums["loss"]
            grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), grads)

        with jax.named_scope("optimizer"):
            grad_norm = optax.tree.norm(grads)
            # The loss sum counts too: a NaN on a clipped token has no gradient.
            finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss_sum)
            taken = finite & (count > 0)
            if optimizer.max_grad_norm is not None:
                scale = jnp.minimum(1.0, optimizer.max_grad_norm / jnp.maximum(grad_norm, 1e-30))
                grads = jax.tree.map(lambda g: g * scale, grads)
            params32 = jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
            direction, opt_state = optimizer.transform.update(grads, state.opt_state, params32)
            step = jax.tree.map(lambda d: -learning_rate * d, direction)
            moved = jax.tree.map(lambda p32, s, p: (p32 + s).astype(p.dtype), params32, step, state.params)
            params = _select(taken, moved, state.params)
            opt_state = _select(taken, opt_state, state.opt_state)

        metrics = {
            name: value[0] / jnp.maximum(value[1], 1.0) if isinstance(value, tuple) else value
            for name, value in sums.items()
        }
        metrics |= {
            "loss_count": count,
            "grad_norm": grad_norm,
            "update_norm": jnp.where(taken, optax.tree.norm(step), 0.0),
            "param_norm": optax.tree.norm(params32),
            "learning_rate": jnp.asarray(learning_rate, jnp.float32),
            "skipped": 1.0 - finite.astype(jnp.float32),
            "empty": (count == 0).astype(jnp.float32),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    shardings = {} if state_sharding is None else {"out_shardings": (state_sharding, None)}
    return jax.jit(update, donate_argnums=(0,) if donate else (), **shardings)


def _reduce(metric):
    """Microbatches' metrics `[M]` as one: (sum, count) pairs add up, scalars keep the largest."""
    if isinstance(metric, tuple):
        return metric[0].sum(), metric[1].sum()
    return metric.max()


def _select(taken: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, old)
