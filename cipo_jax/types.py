"""The types that cross package borders, with shapes and units.

Letters: B trajectories, L padded tokens, T turns (actions) per trajectory, K passages per observation.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

Array = jax.Array | np.ndarray


class Role:
    """What wrote a token. Loss, KL, entropy and advantages live on ACTION tokens only."""

    PAD = 0
    PROMPT = 1
    ACTION = 2
    OBSERVATION = 3


class StopReason:
    """Why a trajectory ended."""

    ANSWER = 1  # a terminal stop string was sampled
    END_OF_TURN = 2  # an end-of-turn token without an action, and the protocol does not correct
    TURN_LIMIT = 3  # the last allowed action was neither an answer nor correctable
    TOKEN_LIMIT = 4  # the next token or observation did not fit in the token budget

    NAMES: ClassVar = {1: "answer", 2: "end_of_turn", 3: "turn_limit", 4: "token_limit"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Trajectories:
    """A batch of finished rollouts: token ids, roles, turns and log-probs in lockstep.

    A trajectory is `prompt, action 0, observation 0, action 1, ...`. Action `t` and the observation that answers it
    share the turn id `t`; prompt and padding tokens have turn -1. A span is `[start, end)` in token positions of its
    row; an absent span is `(0, 0)`.

    Attributes:
      tokens: `[B, L]` int32, the ids as sampled or forced; never re-encoded from text. 0 where padded.
      role: `[B, L]` int8, a `Role` per token.
      turn: `[B, L]` int8, the turn id.
      behaviour_logprob: `[B, L]` float32, log-prob (nats) under the distribution that was sampled from, temperature
        and truncation included; 0 off action tokens.
      length: `[B]` int32, tokens before padding.
      group: `[B]` int32, equal for the rollouts of one question.
      stop_reason: `[B]` int32, a `StopReason`.
      action_span: `[B, T, 2]` int32.
      evidence_span: `[B, T, 2]` int32, the whole observation after action `t` (tags included) when it holds retrieved
        passages, else absent.
      content_span: `[B, T, 2]` int32, the passages' text inside `evidence_span`, tags excluded.
      passage_span: `[B, T, K, 2]` int32, each passage's text, in the order shown.
      passage_row: `[B, T, K]` int32, each passage's row in its corpus, -1 where absent.
    """

    tokens: Array
    role: Array
    turn: Array
    behaviour_logprob: Array
    length: Array
    group: Array
    stop_reason: Array
    action_span: Array
    evidence_span: Array
    content_span: Array
    passage_span: Array
    passage_row: Array

    @property
    def action_mask(self) -> Array:
        """`[B, L]` bool, True on sampled tokens."""
        return self.role == Role.ACTION

    @property
    def searches(self) -> Array:
        """`[B]` int, searches that were executed and answered with passages."""
        return (self.evidence_span[..., 1] > self.evidence_span[..., 0]).sum(-1)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def map(self, fn) -> "Trajectories":
        """Applies `fn` to every array (for example a row selection)."""
        return jax.tree.map(fn, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TurnRewards:
    """Rewards of a batch before normalisation.

    Attributes:
      outcome: `[B]` float32, the reward of the final answer.
      value: `[B, T]` float32, the reward of each turn (nats per token for EALR); 0 where not valid.
      valid: `[B, T]` bool, whether the turn has a defined reward.
    """

    outcome: Any
    value: Any
    valid: Any
