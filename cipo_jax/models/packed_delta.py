"""The delta layers' mixing in packed rows: documents, and copies that start from the state at what they must not see."""

import jax
import jax.numpy as jnp

from cipo_jax.models.config import DELTA_CHUNK
from cipo_jax.models.delta import chunked_delta, states_at
from cipo_jax.models.delta_layer import DeltaInputs


def _back(x, by: int):
    """`x [B, L, ..]` moved `by` tokens later, zeros in front."""
    return x if by == 0 else jnp.pad(x, ((0, 0), (by, 0)) + ((0, 0),) * (x.ndim - 2))[:, : x.shape[1]]


def _masked(x, keep_BL):
    return jnp.where(keep_BL[..., None, None], x, 0)


def _part(inputs: DeltaInputs, places: slice) -> DeltaInputs:
    return DeltaInputs(
        tuple(x[:, places] for x in inputs.streams),
        inputs.kernels,
        inputs.log_decay[:, places],
        inputs.beta[:, places],
    )


def packed_delta(inputs: DeltaInputs, visibility, trajectory: int):
    """Outputs `[B, L, H, V]` of rows `[trajectory | copies]` under a `Visibility`.

    A document's first token finds an empty convolution and a state of zeros. A copy finds the convolution inputs and the
    state that the trajectory's token at the copy's `limit` found: everything before the hidden part, exactly. Holes do
    not exist here: a state cannot forget.

    Args:
      inputs: what the layer projected.
      visibility: of all tokens; trajectory tokens stand at their index.
      trajectory: how many of a row's places, from its start, belong to the trajectory. Copies follow; each must start a
        multiple of `DELTA_CHUNK` places behind the trajectory, else its row is NaN.
    """
    taps = inputs.kernels[0].shape[0]
    vis = jax.tree.map(lambda x: x[:, :trajectory], visibility)
    real = vis.segment == 0
    own = _part(inputs, slice(None, trajectory)).silenced(real)
    mixed = own.convolved(
        [[_masked(_back(x, t), vis.index - t >= vis.start) for t in range(taps)] for x in own.streams]
    )
    scan = chunked_delta(*mixed, own.log_decay, own.beta, real & (vis.index == vis.start))
    if trajectory == inputs.beta.shape[1]:
        return scan.out

    vis = jax.tree.map(lambda x: x[:, trajectory:], visibility)
    copies = _part(inputs, slice(trajectory, None)).silenced(vis.segment > 0)
    place = jnp.arange(vis.index.shape[1], dtype=jnp.int32)[None]
    first = (vis.segment > 0) & (vis.segment != jnp.pad(vis.segment[:, :-1], ((0, 0), (1, 0)), constant_values=-1))
    offset = place - jax.lax.cummax(jnp.where(first, place, 0), axis=1)

    def tap(own_x, x, back):
        source = vis.limit + offset - back  # in the trajectory, for the copy's first tokens
        early = jnp.take_along_axis(own_x, jnp.clip(source, 0, trajectory - 1)[..., None, None], 1)
        early = _masked(early, source >= vis.start)
        return jnp.where((offset >= back)[..., None, None], _back(x, back), early)

    mixed = copies.convolved(
        [[x, *(tap(own_x, x, t) for t in range(1, taps))] for own_x, x in zip(own.streams, copies.streams, strict=True)]
    )
    restart = first[:, ::DELTA_CHUNK]
    states = states_at(scan, jnp.clip(vis.limit[:, ::DELTA_CHUNK], 0, trajectory - 1))
    states = jnp.moveaxis(states, 1, 0)
    out = chunked_delta(*mixed, copies.log_decay, copies.beta, restart_BN=restart, restart_state=states).out
    astray = (first & (place % DELTA_CHUNK != 0)).any(1)
    out = jnp.where(astray[:, None, None, None], jnp.nan, out)
    return jnp.concatenate([scan.out, out], 1)
