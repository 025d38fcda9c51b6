"""The gated delta rule: chunks equal single tokens, states at any token are exact, documents and copies are isolated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.models.delta import chunked_delta, l2_normalised, recurrent_delta, states_at, unit_lower_inverse
from cipo_jax.models.delta_layer import DeltaInputs

B, K, H, E, V = 2, 3, 6, 16, 12


def random_inputs(L, dtype=np.float64, seed=0):
    """Unit keys, decays from none to nearly total, write strengths up to 1; keys of row 1 have a mean cosine of 0.9."""
    rng = np.random.default_rng(seed + L)
    correlation = np.array([0.0, 0.9])[:, None, None, None]
    common = rng.normal(size=(B, 1, K, E))
    keys = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * rng.normal(size=(B, L, K, E))
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    q = rng.normal(size=(B, L, K, E)) / E
    v = rng.normal(size=(B, L, H, V))
    decay = -np.exp(rng.uniform(-8, 3, size=(B, L, H)))
    beta = 1 / (1 + np.exp(-rng.normal(2, 2, size=(B, L, H))))
    return [jnp.asarray(x.astype(dtype)) for x in (q, unit, v, decay, beta)]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 257])
def test_chunked_equals_recurrent(length):
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        with jax.enable_x64(dtype == np.float64):
            inputs = random_inputs(length, dtype)
            initial = jnp.asarray(np.random.default_rng(1).normal(size=(B, H, E, V)).astype(dtype))
            want, want_state = jax.jit(recurrent_delta)(*inputs, initial=initial)
            scan = jax.jit(chunked_delta)(*inputs, initial=initial)
            assert scan.out.dtype == dtype
            np.testing.assert_allclose(scan.out, want, atol=tolerance)
            np.testing.assert_allclose(scan.final, want_state, atol=tolerance)


def test_gradients_of_chunked_equal_those_of_recurrent():
    with jax.enable_x64(True):
        inputs = random_inputs(70)
        weight = jnp.asarray(np.random.default_rng(2).normal(size=(B, 70, H, V)))
        slow = jax.jit(jax.grad(lambda *x: (recurrent_delta(*x)[0] * weight).sum(), range(5)))(*inputs)
        fast = jax.jit(jax.grad(lambda *x: (chunked_delta(*x, chunk=16).out * weight).sum(), range(5)))(*inputs)
        for a, b in zip(fast, slow, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-10)


def test_inverse_stays_finite_on_parallel_keys():
    lower = jnp.tril(jnp.full((64, 64), 0.999, jnp.float32), -1)
    want = np.linalg.inv(np.eye(64) + np.asarray(lower, np.float64))
    np.testing.assert_allclose(unit_lower_inverse(lower), want, atol=1e-5)


def test_states_at_any_token_and_document_borders():
    with jax.enable_x64(True):
        inputs = random_inputs(150)
        reset = np.zeros((B, 150), bool)
        reset[0, [0, 64, 100]], reset[1, [31, 32]] = True, True
        places = np.array([[0, 63, 64, 65, 100, 149], [0, 31, 33, 64, 127, 129]])
        scan = jax.jit(chunked_delta)(*inputs, jnp.asarray(reset))
        got = jax.jit(states_at)(scan, jnp.asarray(places))
        out, _ = jax.jit(recurrent_delta)(*inputs, jnp.asarray(reset))
        np.testing.assert_allclose(scan.out, out, atol=1e-12)
        for b in range(B):
            for r, place in enumerate(places[b]):
                first = max([0, *(i for i in range(place + 1) if reset[b, i])])
                alone = [x[b : b + 1, first:place] for x in inputs]
                want = jax.jit(recurrent_delta)(*alone)[1] if place > first else jnp.zeros((1, H, E, V))
                np.testing.assert_allclose(got[b, r], want[0], atol=1e-12)


def packed_inputs(rng, L, scale=1.0):
    shapes = [(B, L, K, E), (B, L, K, E), (B, L, H, V)]
    return DeltaInputs(
        tuple(jnp.asarray(rng.normal(size=s)) * scale for s in shapes),
        tuple(jnp.asarray(np.random.default_rng(9).normal(size=(4, *s[2:]))) for s in shapes),
        jnp.asarray(-np.exp(rng.uniform(-6, 1, size=(B, L, H)))),
        jnp.asarray(rng.uniform(0, 1, size=(B, L, H))),
    )


@jax.jit
def mixed_alone(part):
    """One row on its own: an empty convolution, a state of zeros, token by token."""
    length = part.beta.shape[1]
    taps = [[jnp.pad(x, ((0, 0), (t, 0), (0, 0), (0, 0)))[:, :length] for t in range(4)] for x in part.streams]
    q, k, v = part.convolved(taps)
    return recurrent_delta(q, k, v, part.log_decay, part.beta)[0][0]


def alone(inputs, row, places):
    """The mixing of the given places of one row, as a row of their own."""
    part = DeltaInputs(
        tuple(x[row : row + 1, places] for x in inputs.streams),
        inputs.kernels,
        inputs.log_decay[row : row + 1, places],
        inputs.beta[row : row + 1, places],
    )
    return mixed_alone(part)


def test_documents_of_a_row_and_padding_do_not_touch_each_other():
    with jax.enable_x64(True):
        inputs = packed_inputs(np.random.default_rng(0), 140)
        start = np.zeros((B, 140), np.int32)
        start[0, 2:70], start[0, 70:] = 2, 70
        mask = np.arange(140)[None] < np.array([[140], [90]])
        visibility = Visibility.causal(jnp.asarray(mask), jnp.asarray(start))
        got = jax.jit(lambda i: PackedContext(visibility).delta(i, None, 0)[0])(inputs)
        for row, places in ((0, range(2)), (0, range(2, 70)), (0, range(70, 140)), (1, range(90))):
            places = np.array(places)
            np.testing.assert_allclose(got[row, places], alone(inputs, row, places), atol=1e-11)


def copies_visibility(T, S, copies):
    """Rows of `T` trajectory tokens and `S` places of copies `(place, first hidden, first copied, end)`."""
    base = Visibility.causal(jnp.ones((B, T), bool))
    fields = {name: np.zeros((B, S), np.int32) for name in ("index", "start", "limit", "hole_start", "hole_end")}
    segment = np.full((B, S), -1, np.int32)
    for number, (row, at, hidden, first, end) in enumerate(copies, 1):
        here = slice(at, at + end - first)
        segment[row, here], fields["index"][row, here] = number, np.arange(first, end)
        fields["limit"][row, here] = hidden
    return base.concatenate(Visibility(segment=jnp.asarray(segment), **{k: jnp.asarray(v) for k, v in fields.items()}))


def test_copies_start_from_the_state_before_what_they_must_not_see():
    T, S = 100, 192
    copies = [(0, 0, 37, 50, 90), (0, 64, 2, 60, 61), (1, 0, 64, 70, 100), (1, 128, 1, 3, 8), (0, 128, 90, 92, 100)]
    with jax.enable_x64(True):
        inputs = packed_inputs(np.random.default_rng(1), T + S)
        visibility = copies_visibility(T, S, copies)
        got = jax.jit(lambda i: PackedContext(visibility, trajectory=T).delta(i, None, 0)[0])(inputs)
        for row, at, hidden, first, end in copies:
            places = np.array([*range(hidden), *range(T + at, T + at + end - first)])
            want = alone(inputs, row, places)[hidden:]
            np.testing.assert_allclose(got[row, T + at : T + at + end - first], want, atol=1e-11)


def test_a_copy_off_the_grid_is_nan_not_wrong():
    inputs = packed_inputs(np.random.default_rng(1), 90)
    visibility = copies_visibility(50, 40, [(0, 8, 10, 20, 30)])
    out = jax.jit(lambda i: PackedContext(visibility, trajectory=50).delta(i, None, 0)[0])(inputs)
    assert np.isnan(np.asarray(out[0, 50:])).all()
    assert np.isfinite(np.asarray(out[:, :50])).all()


def test_l2_norm_of_a_zero_vector_is_zero():
    assert np.asarray(l2_normalised(jnp.zeros((2, 3)))).tolist() == [[0.0] * 3] * 2
