"""Sampling one token per slot; every setting is a traced value, so changing it compiles nothing."""

import dataclasses

import jax
import jax.numpy as jnp

SAMPLERS = ("gumbel", "inverse_cdf")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sampling:
    """How to sample.

    Attributes:
      temperature: logits are divided by it; 0 is greedy, with log-probs at temperature 1.
      top_k: tokens kept, 0 for all.
      top_p: smallest set of likeliest tokens with at least this probability is kept; 1 for all.
    """

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int = 0
    top_p: jax.Array | float = 1.0


def truncate(z_SV, top_k, top_p):
    """`z_SV` with logits outside top-k and top-p at -inf; ties at the border are kept."""

    def cut(z):
        ordered = -jnp.sort(-z, axis=-1)
        k = jnp.where(top_k > 0, top_k, z.shape[-1])
        kth = jax.lax.dynamic_slice_in_dim(ordered, jnp.clip(k, 1, z.shape[-1]) - 1, 1, 1)
        ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
        p = jax.nn.softmax(ordered, -1)
        before = jnp.cumsum(p, -1) - p
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
        return jnp.where(z >= jnp.maximum(kth, least), z, -jnp.inf)

    return jax.lax.cond((top_k > 0) | (top_p < 1.0), cut, lambda z: z, z_SV)


def sample(logits_SV, keys_S, sampling: Sampling, sampler: str = "gumbel"):
    """Draws one token per row.

    Args:
      logits_SV: float32.
      keys_S: one random key per row: what is drawn does not depend on the other rows.
      sampling: the settings.
      sampler: `gumbel` (robust to rounding of the logits) or `inverse_cdf` (one uniform per row; faster on CPU).

    Returns:
      `(token [S] int32, logprob [S] float32)`; the log-prob is that of the distribution that was sampled from.
    """
    greedy = sampling.temperature == 0
    z = logits_SV / jnp.where(greedy, 1.0, sampling.temperature)
    z = truncate(z, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))
    logp = jax.nn.log_softmax(z, -1)

    def draw(logp):
        if sampler == "gumbel":
            noise = jax.vmap(lambda key: jax.random.gumbel(key, logp.shape[1:]))(keys_S)
            return jnp.argmax(logp + noise, -1)
        cdf = jnp.cumsum(jnp.exp(logp), -1)
        u = jax.vmap(lambda key: jax.random.uniform(key, ()))(keys_S)[:, None] * cdf[:, -1:]
        return jnp.minimum((cdf <= u).sum(-1), logp.shape[-1] - 1)

    token = jax.lax.cond(greedy, lambda logp: jnp.argmax(logp, -1), draw, logp).astype(jnp.int32)
    return token, jnp.take_along_axis(logp, token[:, None], -1)[:, 0]
