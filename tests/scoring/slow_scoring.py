"""The slow definition of every counterfactual: a forward of the row as it would have been, one per turn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.models.delta import recurrent_delta
from cipo_jax.scoring.counterfactuals import Masked, RandomSpan, Removed, Window, drawn, evidence_of
from cipo_jax.scoring.passages import OnlyPassages, Replaced
from cipo_jax.types import Role, Trajectories

VOCABULARY = 54
WIDTH = 160  # one padded width: everything compiles once
WIDE = dict(dtype="float64", param_dtype="float64")
SOFTMAX = DecoderConfig(**WIDE, vocab_size=VOCABULARY, width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
HYBRID = DecoderConfig(
    **WIDE, vocab_size=VOCABULARY, width=32, depth=4, heads=4, kv_heads=2, head_dim=8, ffn=48, period=("delta", "attention"),
    rotary=0.25, gated=True, zero_centred=True, delta_key_heads=2, delta_value_heads=4, delta_key_dim=8, delta_value_dim=8,
)  # fmt: skip
CONFIGS = {"softmax": SOFTMAX, "hybrid": HYBRID}


def one_device() -> ShardingRules:
    return ShardingRules(mesh(devices=jax.devices()[:1]))


def policy(name: str):
    graph, params = init_decoder(CONFIGS[name], 0, one_device())
    return graph, jax.tree.map(lambda x: x * 1.5, params)  # sharper than at init: hiding must matter


class Plain:
    """Softmax over one explicit mask; the delta rule token by token."""

    def __init__(self, mask_BLL):
        self.mask = mask_BLL

    def attention(self, q, k, v, cache, layer):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        s = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(jnp.where(self.mask[:, None], s, -1e30), -1), v), cache

    def delta(self, inputs, cache, layer):
        def back(x, by):
            return jnp.pad(x, ((0, 0), (by, 0), (0, 0), (0, 0)))[:, : x.shape[1]]

        q, k, v = inputs.convolved([[back(x, t) for t in range(len(inputs.kernels[0]))] for x in inputs.streams])
        return recurrent_delta(q, k, v, inputs.log_decay, inputs.beta)[0], cache


@functools.partial(jax.jit, static_argnums=0)
def plain_log_softmax(graph, params, ids, positions, mask):
    model = nnx.merge(graph, params)
    return jax.nn.log_softmax(model.logits(model(ids, positions, Plain(mask))[0]))


@functools.partial(jax.jit, static_argnums=0)
def _plain(graph, params, ids, positions, mask):
    logp = plain_log_softmax(graph, params, ids, positions, mask)
    return jnp.pad(jnp.take_along_axis(logp[:, :-1], ids[:, 1:, None], -1)[..., 0], ((0, 0), (1, 0)))


def plain_logprobs(policy, rows, batch=48) -> list[np.ndarray]:
    """Log-probs at their own index of each `(ids, positions, mask or None for causal)`."""
    out = []
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        ids, positions = np.zeros((2, batch, WIDTH), np.int32)
        mask = np.broadcast_to(np.eye(WIDTH, dtype=bool), (batch, WIDTH, WIDTH)).copy()
        for i, (row, where, seen) in enumerate(part):
            n = len(row)
            ids[i, :n], positions[i, :n] = row, where
            mask[i, :n, :n] = np.tril(np.ones((n, n), bool)) if seen is None else seen
        values = np.asarray(_plain(*policy, ids, positions, mask))
        out += [values[i, : len(row)] for i, (row, _, _) in enumerate(part)]
    return out


def slow_rows(kind, trajectories: Trajectories, b: int, supportive=None):
    """Per turn `(turn, (ids, positions, mask), {scored place: its index in ids})` by the definition of `kind`."""
    ids = np.asarray(trajectories.tokens[b, : trajectories.length[b]])
    out = []
    for turn in range(trajectories.action_span.shape[1] - 1):
        span = getattr(kind, "evidence_span", "content")
        e0, e1 = evidence_of(trajectories, b, turn, span)
        count = kind.actions if isinstance(kind, Window) else 1
        actions = trajectories.action_span[b, turn + 1 :][:count]
        scored = [j for a0, a1 in actions for j in range(a0, a1)]
        if e1 <= e0 or not scored:
            continue
        hidden = list(range(e0, e1))
        if isinstance(kind, RandomSpan):
            n = min(e1 - e0, e0 - 1)
            start = int(drawn(kind.seed, trajectories, b, turn, e0).integers(1, e0 - n + 1))
            hidden = list(range(start, start + n))
        if isinstance(kind, OnlyPassages):
            gone = [k == kind.keep if isinstance(kind.keep, int) else supportive[turn, k] != (kind.keep == "supportive")
                    for k in range(trajectories.passage_span.shape[2])]  # fmt: skip
            hidden = [j for (s, e), g in zip(trajectories.passage_span[b, turn], gone) if g for j in range(s, e)]
            if not hidden:
                continue
        if isinstance(kind, Replaced):
            pool = kind.passages
            text = pool[int(drawn(kind.seed, trajectories, b, turn, e0).integers(len(pool)))]
            swapped = ids.copy()
            swapped[e0:e1] = np.resize(text, e1 - e0)
            out.append((turn, (swapped, np.arange(len(ids)), None), {j: j for j in scored}))
        elif isinstance(kind, Masked) and (kind.mask_rows != "post_evidence" or kind.gdn_mask == "unmasked"):
            first = {"post_evidence": e1, "predictor": scored[0] - 1, "action": scored[0]}[kind.mask_rows]
            mask = np.tril(np.ones((len(ids), len(ids)), bool))
            mask[max(first, e1) :, e0:e1] = False
            out.append((turn, (ids, np.arange(len(ids)), mask), {j: j for j in scored}))
        else:
            kept = [j for j in range(scored[-1] + 1) if j not in set(hidden)]
            contiguous = isinstance(kind, Removed) or getattr(kind, "contiguous", False)
            positions = np.arange(len(kept)) if contiguous else np.asarray(kept)
            out.append((turn, (ids[kept], positions, None), {j: kept.index(j) for j in scored}))
    return out


def random_trajectories(rng, rows, turns=3, length=WIDTH, vocab=VOCABULARY, longest=24) -> Trajectories:
    """Rows of prompt, then action / observation pairs; empty and length-1 actions and untagged evidence among them."""
    passages = 3
    shape = (rows, length)
    out = dict(
        tokens=np.zeros(shape, np.int32), role=np.zeros(shape, np.int8), turn=np.full(shape, -1, np.int8),
        behaviour_logprob=np.zeros(shape, np.float32), length=np.zeros(rows, np.int32),
        group=np.arange(rows, dtype=np.int32) // 2, stop_reason=np.ones(rows, np.int32),
        passage_span=np.zeros((rows, turns + 1, passages, 2), np.int32),
        passage_row=np.full((rows, turns + 1, passages), -1, np.int32),
    )  # fmt: skip
    spans = {k: np.zeros((rows, turns + 1, 2), np.int32) for k in ("action", "evidence", "content")}
    for b in range(rows):
        at = int(rng.integers(2, 8))
        out["role"][b, :at] = Role.PROMPT
        n_turns = int(rng.integers(0, turns + 1))
        for t in range(n_turns + 1):
            n = int(rng.choice([0, 1, 3, 6])) if t else int(rng.integers(1, 5))
            spans["action"][b, t] = (at, at + n) if n else (0, 0)
            out["role"][b, at : at + n], out["turn"][b, at : at + n] = Role.ACTION, t
            at += n
            if t < n_turns:
                n, tags = int(rng.integers(1, longest)), int(rng.integers(0, 3))
                spans["evidence"][b, t] = at, at + n + 2 * tags
                spans["content"][b, t] = at + tags, at + tags + n
                cuts = np.unique(rng.integers(1, n, passages - 1)) if n > 1 else []
                edges = at + tags + np.asarray([0, *cuts, n])
                for k in range(len(edges) - 1):
                    out["passage_span"][b, t, k], out["passage_row"][b, t, k] = edges[k : k + 2], k
                n += 2 * tags
                out["role"][b, at : at + n], out["turn"][b, at : at + n] = Role.OBSERVATION, t
                at += n
        assert at <= length
        out["length"][b] = at
        out["tokens"][b, :at] = rng.integers(0, vocab, at)
    spans = {f"{name}_span": value for name, value in spans.items()}
    return Trajectories(**out, **spans)
