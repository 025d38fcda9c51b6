"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): recurrent, chunked, and its state at any token.

Per head the state `S [E, V]` follows, with decay `e^g` and write strength `beta`,

    S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.

Shapes: B rows, L tokens, K key heads, H value heads (G = H / K to each key head), E and V sizes of a key and a value,
c tokens in a chunk, N chunks. Everything here runs in float32 or wider, at the highest matmul precision: the state adds
up errors over the whole sequence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from cipo_jax.models.config import DELTA_CHUNK

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def l2_normalised(x, eps: float = 1e-6):
    """`x rsqrt(sum x^2 + eps)` in float32 or wider."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + eps)


def recurrent_delta(q_BLKE, k_BLKE, v_BLHV, log_decay_BLH, beta_BLH, reset_BL=None, initial=None):
    """The rule token by token: the reference, and the step of decoding.

    Args:
      q_BLKE, k_BLKE: normalised (and scaled) queries and keys.
      v_BLHV: values; value head `h` belongs to key head `h // G`.
      log_decay_BLH: `g <= 0`; 0 with `beta` 0 leaves the state alone (padding).
      beta_BLH: write strengths.
      reset_BL: bool, tokens that find a state of zeros; none if None.
      initial: the state `[B, H, E, V]` that token 0 finds; zeros if None.

    Returns:
      `(out_BLHV, final_BHEV)`.
    """
    B, L, K, E = q_BLKE.shape
    H, V = v_BLHV.shape[2:]
    dtype = jnp.promote_types(v_BLHV.dtype, jnp.float32)
    state = jnp.zeros((B, K, H // K, E, V), dtype) if initial is None else initial.reshape(B, K, H // K, E, V)
    reset = jnp.zeros((B, L), bool) if reset_BL is None else reset_BL

    def grouped(x):
        return jnp.moveaxis(x.reshape(B, L, K, H // K, *x.shape[3:]), 1, 0).astype(dtype)

    def step(state, xs):
        q, k, v, g, beta, reset = xs
        state = jnp.where(reset[:, None, None, None, None], 0.0, state * jnp.exp(g)[..., None, None])
        delta = beta[..., None] * (v - _einsum("bkgev,bke->bkgv", state, k))
        state = state + k[:, :, None, :, None] * delta[..., None, :]
        return state, _einsum("bkgev,bke->bkgv", state, q)

    keys = (jnp.moveaxis(x, 1, 0).astype(dtype) for x in (q_BLKE, k_BLKE))
    xs = (*keys, grouped(v_BLHV), grouped(log_decay_BLH), grouped(beta_BLH), jnp.moveaxis(reset, 1, 0))
    if L == 1:  # a decode step; no loop inside the loop
        state, out = step(state, jax.tree.map(lambda x: x[0], xs))
        out = out[None]
    else:
        state, out = jax.lax.scan(step, state, xs)
    return jnp.moveaxis(out, 0, 1).reshape(B, L, H, V), state.reshape(B, H, E, V)


@jax.custom_vjp
def unit_lower_inverse(lower):
    """`(I + lower)^-1` of strictly lower triangular matrices `[..., c, c]`, c a power of two.

    Block doubling: with X the inverse of the diagonal blocks of one size, those of twice the size are `X - X C X` with C
    the blocks below the diagonal. Every factor is a true inverse of bounded size, also on near-parallel keys, where the
    shorter product of `I + (-lower)^(2^i)` overflows.
    """
    c = lower.shape[-1]
    i, j = jnp.arange(c)[:, None], jnp.arange(c)[None]
    inverse = jnp.broadcast_to(jnp.eye(c, dtype=lower.dtype), lower.shape)
    size = 1
    while size < c:
        block = ((i // (2 * size)) == (j // (2 * size))) & ((i // size) != (j // size))
        below = jnp.where(jnp.expand_dims(block, range(lower.ndim - 2)), lower, 0)
        if size == 1:
            inverse = inverse - below
        else:
            inverse = inverse - _einsum("...ij,...jk,...kl->...il", inverse, below, inverse)
        size *= 2
    return inverse


def _inverse_forward(lower):
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse, d_inverse):
    d = -_einsum("...ji,...jk,...lk->...il", inverse, d_inverse, inverse)
    return (jnp.tril(d, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DeltaScan:
    """What a chunked scan leaves behind; enough for `states_at`.

    Attributes:
      out: `[B, L, H, V]`.
      final: the state `[B, H, E, V]` after the last token.
      start: `[N, B, K, G, E, V]`, the state that each chunk found.
      key: `[N, B, K, c, E]`.
      write: `[N, B, K, G, c, V]`, what each token wrote along its key.
      log_decay: `[N, B, K, G, c]`.
      document: `[N, B, c]` int32, a number per token that grows at every reset.
      before: `[N, B]` int32, the document whose state each chunk found.
    """

    out: jax.Array
    final: jax.Array
    start: jax.Array
    key: jax.Array
    write: jax.Array
    log_decay: jax.Array
    document: jax.Array
    before: jax.Array


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def chunked_delta(
    q_BLKE,
    k_BLKE,
    v_BLHV,
    log_decay_BLH,
    beta_BLH,
    reset_BL=None,
    initial=None,
    restart_BN=None,
    restart_state=None,
    chunk: int = DELTA_CHUNK,
) -> DeltaScan:
    """The rule in chunks of matrix products; equal to `recurrent_delta`.

    With `G_i` the decay summed up inside the chunk and `D_ij = g_(j+1) + .. + g_i`, what the tokens write solves
    `(I + L) u = beta (v - e^G k S)`, `L_ij = beta_i k_i.k_j e^(D_ij)` for `j < i` of the same document. `D` is summed
    directly rather than as `G_i - G_j`, which loses the small differences behind one strong decay.

    Args:
      q_BLKE, k_BLKE, v_BLHV, log_decay_BLH, beta_BLH, reset_BL, initial: see `recurrent_delta`.
      restart_BN: bool, chunks that start from `restart_state` instead of the state before them; none if None.
      restart_state: `[N, B, H, E, V]`.
      chunk: tokens per chunk, a power of two; lowered for shorter rows.
    """
    B, L, K, E = q_BLKE.shape
    H, V = v_BLHV.shape[2:]
    G = H // K
    c = min(chunk, _power_of_two(L))
    N = -(-L // c)
    dtype = jnp.promote_types(v_BLHV.dtype, jnp.float32)

    def tiles(x, *heads):  # [B, L, heads.., rest..] -> [N, B, heads.., c, rest..]
        x = jnp.pad(x, ((0, 0), (0, N * c - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(B, N, c, *heads, *x.shape[3:]) if heads else x.reshape(B, N, c)
        return jnp.moveaxis(jnp.moveaxis(x, 2, 2 + len(heads)), 1, 0)

    q, k = tiles(q_BLKE.astype(dtype), K), tiles(k_BLKE.astype(dtype), K)
    v, g, beta = (tiles(x.astype(dtype), K, G) for x in (v_BLHV, log_decay_BLH, beta_BLH))
    document = jnp.zeros((B, L), jnp.int32) if reset_BL is None else jnp.cumsum(reset_BL, 1, dtype=jnp.int32)
    document = tiles(jnp.pad(document, ((0, 0), (0, N * c - L)), mode="edge"))
    before = jnp.concatenate([jnp.zeros((1, B), jnp.int32), document[:-1, :, -1]])

    i, j = jnp.arange(c)[:, None], jnp.arange(c)[None]
    same = (document[..., :, None] == document[..., None, :]) & (i >= j)[None, None]
    apart = jnp.cumsum(jnp.where((i > j)[None, None, None, None], g[..., :, None], 0.0), -2)
    decay = jnp.exp(jnp.where(same[:, :, None, None], apart, -jnp.inf))
    lower = beta[..., None] * _einsum("nbkie,nbkje->nbkij", k, k)[:, :, :, None] * decay
    solve = unit_lower_inverse(jnp.where((i > j)[None, None, None, None], lower, 0.0))
    inner = _einsum("nbkie,nbkje->nbkij", q, k)[:, :, :, None] * decay
    alive = (document == before[..., None])[:, :, None, None]
    carried = jnp.where(alive, jnp.exp(jnp.cumsum(g, -1)), 0.0)

    state = jnp.zeros((B, K, G, E, V), dtype) if initial is None else initial.astype(dtype).reshape(B, K, G, E, V)
    restart = None
    if restart_BN is not None:
        restart = (jnp.moveaxis(restart_BN, 1, 0), restart_state.astype(dtype).reshape(N, B, K, G, E, V))

    def step(state, xs):
        q, k, v, beta, decay, solve, inner, carried, restart = xs
        if restart is not None:
            state = jnp.where(restart[0][:, None, None, None, None], restart[1], state)
        start, carry = state, carried[..., None]
        read = _einsum("bkie,bkgev->bkgiv", k, state)
        write = _einsum("bkgij,bkgjv->bkgiv", solve, beta[..., None] * (v - carry * read))
        out = carry * _einsum("bkie,bkgev->bkgiv", q, state) + _einsum("bkgij,bkgjv->bkgiv", inner, write)
        kept = decay[..., -1, :, None] * write
        state = carry[..., -1:, :] * state + _einsum("bkje,bkgjv->bkgev", k, kept)
        return state, (start, write, out)

    state, (start, write, out) = jax.lax.scan(step, state, (q, k, v, beta, decay, solve, inner, carried, restart))
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 4, 2).reshape(B, N * c, H, V)[:, :L]
    return DeltaScan(out, state.reshape(B, H, E, V), start, k, write, g, document, before)


def states_at(scan: DeltaScan, place_BR) -> jax.Array:
    """The states `[B, R, H, E, V]` that the tokens at `place_BR` (int32, any token of the row) found; exact.

    Zeros for the first token of a document.
    """
    _, B, K, c, E = scan.key.shape
    G, V = scan.write.shape[3], scan.write.shape[5]
    number, offset, row = place_BR // c, place_BR % c, jnp.arange(B)[:, None]

    def pick(x):
        return x[number, row]

    earlier = jnp.arange(c)[None, None] < offset[..., None]  # [B, R, c]
    g = jnp.where(earlier[:, :, None, None], pick(scan.log_decay), 0.0)
    total = jnp.flip(jnp.cumsum(jnp.flip(g, -1), -1), -1)  # g_j + .. + g_(offset-1)
    after = jnp.concatenate([total[..., 1:], jnp.zeros_like(total[..., :1])], -1)
    document = pick(scan.document)
    own = jnp.take_along_axis(document, offset[..., None], 2)
    weight = jnp.where((earlier & (document == own))[:, :, None, None], jnp.exp(after), 0.0)
    kept = jnp.where(pick(scan.before) == own[..., 0], 1.0, 0.0)[:, :, None, None] * jnp.exp(total[..., 0])
    state = kept[..., None, None] * pick(scan.start)
    state = state + _einsum("brkje,brkgjv->brkgev", pick(scan.key), weight[..., None] * pick(scan.write))
    return state.reshape(*place_BR.shape, K * G, E, V)
