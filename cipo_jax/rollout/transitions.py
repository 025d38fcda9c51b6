"""What a sampled token and an observation do to the slots; no model, no host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cipo_jax.protocols.base import Protocol
from cipo_jax.rollout.environment import ReplyLayout
from cipo_jax.rollout.slots import Slots
from cipo_jax.rollout.stops import compile_stops, token_bytes
from cipo_jax.types import Role, StopReason


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("next_state", "found", "terminal", "end_ids"),
    meta_fields=("corrects",),
)
@dataclasses.dataclass(frozen=True)
class Endings:
    """What ends an action. Operands of the rollout's program: other stops of the same sizes need no other program.

    Attributes:
      next_state: `[V, states]` int16, see `rollout/stops.py`.
      found: `[V, states]` int8, likewise.
      terminal: `[1 + stops]` bool, by what was found: whether it ends the trajectory.
      end_ids: `[V]` bool, tokens that end an action without a stop string.
      corrects: whether such an action gets an observation (static); else it ends the trajectory.
    """

    next_state: Any
    found: Any
    terminal: Any
    end_ids: Any
    corrects: bool

    @classmethod
    def of(cls, protocol: Protocol, vocab_size: int) -> "Endings":
        """A protocol's, as host arrays."""
        table = compile_stops(protocol.stop_strings, token_bytes(protocol.tokenizer, vocab_size))
        terminal = [False, *(stop in protocol.terminal_stops for stop in protocol.stop_strings)]
        end_ids = np.zeros(vocab_size, bool)
        end_ids[list(protocol.end_of_turn_ids)] = True
        return cls(table.next_state, table.found, np.asarray(terminal), end_ids, protocol.corrects_invalid)


def append_tokens(slots: Slots, token, logprob, ends: Endings) -> Slots:
    """Writes one sampled token `[S]` with its log-prob to every running slot, and ends actions and trajectories."""
    text, running = slots.text, slots.running
    L, turns = text.tokens.shape[1], text.action_span.shape[1]
    place = jnp.where(running, text.length, L)

    def write(array, value):
        return _write(array, place, jnp.broadcast_to(value, place.shape))

    length = text.length + running
    limit = jnp.take_along_axis(slots.limit, slots.turn[:, None], 1)[:, 0]
    found = ends.found[token, slots.automaton]
    stopped = running & (found > 0)
    answered = stopped & ends.terminal[found]
    silent = running & ~stopped & (ends.end_ids[token] | (length - slots.start >= limit))
    over = (stopped & ~answered) | silent  # the action ended and something has to follow
    full = running & ~answered & (length >= L)
    last_turn = over & (slots.turn == turns - 1)
    quiet = silent if not ends.corrects else jnp.zeros_like(silent)
    reason = jnp.select(
        [answered, full, last_turn, quiet],
        [StopReason.ANSWER, StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, StopReason.END_OF_TURN],
        0,
    )
    turn = jnp.where(answered | over | full, slots.turn, turns)  # out of bounds: dropped
    span = jnp.stack([slots.start, length], -1)
    state = ends.next_state[token, slots.automaton].astype(jnp.int32)
    return dataclasses.replace(
        slots,
        text=dataclasses.replace(
            text,
            tokens=write(text.tokens, token),
            role=write(text.role, jnp.int8(Role.ACTION)),
            turn=write(text.turn, slots.turn.astype(jnp.int8)),
            behaviour_logprob=write(text.behaviour_logprob, logprob),
            length=length,
            stop_reason=jnp.where(running, reason, text.stop_reason),
            action_span=_write(text.action_span, turn, span),
        ),
        automaton=jnp.where(running, state, slots.automaton),
        waiting=slots.waiting | (over & (reason == 0)),
    )


def append_observations(slots: Slots, reply, layout: ReplyLayout) -> Slots:
    """Writes what `Environment.exchange` replied: tickets to slots that still wait, observations to the others.

    An empty observation stands for one that didn't fit: the trajectory ends.
    """
    text = slots.text
    L, turns = text.tokens.shape[1], text.action_span.shape[1]
    ticket, (count, content, passages, rows, ids) = reply[:, 0], layout.read(reply[:, 1:])
    arrived = slots.waiting & (ticket == 0)
    count = jnp.where(arrived, count, 0)
    place = jnp.arange(ids.shape[1])[None]
    place = jnp.where(place < count[:, None], text.length[:, None] + place, L)

    def write(array, value):
        return _write(array, place, jnp.broadcast_to(value, place.shape))

    length, begin = text.length + count, text.length[:, None]
    turn = jnp.where(arrived & (content[:, 1] > content[:, 0]), slots.turn, turns)  # out of bounds: dropped
    shown = passages[..., 1] > passages[..., 0]
    passages = jnp.where(shown[..., None], passages + begin[..., None], 0)
    return dataclasses.replace(
        slots,
        text=dataclasses.replace(
            text,
            tokens=write(text.tokens, ids),
            role=write(text.role, jnp.int8(Role.OBSERVATION)),
            turn=write(text.turn, slots.turn[:, None].astype(jnp.int8)),
            length=length,
            stop_reason=jnp.where(arrived & (count == 0), StopReason.TOKEN_LIMIT, text.stop_reason),
            evidence_span=_write(text.evidence_span, turn, jnp.stack([text.length, length], -1)),
            content_span=_write(text.content_span, turn, content + begin),
            passage_span=_write(text.passage_span, turn, passages),
            passage_row=_write(text.passage_row, turn, rows),
        ),
        turn=slots.turn + (count > 0),
        start=jnp.where(count > 0, length, slots.start),
        automaton=jnp.where(arrived, 0, slots.automaton),
        waiting=slots.waiting & ~arrived,
        ticket=jnp.where(slots.waiting, ticket, 0),
    )


def _write(array, place, value):
    """Writes `value[i]` at `array[i, place[i]]`, on row `i` alone; places out of bounds are dropped.

    A map over rows and not an index for them: the partitioner would gather the rows of all devices.
    """
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(array, place, value)
