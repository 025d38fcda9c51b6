"""Multi-turn rollouts with search as one compiled program.

Every row is a slot with its own place in the cache. Tokens that are known but not yet forwarded (observations) are
*forced* and go through a chunked extend step; the rest are sampled one at a time. The loop extends slots that are behind,
decodes until every slot waits for an observation or is done, and asks the host for the observations. Each token of a
trajectory is forwarded exactly once, prompts once per question, and nothing leaves the device per token.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

from cipo_jax.compat import shard_map
from cipo_jax.data.questions import Question
from cipo_jax.distributed.mesh import DATA_AXES, data_shards
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import cast, parameter_shardings
from cipo_jax.protocols.base import Protocol
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import SAMPLERS, Sampling, sample
from cipo_jax.rollout.stops import compile_stops, token_bytes
from cipo_jax.types import Role, StopReason, Trajectories


@gin.configurable
@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Sizes of a rollout; all static.

    Attributes:
      max_turns: searches allowed; one more action may follow the last observation.
      top_k: passages per search.
      prompt_tokens: longest prompt.
      action_tokens: cap of one action.
      observation_tokens: cap of one observation.
      total_tokens: cap of prompt, actions and observations together; the length of a row.
      query_tokens: how many of an action's last ids go to the host, which must find the whole call in them.
      chunk: forced tokens per extend step.
      sampler: `gumbel` or `inverse_cdf`.
      unroll: unroll the layers while generating (faster on CPU, compiles longer); None: on CPU only.
    """

    max_turns: int = 4
    top_k: int = 3
    prompt_tokens: int = 2048
    action_tokens: int = 500
    observation_tokens: int = 500
    total_tokens: int = 4096
    query_tokens: int = 64
    chunk: int = 64
    sampler: str = "gumbel"
    unroll: bool | None = None

    def __post_init__(self):
        if self.sampler not in SAMPLERS:
            raise UserError(f"RolloutConfig.sampler={self.sampler!r} is not one of {', '.join(SAMPLERS)}")
        if self.prompt_tokens >= self.total_tokens:
            raise UserError(
                f"RolloutConfig.prompt_tokens={self.prompt_tokens} leaves nothing of total_tokens={self.total_tokens}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Slots:
    """The loop's state; S slots, L token places, T = max_turns + 1 actions."""

    tokens: Any  # [S, L] i32
    role: Any  # [S, L] i8
    turn_of: Any  # [S, L] i8
    logprob: Any  # [S, L] f32
    length: Any  # [S] tokens known
    cached: Any  # [S] tokens forwarded
    turn: Any  # [S] current action
    start: Any  # [S] first token of the current action
    automaton: Any  # [S] state of the stop automaton
    ended: Any  # [S] 0 running, 1 waits for its search, 2 waits for a correction
    reason: Any  # [S] StopReason, 0 while alive
    action_span: Any  # [S, T, 2]
    evidence_span: Any  # [S, T, 2]
    content_span: Any  # [S, T, 2]
    passage_span: Any  # [S, T, K, 2]
    passage_row: Any  # [S, T, K]
    cache: Any
    steps: Any  # [3] extend, decode and ask steps taken
    useful: Any  # [2] tokens forwarded by extend and by decode steps


class Rollout:
    """Compiles and runs rollouts of one policy in one environment.

    Args:
      decoder: the policy's shape.
      graph: its graph definition.
      config: sizes.
      environment: answers searches.
      rules: sharding table for generation.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        graph: nnx.GraphDef,
        config: RolloutConfig,
        environment: Environment,
        rules: ShardingRules,
    ):
        self.decoder, self.graph, self.config = decoder, graph, config
        self.environment, self.rules = environment, rules
        protocol = environment.protocol
        table = compile_stops(protocol.stop_strings, token_bytes(protocol.tokenizer, decoder.vocab_size))
        self._next_state, self._found = table.next_state, table.found
        self._terminal = np.asarray([False, *(stop in protocol.terminal_stops for stop in protocol.stop_strings)])
        self._end_ids = np.zeros(decoder.vocab_size, bool)
        self._end_ids[list(protocol.end_of_turn_ids)] = True
        unroll = config.unroll
        self._unroll = jax.default_backend() == "cpu" if unroll is None else unroll
        self._program = jax.jit(self._run, static_argnames=("samples",))

    def __call__(
        self,
        params,
        questions: Sequence[Question],
        samples: int,
        key: jax.Array,
        sampling: Sampling,
        protocol: Protocol | None = None,
    ) -> tuple[Trajectories, dict[str, jax.Array]]:
        """Samples `samples` trajectories for each question.

        Args:
          params: the decoder's parameters, on any sharding of the same mesh.
          questions: their number must divide over the data shards.
          samples: group size; the rows of question `q` are `q * samples ... (q + 1) * samples - 1`.
          key: random key of this rollout; a trajectory depends on it, the question's place and the sample's number.
          sampling: temperature and truncation (traced).
          protocol: renders the prompts in place of the environment's protocol.

        Returns:
          Trajectories on the device (`B = questions x samples`) and counters: `extend_steps`, `decode_steps`,
          `ask_steps`, `forwarded_tokens`, `prompt_tokens`.

        Raises:
          UserError: a prompt longer than `prompt_tokens`, or a number of questions that does not divide.
        """
        c, shards = self.config, data_shards(self.rules.mesh)
        if len(questions) % shards:
            raise UserError(f"a batch of {len(questions)} questions does not divide over {shards} data shards")
        prompts = [(protocol or self.environment.protocol).prompt_ids(q.question) for q in questions]
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        if len(prompts[longest]) > c.prompt_tokens:
            raise UserError(
                f"the prompt of question {questions[longest].id!r} has {len(prompts[longest])} tokens, more than "
                f"RolloutConfig.prompt_tokens={c.prompt_tokens}; raise it or drop the question"
            )
        ids = np.zeros((len(prompts), c.prompt_tokens), np.int32)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = prompt
        self.environment.begin([q for q in questions for _ in range(samples)])
        counts = np.asarray([len(p) for p in prompts], np.int32)
        ids, counts = self.rules.put_batch((ids, counts))
        return self._program(params, ids, counts, key, sampling, samples=samples)

    # Everything below is traced.

    def _run(self, params, prompt_QP, prompt_count_Q, key, sampling: Sampling, samples: int):
        params = cast(params, self.decoder.compute_dtype)  # before it is gathered: what is read for every token
        params = jax.lax.with_sharding_constraint(params, parameter_shardings(params, self.rules))
        model = nnx.merge(self.graph, params)
        # Sliced once, outside of the loop over tokens.
        model_step = functools.partial(model, unroll=model.unstacked() if self._unroll else False)
        with jax.named_scope("prefill"):
            cache, steps = self._prefill(model_step, prompt_QP, prompt_count_Q)
        slots = self._start(prompt_QP, prompt_count_Q, cache, samples)
        slots = dataclasses.replace(slots, steps=slots.steps.at[0].add(steps))
        rows = jnp.arange(slots.length.shape[0], dtype=jnp.int32)
        keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.fold_in(key, r // samples), r % samples))(rows)
        extend = functools.partial(self._extend, model_step)
        decode = functools.partial(self._decode, model_step, model.logits, keys, sampling)

        def body(s: _Slots):
            # Loops, not branches, around whatever writes the cache: XLA copies a conditional's operands.
            s = jax.lax.while_loop(lambda s: (self._alive(s) & (s.length - s.cached > 1)).any(), extend, s)
            s = jax.lax.while_loop(lambda s: (self._alive(s) & (s.ended == 0)).any(), decode, s)
            light = dataclasses.replace(s, cache=None)
            light = jax.lax.cond(self._alive(s).any(), functools.partial(self._ask, rows), lambda s: s, light)
            return dataclasses.replace(light, cache=s.cache)

        s = jax.lax.while_loop(lambda s: self._alive(s).any(), body, slots)
        trajectories = Trajectories(
            tokens=s.tokens,
            role=s.role,
            turn=s.turn_of,
            behaviour_logprob=s.logprob,
            length=s.length,
            group=rows // samples,
            stop_reason=s.reason,
            action_span=s.action_span,
            evidence_span=s.evidence_span,
            content_span=s.content_span,
            passage_span=s.passage_span,
            passage_row=s.passage_row,
        )
        counters = {
            "extend_steps": s.steps[0],
            "decode_steps": s.steps[1],
            "ask_steps": s.steps[2],
            "prompt_tokens": prompt_count_Q.sum(),
            "forwarded_tokens": (prompt_count_Q - 1).sum() + s.useful.sum(),
        }
        return trajectories, counters

    @staticmethod
    def _alive(s: _Slots):
        return s.reason == 0

    def _rows(self, x):
        return jax.lax.with_sharding_constraint(x, self.rules.batch)

    def _prefill(self, model, prompt_QP, prompt_count_Q):
        """The cache of every prompt but its last token, whose forward gives the first logits, and the chunks it took."""
        c = self.config
        cache = KVCache.zeros(self.decoder, prompt_QP.shape[0], c.total_tokens, self.rules)
        padded = jnp.pad(prompt_QP, ((0, 0), (0, -prompt_QP.shape[1] % c.chunk)))
        chunks = -(-(jnp.max(prompt_count_Q) - 1) // c.chunk)

        def body(i, cache):
            at = jnp.full_like(prompt_count_Q, i * c.chunk)
            count = jnp.clip(prompt_count_Q - 1 - at, 0, c.chunk)
            context = CachedContext(at, count, c.chunk, c.total_tokens)
            tokens = jax.lax.dynamic_slice_in_dim(padded, i * c.chunk, c.chunk, 1)
            return model(tokens, context.positions, context, cache)[1]

        return jax.lax.fori_loop(0, chunks, body, cache), chunks

    def _start(self, prompt_QP, prompt_count_Q, cache, samples: int) -> _Slots:
        c = self.config
        count = jnp.repeat(prompt_count_Q, samples)
        S, T, K, L = count.shape[0], c.max_turns + 1, c.top_k, c.total_tokens
        tokens = jnp.repeat(jnp.pad(prompt_QP, ((0, 0), (0, L - prompt_QP.shape[1]))), samples, 0)
        prompt = jnp.arange(L)[None] < count[:, None]
        i32 = functools.partial(jnp.zeros, dtype=jnp.int32)
        spans = [i32((S, T, 2)) for _ in range(3)]
        slots = _Slots(
            tokens=jnp.where(prompt, tokens, 0),
            role=jnp.where(prompt, Role.PROMPT, Role.PAD).astype(jnp.int8),
            turn_of=jnp.full((S, L), -1, jnp.int8),
            logprob=jnp.zeros((S, L), jnp.float32),
            length=count,
            cached=count - 1,
            turn=i32(S),
            start=count,
            automaton=i32(S),
            ended=i32(S),
            reason=i32(S),
            action_span=spans[0],
            evidence_span=spans[1],
            content_span=spans[2],
            passage_span=i32((S, T, K, 2)),
            passage_row=jnp.full((S, T, K), -1, jnp.int32),
            cache=None,
            steps=None,
            useful=None,
        )
        slots = jax.tree.map(self._rows, slots)
        return dataclasses.replace(slots, cache=cache.repeat(samples), steps=i32(3), useful=i32(2))

    def _extend(self, model, s: _Slots) -> _Slots:
        """Forwards up to a chunk of known tokens of the slots that are behind, all but each slot's last token."""
        c = self.config
        count = jnp.clip(s.length - 1 - s.cached, 0, c.chunk) * (s.reason == 0)
        context = CachedContext(s.cached, count, c.chunk, c.total_tokens)
        tokens = jnp.take_along_axis(s.tokens, jnp.minimum(context.positions, c.total_tokens - 1), 1)
        with jax.named_scope("extend"):
            _, cache = model(tokens, context.positions, context, s.cache)
        return dataclasses.replace(
            s,
            cache=cache,
            cached=s.cached + count,
            steps=s.steps.at[0].add(1),
            useful=s.useful.at[0].add(count.sum()),
        )

    def _decode(self, model, unembed, keys, sampling, s: _Slots) -> _Slots:
        """Forwards the last token of every running slot and samples the next one."""
        c = self.config
        L, row = c.total_tokens, jnp.arange(s.length.shape[0])
        running = (s.reason == 0) & (s.ended == 0)
        context = CachedContext(s.cached, running.astype(jnp.int32), 1, L)
        last = jnp.take_along_axis(s.tokens, s.cached[:, None], 1)
        with jax.named_scope("decode"):
            hidden, cache = model(last, context.positions, context, s.cache)
            logits = unembed(hidden[:, 0])
        with jax.named_scope("sample"):
            keys = jax.vmap(jax.random.fold_in)(keys, s.length)
            token, logprob = sample(logits, keys, sampling, c.sampler)
        place = jnp.where(running, s.length, L)

        def write(array, value):
            return array.at[row, place].set(value, mode="drop")

        length = s.length + running
        found = jnp.asarray(self._found)[token, s.automaton]
        stopped = running & (found > 0)
        answered = stopped & jnp.asarray(self._terminal)[found]
        silent = running & ~stopped & (jnp.asarray(self._end_ids)[token] | (length - s.start >= c.action_tokens))
        over = (stopped & ~answered) | silent  # the action ended and something has to follow
        full = running & ~answered & (length >= L)
        last_turn = over & (s.turn >= c.max_turns)
        quiet = silent if not self.environment.protocol.corrects_invalid else jnp.zeros_like(silent)
        reason = jnp.select(
            [answered, full, last_turn, quiet],
            [StopReason.ANSWER, StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, StopReason.END_OF_TURN],
            0,
        )
        ends = answered | over | full
        span = jnp.stack([s.start, length], -1)
        turn = jnp.where(ends, s.turn, c.max_turns + 1)
        return dataclasses.replace(
            s,
            tokens=write(s.tokens, token),
            role=write(s.role, jnp.int8(Role.ACTION)),
            turn_of=write(s.turn_of, s.turn.astype(jnp.int8)),
            logprob=write(s.logprob, logprob),
            length=length,
            cached=s.cached + running,
            automaton=jnp.where(running, jnp.asarray(self._next_state)[token, s.automaton], s.automaton).astype(
                jnp.int32
            ),
            ended=jnp.where(over & (reason == 0), jnp.where(stopped, 1, 2), s.ended),
            reason=jnp.where(running, reason, s.reason),
            action_span=s.action_span.at[row, turn].set(span, mode="drop"),
            cache=cache,
            steps=s.steps.at[1].add(1),
            useful=s.useful.at[1].add(running.sum()),
        )

    def _ask(self, rows, s: _Slots) -> _Slots:
        """Hands the waiting slots' calls to the host and writes the observations behind them."""
        c = self.config
        L, Q = c.total_tokens, c.query_tokens
        row = jnp.arange(s.length.shape[0])
        waiting = (s.reason == 0) & (s.ended > 0)
        tail_count = jnp.minimum(s.length - s.start, Q)
        at = (s.length - tail_count)[:, None] + jnp.arange(Q)[None]
        tail = jnp.take_along_axis(s.tokens, jnp.minimum(at, L - 1), 1)
        budget = jnp.clip(L - 1 - s.length, 0, c.observation_tokens)  # at least one token must follow
        reply = self._call_host(jnp.where(waiting, s.ended, 0), rows, tail, tail_count, budget)
        count, content, passages, passage_rows, ids = self.environment.layout.read(reply)
        count = jnp.where(waiting, count, 0)
        place = jnp.arange(ids.shape[1])[None]
        place = jnp.where(place < count[:, None], s.length[:, None] + place, L)

        def write(array, value):
            return array.at[row[:, None], place].set(value, mode="drop")

        evidence = waiting & (content[:, 1] > content[:, 0])
        turn = jnp.where(evidence, s.turn, c.max_turns + 1)
        shown = passages[..., 1] > passages[..., 0]
        begin = s.length[:, None]
        length = s.length + count
        return dataclasses.replace(
            s,
            tokens=write(s.tokens, ids),
            role=write(s.role, jnp.int8(Role.OBSERVATION)),
            turn_of=write(s.turn_of, s.turn[:, None].astype(jnp.int8)),
            length=length,
            turn=s.turn + (count > 0),
            start=jnp.where(count > 0, length, s.start),
            automaton=jnp.where(waiting, 0, s.automaton),
            ended=jnp.where(waiting, 0, s.ended),
            reason=jnp.where(waiting & (count == 0), StopReason.TOKEN_LIMIT, s.reason),
            evidence_span=s.evidence_span.at[row, turn].set(jnp.stack([s.length, length], -1), mode="drop"),
            content_span=s.content_span.at[row, turn].set(content + begin, mode="drop"),
            passage_span=s.passage_span.at[row, turn].set(
                jnp.where(shown[..., None], passages + begin[..., None], 0), mode="drop"
            ),
            passage_row=s.passage_row.at[row, turn].set(passage_rows, mode="drop"),
            steps=s.steps.at[2].add(1),
        )

    def _call_host(self, *operands):
        """One host call per data shard. Tensor peers hold copies of the same rows: one of them calls, all get its reply."""
        mesh, width = self.rules.mesh, self.environment.layout.width
        peers = mesh.shape["tensor"]

        def shard(*operands):
            shape = jax.ShapeDtypeStruct((operands[0].shape[0], width), jnp.int32)
            call = functools.partial(io_callback, self.environment.reply, shape)
            if peers == 1:
                return call(*operands)
            first = jax.lax.axis_index("tensor") == 0
            reply = jax.lax.cond(first, call, lambda *_: jnp.zeros(shape.shape, shape.dtype), *operands)
            return jax.lax.psum(reply, "tensor")

        spec = PartitionSpec(DATA_AXES)
        return shard_map(shard, mesh=mesh, in_specs=tuple(spec for _ in operands), out_specs=spec, check_vma=False)(
            *operands
        )
