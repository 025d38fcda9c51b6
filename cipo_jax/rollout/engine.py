"""Multi-turn rollouts with search as one compiled program.

Trajectories are written in *slots*, each with its own place in the cache (`slots.py`). Tokens that are known but not yet
forwarded (observations) are *forced* and go through a chunked extend step; the rest are sampled one at a time. The loop
fills slots, extends those that are behind, decodes until there is something else to do, and turns to the host for
observations (`environment.py`). Each token of a trajectory is forwarded exactly once, prompts once per question, and
nothing leaves the device per token.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

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
from cipo_jax.rollout.config import BLOCKING, LAG, RolloutConfig
from cipo_jax.rollout.environment import AWAIT_ALL, AWAIT_ANY, LEAVE, TAKE, Environment
from cipo_jax.rollout.sampling import Sampling, sample
from cipo_jax.rollout.slots import (
    Queue,
    Slots,
    empty_slots,
    empty_text,
    put_back,
    refill,
    refillable,
    store,
    take_behind,
)
from cipo_jax.rollout.transitions import Endings, append_observations, append_tokens
from cipo_jax.types import Role, Trajectories

__all__ = ["COUNTERS", "Rollout", "RolloutConfig"]

# What a rollout counts besides its trajectories.
COUNTERS = (
    "prompt_tokens",  # of the questions
    "forwarded_tokens",  # through the model: prompts once per question, all observations, all sampled but each row's last
    "padded_tokens",  # lanes of prefill, extend and decode steps that held no token
    "extend_steps",  # prefill included
    "decode_steps",
    "ask_steps",  # calls of each shard to its host
    "refills",  # slots that were given a further row
    "slot_occupancy",  # sampled tokens per decode step and slot
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _State:
    """The loop's state. N rows, S slots."""

    slots: Slots
    cache: KVCache | None
    out: Trajectories | None  # [N, ...] the finished ones; None if no slot is ever refilled
    clock: Any  # decode steps taken or skipped
    called: Any  # clock of the last host call
    counts: dict[str, Any]

    def count(self, **more) -> dict[str, Any]:
        """The counts, some of them larger."""
        return self.counts | {name: self.counts[name] + value for name, value in more.items()}


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
        self._stops: dict[tuple, Endings] = {}
        self._endings(environment.protocol)  # refuses a vocabulary that is too small
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
        action_limits: np.ndarray | None = None,
    ) -> tuple[Trajectories, dict[str, jax.Array]]:
        """Samples `samples` trajectories for each question.

        Args:
          params: the decoder's parameters, on any sharding of the same mesh.
          questions: their number must divide over the data shards.
          samples: group size; the rows of question `q` are `q * samples ... (q + 1) * samples - 1`.
          key: random key of this rollout; a trajectory depends on it, the question's place and the sample's number.
          sampling: temperature and truncation (traced).
          protocol: renders the prompts and says where actions stop, in place of the environment's protocol.
          action_limits: `[B, max_turns + 1]` int32 token caps of each action, where they are below `action_tokens`.

        Returns:
          Trajectories on the device (`B = questions x samples`) and the counters named in `COUNTERS`.

        Raises:
          UserError: a prompt longer than `prompt_tokens`, or a number of questions or slots that does not divide.
        """
        c, shards = self.config, data_shards(self.rules.mesh)
        if len(questions) % shards:
            raise UserError(f"a batch of {len(questions)} questions does not divide over {shards} data shards")
        if c.slots is not None and c.slots % shards:
            raise UserError(f"RolloutConfig.slots={c.slots} does not divide over {shards} data shards; use a multiple")
        protocol = protocol or self.environment.protocol
        prompts = [protocol.prompt_ids(q.question) for q in questions]
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
        ids, counts, action_limits = self.rules.put_batch((ids, counts, action_limits))
        ends = self._endings(protocol)
        return self._program(params, ids, counts, key, sampling, ends, action_limits, samples=samples)

    def _endings(self, protocol: Protocol) -> Endings:
        """Kept by what they depend on."""
        stops = protocol.stop_strings, protocol.terminal_stops, protocol.end_of_turn_ids, protocol.corrects_invalid
        if stops not in self._stops:
            self._stops[stops] = Endings.of(protocol, self.decoder.vocab_size)
        return self._stops[stops]

    # Everything below is traced.

    def _run(self, params, prompt_QP, count_Q, key, sampling: Sampling, ends=None, limit_NT=None, *, samples: int):
        c, mesh = self.config, self.rules.mesh
        ends = jax.tree.map(jnp.asarray, self._endings(self.environment.protocol) if ends is None else ends)
        params = cast(params, self.decoder.compute_dtype)  # before it is gathered: what is read for every token
        params = jax.lax.with_sharding_constraint(params, parameter_shardings(params, self.rules))
        model = nnx.merge(self.graph, params)
        # Sliced once, outside of the loop over tokens.
        model_step = functools.partial(model, unroll=model.unstacked() if self._unroll else False)

        N = count_Q.shape[0] * samples
        S = min(c.slots or N, N)
        T = c.max_turns + 1
        limit = jnp.full((N, T), c.action_tokens) if limit_NT is None else jnp.minimum(limit_NT, c.action_tokens)
        with jax.named_scope("prefill"):
            hidden, cache, chunks = self._prefill(model_step, prompt_QP, count_Q)
        queue = Queue(prompt_QP, count_Q, hidden, cache, self._rows(limit.astype(jnp.int32)))
        slots = jax.tree.map(self._rows, empty_slots(empty_text(S, c.total_tokens, T, c.top_k), hidden))
        out = jax.tree.map(self._rows, empty_text(N, c.total_tokens, T, c.top_k))
        fill = functools.partial(refill, mesh, queue=queue)
        cache = KVCache.zeros(self.decoder, S, c.total_tokens, self.rules, self._unroll, c.read_places)
        slots, cache, out = fill(slots, cache, out)
        zero = jnp.int32(0)
        names = ("extend_steps", "decode_steps", "ask_steps", "forwarded")
        state = _State(slots, cache, out if S < N else None, zero, zero - c.poll_steps, dict.fromkeys(names, zero))

        per_shard = N // data_shards(mesh)
        extend = functools.partial(self._extend, model_step)
        decode = functools.partial(self._decode, model_step, model.logits, key, samples, sampling, ends)

        def body(s: _State):
            # Loops, not branches, around whatever writes the cache: XLA copies a conditional's operands.
            if s.out is not None:
                slots, cache, out = fill(s.slots, s.cache, s.out)
                s = dataclasses.replace(s, slots=slots, cache=cache, out=out)
            s = jax.lax.while_loop(lambda s: s.slots.behind.any(), extend, s)
            shorter = 0
            for read in c.read_places:
                s = jax.lax.while_loop(
                    functools.partial(self._goes_on, per_shard, shorter, read), functools.partial(decode, read), s
                )
                shorter = read
            light = dataclasses.replace(s, cache=None, out=None)
            idle = ~(s.slots.running | refillable(s.slots, per_shard)).any()
            ask = functools.partial(self._ask, idle)
            light = jax.lax.cond(self._must_ask(s, idle), ask, lambda s: s, light)
            return dataclasses.replace(light, cache=s.cache, out=s.out)

        def unfinished(s: _State):
            return (s.slots.alive | refillable(s.slots, per_shard)).any()

        s = jax.lax.while_loop(unfinished, body, state)
        trajectories = s.slots.text if s.out is None else store(mesh, s.slots, s.out)
        counts, lanes = s.counts, self._extend_lanes(S)
        forwarded = count_Q.sum() + counts["forwarded"]
        lanes = counts["extend_steps"] * lanes + counts["decode_steps"] * S + chunks * c.chunk * count_Q.shape[0]
        counters = {
            "prompt_tokens": count_Q.sum(),
            "forwarded_tokens": forwarded,
            "padded_tokens": lanes - forwarded,
            "extend_steps": chunks + counts["extend_steps"],
            "decode_steps": counts["decode_steps"],
            "ask_steps": counts["ask_steps"],
            "refills": jnp.int32(N - S),
            "slot_occupancy": (trajectories.role == Role.ACTION).sum() / jnp.maximum(counts["decode_steps"] * S, 1),
        }
        return trajectories, {name: counters[name] for name in COUNTERS}

    def _rows(self, x):
        return jax.lax.with_sharding_constraint(x, self.rules.batch)

    def _prefill(self, model, prompt_QP, count_Q):
        """The last hidden state and the cache of every prompt, and the chunks it took."""
        c = self.config
        Q, P = prompt_QP.shape
        cache = KVCache.zeros(self.decoder, Q, P, self.rules, self._unroll)
        padded = jnp.pad(prompt_QP, ((0, 0), (0, -P % c.chunk)))
        chunks = -(-jnp.max(count_Q) // c.chunk)

        def body(i, carry):
            last, cache = carry
            at = jnp.full_like(count_Q, i * c.chunk)
            context = CachedContext(at, jnp.clip(count_Q - at, 0, c.chunk), c.chunk, P)
            tokens = jax.lax.dynamic_slice_in_dim(padded, i * c.chunk, c.chunk, 1)
            hidden, cache = model(tokens, context.positions, context, cache)
            lane = jnp.clip(count_Q - 1 - at, 0, c.chunk - 1)[:, None, None]
            ends = (count_Q - 1) // c.chunk == i
            return jnp.where(ends[:, None], jnp.take_along_axis(hidden, lane, 1)[:, 0], last), cache

        last = self._rows(jnp.zeros((Q, self.decoder.width), self.decoder.compute_dtype))
        last, cache = jax.lax.fori_loop(0, chunks, body, (last, cache))
        return last, cache, chunks

    def _extend_lanes(self, slots: int) -> int:
        """Lanes of one extend step."""
        shards = data_shards(self.rules.mesh)
        return min(self.config.extend_slots or slots, slots // shards) * shards * self.config.chunk

    def _extend(self, model, s: _State) -> _State:
        """Forwards the known tokens of some slots that are behind, all but each slot's last token."""
        c, mesh = self.config, self.rules.mesh
        some = self._extend_lanes(s.slots.row.shape[0]) // c.chunk // data_shards(mesh)
        whole = some * data_shards(mesh) == s.slots.row.shape[0]
        index, slots, cache = (None, s.slots, s.cache) if whole else take_behind(mesh, s.slots, s.cache, some)

        def step(carry):
            cached, cache, steps, forwarded = carry
            count = jnp.clip(slots.text.length - 1 - cached, 0, c.chunk) * slots.alive
            context = CachedContext(cached, count, c.chunk, c.total_tokens)
            tokens = jnp.take_along_axis(slots.text.tokens, jnp.minimum(context.positions, c.total_tokens - 1), 1)
            with jax.named_scope("extend"):
                _, cache = model(tokens, context.positions, context, cache)
            return cached + count, cache, steps + 1, forwarded + count.sum()

        def behind(carry):
            return dataclasses.replace(slots, cached=carry[0]).behind.any()

        start = slots.cached, cache, jnp.int32(0), jnp.int32(0)
        cached, cache, steps, forwarded = jax.lax.while_loop(behind, step, start)
        if whole:
            slots = dataclasses.replace(slots, cached=cached)
        else:
            slots, cache = put_back(mesh, s.slots, s.cache, index, cached, cache)
        return dataclasses.replace(s, slots=slots, cache=cache, counts=s.count(extend_steps=steps, forwarded=forwarded))

    def _goes_on(self, per_shard: int, shorter: int, read: int, s: _State):
        """Whether what comes next is a decode step that has to read more than `shorter` and at most `read` places."""
        slots = s.slots
        longest = jnp.max(jnp.where(slots.running, slots.cached + 1, 0))
        interrupted = refillable(slots, per_shard).any() | self._must_ask(s, False)
        return (shorter < longest) & (longest <= read) & ~interrupted

    def _decode(self, model, unembed, key, samples: int, sampling, ends: Endings, read: int, s: _State) -> _State:
        """Forwards the last token of every running slot and samples the next one."""
        c, slots, text = self.config, s.slots, s.slots.text
        fresh = slots.cached == text.length  # the prompt's last hidden state is there already
        forward = slots.running & ~fresh
        context = CachedContext(slots.cached, forward.astype(jnp.int32), 1, c.total_tokens, read)
        last = jnp.take_along_axis(text.tokens, slots.cached[:, None], 1)
        with jax.named_scope("decode"):
            hidden, cache = model(last, context.positions, context, s.cache)
            logits = unembed(jnp.where(fresh[:, None], slots.hidden, hidden[:, 0]))
        with jax.named_scope("sample"):
            keys = jax.vmap(functools.partial(_token_key, key, samples))(slots.row, text.length)
            token, logprob = sample(logits, keys, sampling, c.sampler)
        slots = dataclasses.replace(slots, cached=slots.cached + forward)
        return dataclasses.replace(
            s,
            slots=append_tokens(slots, token, logprob, ends),
            cache=cache,
            clock=s.clock + 1,
            counts=s.count(decode_steps=1, forwarded=forward.sum()),
        )

    def _due(self, s: _State):
        """`[S]` bool, waiting slots whose answer is taken now and not later, by `retrieval_lag`."""
        return (s.slots.ticket > 0) & (s.clock >= s.slots.asked + self.config.retrieval_lag)

    def _must_ask(self, s: _State, idle):
        """Whether the host is to be called; `idle` if no slot has anything else to do."""
        c, waiting = self.config, s.slots.waiting
        if c.retrieval == BLOCKING:
            return idle & waiting.any()
        may = s.clock - s.called >= c.poll_steps
        if c.retrieval == LAG:
            return self._due(s).any() | (waiting & (idle | (may & (s.slots.ticket == 0)))).any()
        return (waiting & (idle | may)).any()

    def _ask(self, idle, s: _State) -> _State:
        """Hands the waiting slots' calls to the host and writes the observations that came behind them."""
        c, slots, text = self.config, s.slots, s.slots.text
        L, Q = c.total_tokens, c.query_tokens
        new = slots.waiting & (slots.ticket == 0)
        slots = dataclasses.replace(slots, asked=jnp.where(new, s.clock, slots.asked))
        clock = s.clock
        if c.retrieval == BLOCKING:
            want = jnp.full_like(slots.row, AWAIT_ALL)
        elif c.retrieval == LAG:
            due = jnp.where(slots.waiting, slots.asked + c.retrieval_lag, jnp.iinfo(jnp.int32).max)
            clock = jnp.where(idle, jnp.maximum(clock, due.min()), clock)  # steps in which nobody could decode
            want = jnp.where(due <= clock, AWAIT_ALL, LEAVE)
        else:
            want = jnp.full_like(slots.row, 1) * jnp.where(idle, AWAIT_ANY, TAKE)
        tail_count = jnp.minimum(text.length - slots.start, Q)
        at = (text.length - tail_count)[:, None] + jnp.arange(Q)[None]
        tail = jnp.take_along_axis(text.tokens, jnp.clip(at, 0, L - 1), 1)
        budget = jnp.clip(L - 1 - text.length, 0, c.observation_tokens)  # at least one token must follow
        reply = self._call_host(new, slots.row, tail, tail_count, budget, slots.ticket, want)
        slots = append_observations(slots, reply, self.environment.layout)
        return dataclasses.replace(s, slots=slots, clock=clock, called=clock, counts=s.count(ask_steps=1))

    def _call_host(self, *operands):
        """One host call per data shard. Tensor peers hold copies of the same rows: one of them calls, all get its reply."""
        mesh, width = self.rules.mesh, 1 + self.environment.layout.width
        peers = mesh.shape["tensor"]

        def shard(*operands):
            shape = jax.ShapeDtypeStruct((operands[0].shape[0], width), jnp.int32)
            call = functools.partial(io_callback, self.environment.exchange, shape)
            if peers == 1:
                return call(*operands)
            first = jax.lax.axis_index("tensor") == 0
            reply = jax.lax.cond(first, call, lambda *_: jnp.zeros(shape.shape, shape.dtype), *operands)
            return jax.lax.psum(reply, "tensor")

        spec = PartitionSpec(DATA_AXES)
        return shard_map(shard, mesh=mesh, in_specs=tuple(spec for _ in operands), out_specs=spec, check_vma=False)(
            *operands
        )


def _token_key(key, samples: int, row, place):
    """The key of one token, by its question's and its sample's number."""
    for number in (row // samples, row % samples, place):
        key = jax.random.fold_in(key, number)
    return key
