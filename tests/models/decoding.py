"""What the tests of decoders share: loading, whole forwards, cached forwards, gradients by tensor name."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.models.names import tensors
from cipo_jax.models.weights import Loaded, load_decoder


def one_device() -> ShardingRules:
    return ShardingRules(mesh(devices=jax.devices()[:1]))


def load(path: Path, **overrides) -> Loaded:
    return load_decoder(path, one_device(), **overrides)


@functools.partial(jax.jit, static_argnums=0)
def _full(graph, params, tokens, lengths):
    model = nnx.merge(graph, params)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    visibility = Visibility.causal(index < lengths[:, None])
    return model.logits(model(tokens, index, PackedContext(visibility, 64))[0])


def full(loaded: Loaded, tokens, lengths=None) -> np.ndarray:
    """float32 logits `[B, L, V]` of whole rows."""
    tokens = jnp.asarray(tokens, jnp.int32)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    return np.asarray(_full(loaded.graph, loaded.params, tokens, jnp.asarray(lengths, jnp.int32)))


@functools.partial(jax.jit, static_argnums=(0, 6))
def _step(graph, params, tokens, cache, filled, count, places):
    model = nnx.merge(graph, params)
    context = CachedContext(filled, count, tokens.shape[1], places)
    hidden, cache = model(tokens, context.positions, context, cache)
    return model.logits(hidden), cache


def cached(loaded: Loaded, tokens, lengths, chunks) -> np.ndarray:
    """The same logits from cached decoding, fed in `chunks` of tokens; garbage behind each row's length."""
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    places = sum(chunks) + 3
    tokens = jnp.pad(tokens, ((0, 0), (0, places - tokens.shape[1])))
    cache = KVCache.zeros(loaded.config, len(tokens), places)
    # What a recycled slot holds must not be seen.
    cache = jax.tree.map(lambda x: jnp.full_like(x, 7.0), cache)
    filled, at, out = jnp.zeros_like(lengths), 0, []
    for chunk in chunks:
        count = jnp.clip(lengths - at, 0, chunk)
        logits, cache = _step(loaded.graph, loaded.params, tokens[:, at : at + chunk], cache, filled, count, places)
        out.append(logits)
        filled, at = filled + count, at + chunk
    return np.concatenate(out, 1)


def loss_and_gradients(loaded: Loaded, tokens) -> tuple[float, dict[str, np.ndarray]]:
    """Mean next-token cross-entropy, and its gradient by the checkpoint's tensor names."""
    tokens = jnp.asarray(tokens, jnp.int32)

    def loss(params):
        logits = _full(loaded.graph, params, tokens, jnp.full(len(tokens), tokens.shape[1]))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2)
        return -picked.mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(loaded.params)
    return float(value), by_tensor(loaded.config, grads)


def by_tensor(config, params) -> dict[str, np.ndarray]:
    """Parameters (or their gradients) as a checkpoint's tensors."""
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    found = {}
    for tensor in tensors(config):
        out = found[tensor.name] = np.empty(tensor.shape, np.float32)
        for part in tensor.parts:
            value = values[part.path]
            part.view(out)[...] = value if part.period is None else value[part.period]
    return found
