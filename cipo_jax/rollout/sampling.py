"""Sampling one token per slot; every setting is a traced value, so changing it compiles nothing.

Everything over the vocabulary is a few passes of elementwise work with a reduction over the second axis of
`[S, V / LANES, LANES]`, which XLA's CPU backend vectorises (an argmax, a cumulative sum or a sort over the last axis it
does not); what was found in one lane is then picked out of that lane alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

SAMPLERS = ("gumbel", "inverse_cdf")

LANES = 128


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
    return jnp.where(z_SV >= least_kept(z_SV, top_k, top_p), z_SV, -jnp.inf)


def least_kept(z_SV, top_k, top_p):
    """The smallest logit inside top-k and top-p, `[S, 1]`: -inf if all are.

    Exact: a binary search over the bits of a float, in as many passes over the logits as it has bits (a sort of a
    vocabulary takes XLA's CPU backend longer).
    """

    def search(z):
        order = _ordered(z)

        def largest(enough):
            """The largest key for which `enough(keys at least as large)`; 0 if there is none."""

            def bit(i, found):
                tried = found | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
                return jnp.where(enough(order >= tried), tried, found)

            return jax.lax.fori_loop(0, 32, bit, jnp.zeros((len(z), 1), jnp.uint32))

        kth = largest(lambda kept: kept.sum(-1, keepdims=True) >= jnp.where(top_k > 0, top_k, z.shape[-1]))
        weight = jnp.where(order >= kth, jnp.exp(z - z.max(-1, keepdims=True)), 0.0)
        wanted = jnp.where(top_p < 1.0, top_p, jnp.inf) * weight.sum(-1, keepdims=True)
        nucleus = largest(lambda kept: jnp.where(kept, weight, 0.0).sum(-1, keepdims=True) >= wanted)
        return _float_of(jnp.maximum(kth, nucleus))

    return jax.lax.cond((top_k > 0) | (top_p < 1.0), search, lambda z: jnp.full((len(z), 1), -jnp.inf, z.dtype), z_SV)


def _ordered(x):
    """uint32 keys in the order of float32 `x`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _float_of(order):
    """The inverse of `_ordered`; -inf for keys below all numbers'."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32(0x7FFFFFFF), ~order)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(order <= jnp.uint32(0x007FFFFF), -jnp.inf, x)


def sample(logits_SV, keys_S, sampling: Sampling, sampler: str = "gumbel"):
    """Draws one token per row.

    Args:
      logits_SV: float32.
      keys_S: one random key per row: what is drawn does not depend on the other rows.
      sampling: the settings.
      sampler: `gumbel` (the token with the largest sum of logit and Gumbel noise, which belongs to the key and the token
        alone: robust to rounding of the logits) or `inverse_cdf` (one uniform number per row; a little faster).

    Returns:
      `(token [S] int32, logprob [S] float32)`; the log-prob is that of the distribution that was sampled from.
    """
    greedy = sampling.temperature == 0
    scale = 1.0 / jnp.where(greedy, 1.0, sampling.temperature)
    least = least_kept(logits_SV * scale, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))
    logits = _lanes(logits_SV)

    def kept(logits, least):
        """The logits that are drawn from; computed anew in every pass rather than kept."""
        z = logits * scale
        return jnp.where(z >= least, z, -jnp.inf)

    def likeliest(logits, least, top):
        lane = jnp.argmax(kept(logits, least[..., None]).max(1), -1)
        place, column = _column(logits, lane)
        return _pick(place, jnp.argmax(column, -1))

    def draw(logits, least, top):
        seed = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys_S)
        z = kept(logits, least[..., None]) - top[..., None]
        if sampler == "gumbel":
            # Gumbel's argmax is the first arrival of exponential clocks: one logarithm a token in place of two.
            lane = jnp.arange(LANES, dtype=jnp.uint32)[None]
            every = (jnp.arange(z.shape[1], dtype=jnp.uint32) * LANES)[:, None] + lane
            arrival = _exponential(seed[..., None, None], every[None]) * jnp.exp(-z)
            place, column = _column(logits, jnp.argmin(arrival.min(1), -1))
            arrival = _exponential(seed[..., None], place.astype(jnp.uint32)) * jnp.exp(top - kept(column, least))
            return _pick(place, jnp.argmin(arrival, -1))
        uniform = (seed[:, :1] >> 8).astype(jnp.float32) * 2.0**-24
        lane, rest = _inverse(jnp.exp(z).sum(1), uniform)
        place, column = _column(logits, lane)
        return _pick(place, _inverse(jnp.exp(kept(column, least) - top), rest)[0])

    # What is largest stays at most 0 behind every rounding, so exp cannot overflow.
    top = kept(logits, least[..., None]).max((1, 2))[:, None]
    token = jax.lax.cond(greedy, likeliest, draw, logits, least, top)
    mass = jnp.exp(kept(logits, least[..., None]) - top[..., None]).sum(1).sum(-1)
    chosen = jnp.take_along_axis(logits_SV, token[:, None], 1)[:, 0] * scale
    return token, chosen - top[:, 0] - jnp.log(mass)


def _lanes(logits_SV):
    """`[S, V / LANES, LANES]`; token `v` is at `divmod(v, LANES)`."""
    S, V = logits_SV.shape
    if V % LANES:
        logits_SV = jnp.pad(logits_SV, ((0, 0), (0, -V % LANES)), constant_values=-jnp.inf)
    return logits_SV.reshape(S, -1, LANES)


def _column(logits_SNL, lane_S):
    """The tokens of one lane per row and their logits, both `[S, N]`."""
    place = jnp.arange(logits_SNL.shape[1], dtype=jnp.int32)[None] * LANES + lane_S[:, None].astype(jnp.int32)
    return place, jnp.take_along_axis(logits_SNL, lane_S[:, None, None], 2)[..., 0]


def _pick(x_SN, at_S):
    return jnp.take_along_axis(x_SN, at_S[:, None], 1)[:, 0]


def _inverse(weight_SN, share_S1):
    """Where the running sum of `weight` passes `share` of its total, and the share of that weight that is left over."""
    total = jnp.cumsum(weight_SN, -1)
    # Below the total: behind it are only weights of 0.
    wanted = jnp.minimum(share_S1 * total[:, -1:], jnp.nextafter(total[:, -1:], 0.0))
    at = (total <= wanted).sum(-1)
    own = _pick(weight_SN, at)[:, None]
    left = (wanted - (_pick(total, at)[:, None] - own)) / own
    return at, jnp.clip(left, 0.0, 1.0)


def _exponential(seed_S2, token):
    """Exponential noise that is a function of two seeds per row and the token: `-log` of a uniform number.

    The bits are Murmur3's finaliser (Appleby, public domain) over a Weyl sequence, one seed into each of two rounds:
    enough for sampling, at a tenth of Threefry's cost. Small values, which win, keep all digits.
    """
    bits = _mixed(_mixed(token * jnp.uint32(0x9E3779B9) ^ seed_S2[:, 0]) ^ seed_S2[:, 1])
    v = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.where(v < 1e-3, v * (1.0 + v * (0.5 + v / 3.0)), -jnp.log(1.0 - v))


def _mixed(h):
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
