"""The obvious rollout that the compiled one has to equal: a full forward per token, text search for stops, retrieval on the
spot. Everything a decision needs comes with its margin, so that ties within rounding can be told from errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.protocols.base import INVALID_ACTION, RETRIEVAL_FAILED, ActionKind
from cipo_jax.rollout import sampling
from cipo_jax.types import Role, StopReason


def row_key(key, question: int, sample: int):
    """The random key of a trajectory."""
    return jax.random.fold_in(jax.random.fold_in(key, question), sample)


def gumbel(key, vocabulary: int):
    """The noise of every token."""
    seed = jax.random.bits(key, (2,), jnp.uint32)
    return -jnp.log(sampling._exponential(seed[None], jnp.arange(vocabulary, dtype=jnp.uint32)))


def decide(logits_V, key, temperature):
    """`(token, log-probs [V], margin)`; the margin, in logits, is by how much the runner-up missed."""
    z = logits_V / jnp.where(temperature == 0, 1.0, temperature)
    logprobs = jax.nn.log_softmax(z)
    noise = gumbel(key, z.shape[0])
    perturbed = jnp.where(temperature == 0, logprobs, logprobs + noise)
    token = jnp.argmax(perturbed)
    second = jnp.where(jnp.arange(z.shape[0]) == token, -jnp.inf, perturbed).max()
    return token, logprobs, (perturbed[token] - second) * jnp.where(temperature == 0, 1.0, temperature)


class PlainRow:
    """One trajectory, token by token.

    Attributes:
      ids, roles, logprobs, margins: per token; log-prob and margin 0 off actions.
      spans: `action`, `evidence` and `content`, one entry per action.
      reason: why it ended, None while it goes on.
    """

    def __init__(self, environment, config, question):
        self.environment, self.config, self.question = environment, config, question
        self.ids = list(environment.protocol.prompt_ids(question.question))
        self.roles = [Role.PROMPT] * len(self.ids)
        self.logprobs, self.margins = [0.0] * len(self.ids), [np.inf] * len(self.ids)
        self.spans = {"action": [], "evidence": [], "content": []}
        self.reason, self.start = None, len(self.ids)

    def put(self, token: int, logprob: float, margin: float) -> None:
        """Takes a sampled token and does what follows from it."""
        c, protocol = self.config, self.environment.protocol
        self._append([int(token)], Role.ACTION, [float(logprob)], [float(margin)])
        action = self.ids[self.start :]
        text = protocol.tokenizer.decode(action)
        ends = sorted((text.find(stop) + len(stop), stop) for stop in protocol.stop_strings if stop in text)
        silent = action[-1] in protocol.end_of_turn_ids or len(action) >= c.action_tokens
        full = len(self.ids) >= c.total_tokens
        if not (ends or silent or full):
            return
        for name, span in (("action", (self.start, len(self.ids))), ("evidence", (0, 0)), ("content", (0, 0))):
            self.spans[name].append(span)
        if ends and ends[0][1] in protocol.terminal_stops:
            self.reason = StopReason.ANSWER
        elif full:
            self.reason = StopReason.TOKEN_LIMIT
        elif len(self.spans["action"]) > c.max_turns:
            self.reason = StopReason.TURN_LIMIT
        elif not ends and not protocol.corrects_invalid:
            self.reason = StopReason.END_OF_TURN
        else:
            self._observe(protocol.tokenizer.decode(action[-c.query_tokens :]) if ends else "")

    def _observe(self, call: str) -> None:
        c, protocol = self.config, self.environment.protocol
        budget = min(c.total_tokens - 1 - len(self.ids), c.observation_tokens)
        action = protocol.parse_action(call)
        if action.kind is ActionKind.SEARCH:
            try:
                found = self.environment.retrievers[self.question.corpus].retrieve([action.query], c.top_k)[0]
                seen = protocol.observe(found, budget)
            except Exception:
                seen = protocol.correction(RETRIEVAL_FAILED)
        else:
            seen = protocol.correction(INVALID_ACTION)
        if not seen.ids or len(seen.ids) > budget:
            self.reason = StopReason.TOKEN_LIMIT
            return
        if seen.content[1] > seen.content[0]:
            self.spans["evidence"][-1] = (len(self.ids), len(self.ids) + len(seen.ids))
            self.spans["content"][-1] = tuple(len(self.ids) + x for x in seen.content)
        self._append(seen.ids, Role.OBSERVATION, [0.0] * len(seen.ids), [np.inf] * len(seen.ids))
        self.start = len(self.ids)

    def _append(self, ids, role, logprobs, margins) -> None:
        self.ids += ids
        self.roles += [role] * len(ids)
        self.logprobs += logprobs
        self.margins += margins


@dataclasses.dataclass
class Plain:
    """Plain rollouts of one policy.

    Attributes:
      graph, params: the decoder.
      config: sizes, as the compiled rollout's.
      environment: whose protocol and retrievers are used.
    """

    graph: nnx.GraphDef
    params: object
    config: object
    environment: object

    def _hidden(self, params, ids_BL, n_B):
        model = nnx.merge(self.graph, params)
        positions = jnp.broadcast_to(jnp.arange(ids_BL.shape[1], dtype=jnp.int32)[None], ids_BL.shape)
        visibility = Visibility.causal(positions < n_B[:, None])
        return model, model(ids_BL, positions, PackedContext(visibility, 256))[0]

    @functools.cached_property
    def _step(self):
        @jax.jit
        def step(params, ids_BL, n_B, keys_B, temperature):
            model, hidden = self._hidden(params, ids_BL, n_B)
            logits = model.logits(hidden[jnp.arange(len(n_B)), n_B - 1])
            keys = jax.vmap(jax.random.fold_in)(keys_B, n_B)
            token, logprobs, margin = jax.vmap(decide, (0, 0, None))(logits, keys, temperature)
            return token, jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0], margin

        return step

    def sample(self, questions, key, temperature, samples: int = 1, group: int = 64) -> list[PlainRow]:
        """Trajectories of all questions; each token is drawn from a forward over its whole row, `group` rows at a time."""
        L = self.config.total_tokens
        rows = [PlainRow(self.environment, self.config, q) for q in questions for _ in range(samples)]
        keys = jnp.stack([row_key(key, b // samples, b % samples) for b in range(len(rows))])
        while going := [b for b, row in enumerate(rows) if row.reason is None]:
            for at in range(0, len(going), group):  # of one size: one program
                part = np.resize(going[at : at + group], group)
                ids = np.asarray([rows[b].ids + [0] * (L - len(rows[b].ids)) for b in part], np.int32)
                n = np.asarray([len(rows[b].ids) for b in part], np.int32)
                drawn = jax.device_get(self._step(self.params, ids, n, keys[part], temperature))
                for b, *one in zip(going[at : at + group], *drawn):
                    rows[b].put(*one)
        return rows

    @functools.cached_property
    def _places(self):
        @jax.jit
        def decisions(params, ids_L, n, places_P, key, temperature):
            model, hidden = self._hidden(params, ids_L[None], n[None])

            def one(place):
                token, logprobs, margin = decide(
                    model.logits(hidden[0, place - 1]), jax.random.fold_in(key, place), temperature
                )
                return token, logprobs[ids_L[place]], margin

            return jax.lax.map(one, places_P, batch_size=16)

        return decisions

    def replay(self, question, ids, roles, key, temperature, pad: int = 64) -> tuple[PlainRow, np.ndarray]:
        """A trajectory forced to sampled `ids`, and what would have been drawn in their places.

        One forward gives the logits at all places, which a forward per token gives one by one; so as long as all draws are
        the forced ids this is the rollout token by token, by induction over the tokens.

        Raises:
          KeyError: a token has to be sampled where `roles` do not say ACTION.
        """
        places = np.flatnonzero(np.asarray(roles) == Role.ACTION)
        padded = np.pad(np.asarray(ids, np.int32), (0, -len(ids) % pad))
        asked = np.pad(places, (0, -len(places) % 64), constant_values=1)
        drawn = jax.device_get(self._places(self.params, padded, len(ids), asked, key, temperature))
        at = {int(place): one for place, *one in zip(places, *drawn)}
        row, tokens = PlainRow(self.environment, self.config, question), np.array(ids)
        while row.reason is None and len(row.ids) < len(ids):
            place = len(row.ids)
            tokens[place], logprob, margin = at[place]
            row.put(ids[place], logprob, margin)
        return row, tokens

    @functools.cached_property
    def _difference(self):
        c = self.config

        @jax.jit
        def difference(params, ids_BL, n_B, prompt_B):
            model, hidden = self._hidden(params, ids_BL, n_B)
            B, L = ids_BL.shape
            cache = KVCache.zeros(model.config, B, L)

            def forward(cache, filled, count, width):
                context = CachedContext(filled, count, width, L)
                tokens = jnp.take_along_axis(ids_BL, jnp.minimum(context.positions, L - 1), 1)
                return model(tokens, context.positions, context, cache)

            def extend(i, cache):
                filled = jnp.full_like(n_B, i * c.chunk)
                return forward(cache, filled, jnp.clip(prompt_B - 1 - filled, 0, c.chunk), c.chunk)[1]

            cache = jax.lax.fori_loop(0, -(-jnp.max(prompt_B) // c.chunk), extend, cache)

            def step(carry):
                cache, filled, worst = carry
                real = filled < n_B - 1
                out, cache = forward(cache, filled, real.astype(jnp.int32), 1)
                full = jnp.take_along_axis(hidden, jnp.minimum(filled, L - 1)[:, None, None], 1)
                gap = jnp.abs(model.logits(out[:, 0]) - model.logits(full[:, 0])).max(-1)
                return cache, filled + real, jnp.maximum(worst, jnp.where(real, gap, 0).max())

            return jax.lax.while_loop(lambda s: (s[1] < n_B - 1).any(), step, (cache, prompt_B - 1, 0.0))[2]

        return difference

    def logit_difference(self, trajectories) -> float:
        """The largest difference between logits of cached decoding and of whole forwards, on these trajectories."""
        prompt = (np.asarray(trajectories.role) == Role.PROMPT).sum(1).astype(np.int32)
        tokens, length = np.asarray(trajectories.tokens), np.asarray(trajectories.length)
        return float(self._difference(self.params, tokens, length, prompt))


def assert_same(trajectories, rows: list[PlainRow], bound: float, least: float = 0.95) -> np.ndarray:
    """The rule of equality: tokens are equal up to a row's first narrow decision, and most rows have none.

    A row with margins of at least `bound` throughout must be equal in everything.

    Returns:
      The rows that have a narrow decision.
    """
    narrow = []
    for b, row in enumerate(rows):
        n = int(trajectories.length[b])
        first = next((i for i, margin in enumerate(row.margins) if margin < bound), None)
        if first is not None:
            narrow.append(b)
            assert trajectories.tokens[b, :first].tolist() == row.ids[:first], b
            continue
        assert_row(trajectories, b, row)
        assert n == len(row.ids)
    assert len(narrow) <= (1 - least) * len(rows), f"{len(narrow)} of {len(rows)} rows have a narrow decision"
    return np.asarray(narrow, np.int32)


def assert_row(trajectories, b: int, row: PlainRow) -> None:
    """Row `b` of `trajectories` is `row`: ids, roles, spans, stop reason, and log-probs to 1e-4."""
    n, L = int(trajectories.length[b]), trajectories.tokens.shape[1]
    assert trajectories.tokens[b].tolist() == row.ids + [0] * (L - n), b
    assert trajectories.role[b].tolist() == row.roles + [Role.PAD] * (L - n), b
    assert trajectories.stop_reason[b] == row.reason, b
    np.testing.assert_allclose(trajectories.behaviour_logprob[b, :n], row.logprobs, atol=1e-4)
    for name, values in row.spans.items():
        got = getattr(trajectories, f"{name}_span")[b]
        assert got[: len(values)].tolist() == [list(v) for v in values], (b, name)
        assert not got[len(values) :].any(), (b, name)
