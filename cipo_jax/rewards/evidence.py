"""EALR, the evidence-action likelihood ratio of CIPO (arXiv 2608.06128), and how it becomes a turn reward.

`ealr` reads log-probs on the device; the rest is host numpy on `[B, T]` arrays.
"""

import dataclasses
from collections.abc import Sequence

import gin
import jax.numpy as jnp
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.types import Array, Trajectories


def turn_sums(x_BL: Array, trajectories: Trajectories) -> tuple[Array, Array]:
    """Sums a per-token quantity over the tokens of each action.

    A masked reduction and not a scatter, so that its bits do not depend on the order of updates.

    Args:
      x_BL: `[B, L]` float32. Values off action tokens are ignored, NaN included.
      trajectories: the batch; `T` is the number of turns of its spans.

    Returns:
      `[B, T]` float32 sums (0 for an absent action) and `[B, T]` int32 token counts.
    """
    turns = trajectories.action_span.shape[1]
    turn_B1L = jnp.where(trajectories.action_mask, trajectories.turn, -1)[:, None, :]
    member_BTL = turn_B1L == jnp.arange(turns, dtype=turn_B1L.dtype)[None, :, None]
    sums = jnp.where(member_BTL, jnp.asarray(x_BL, jnp.float32)[:, None, :], 0.0).sum(-1)
    return sums, member_BTL.sum(-1, dtype=jnp.int32)


def ealr(visible_BL: Array, masked_BL: Array, trajectories: Trajectories) -> tuple[Array, Array]:
    """EALR of every retrieval turn, stored at the action it explains (arXiv 2608.06128, Eq. 5).

    For a search turn `t` with evidence, `EALR = (log p(a | h, E) - log p(a | h, mask(E))) / m` where `a` is action
    `t + 1` and `m` its tokens. It is undefined when the evidence is empty or fully cut, or without a next action. May
    run inside jit.

    Args:
      visible_BL: `[B, L]` float32, log-probs (nats, temperature 1) with the evidence in sight.
      masked_BL: `[B, L]` float32, log-probs of the same tokens with the evidence before their action hidden, from the
        same scoring pass.
      trajectories: the batch. Device or host arrays.

    Returns:
      `[B, T]` float32, nats per token at index `t + 1`, 0 where undefined; `[B, T]` bool, where it is defined.
    """
    difference_BL = jnp.asarray(visible_BL, jnp.float32) - jnp.asarray(masked_BL, jnp.float32)
    sums, counts = turn_sums(difference_BL, trajectories)
    content = jnp.asarray(trajectories.content_span)
    has_evidence = content[..., 1] > content[..., 0]
    follows_evidence = jnp.pad(has_evidence[:, :-1], ((0, 0), (1, 0)))
    valid = follows_evidence & (counts > 0)
    return jnp.where(valid, sums / jnp.maximum(counts, 1), 0.0), valid


@gin.configurable
@dataclasses.dataclass(frozen=True)
class EvidenceConfig:
    """How EALR becomes the reward of a turn. Every field is our choice where the paper is silent.

    Attributes:
      ealr_credit: `"action"`: turn `k` is rewarded for the transition into it (`E_{k-1} -> a_k`), the first turn has
        none and the answer turn has one. `"search"`: turn `k` is rewarded for `E_k -> a_{k+1}`, the last has none.
      ealr_actions: `"all"`, or `"search_only"`: transitions into the answer turn are left out.
      ealr_gate: what a malformed trajectory (no closed, non-empty answer, or an unparsable action) gets. `"zero"`: EALR
        0 that stays in mean and std; `"drop"`: no EALR; `"off"`: its EALR. Ungated, the per-token mean is raised by
        dropping tokens that don't need evidence until every answer breaks.
      ealr_clip: EALR is clipped to `[-ealr_clip, ealr_clip]` nats per token; None for no clip.
      ealr_shuffle: the control that permutes EALR within group and turn.
    """

    ealr_credit: str = "action"
    ealr_actions: str = "all"
    ealr_gate: str = "zero"
    ealr_clip: float | None = None
    ealr_shuffle: bool = False

    def __post_init__(self):
        options = {
            "ealr_credit": ("action", "search"),
            "ealr_actions": ("all", "search_only"),
            "ealr_gate": ("zero", "drop", "off"),
        }
        for name, allowed in options.items():
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"EvidenceConfig.{name}={getattr(self, name)!r} is not an option; use one of {', '.join(allowed)}"
                )
        if self.ealr_clip is not None and not self.ealr_clip > 0:
            raise UserError(f"EvidenceConfig.ealr_clip={self.ealr_clip} must be positive; use None for no clip")


def turn_values(
    value_BT: Array,
    valid_BT: Array,
    malformed_B: Array,
    answer_BT: Array,
    group_B: Array,
    config: EvidenceConfig,
    seed: int | Sequence[int] = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Turns EALR at actions into rewards of turns: action choice, clip, gate, shuffle, then credit.

    Args:
      value_BT: `[B, T]` float32 from `ealr`, at the index of the action.
      valid_BT: `[B, T]` bool from `ealr`.
      malformed_B: `[B]` bool, trajectories that the gate closes on.
      answer_BT: `[B, T]` bool, True at the turn that gave the final answer.
      group_B: `[B]` int32.
      config: the options.
      seed: of the shuffle, for example `(run seed, step)`.

    Returns:
      `[B, T]` float32 values (0 where not valid) and `[B, T]` bool.
    """
    value = np.array(value_BT, np.float32)
    valid = np.array(valid_BT, bool)
    if config.ealr_actions == "search_only":
        valid &= ~np.asarray(answer_BT, bool)
    if config.ealr_clip is not None:
        value = np.clip(value, -config.ealr_clip, config.ealr_clip)
    value, valid = gate(value, valid, malformed_B, config.ealr_gate)
    if config.ealr_shuffle:
        value = shuffle_within_group_and_turn(seed, value, valid, group_B)
    if config.ealr_credit == "search":
        value, valid = credit_search(value, valid)
    return np.where(valid, value, np.float32(0)), valid


def gate(value_BT: Array, valid_BT: Array, malformed_B: Array, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Applies `EvidenceConfig.ealr_gate` to `[B, T]` values of the rows where `malformed_B` is True."""
    value, valid = np.asarray(value_BT), np.asarray(valid_BT, bool)
    malformed = np.asarray(malformed_B, bool)[:, None]
    if mode == "off":
        return value, valid
    if mode == "zero":
        return np.where(malformed, np.zeros_like(value), value), valid
    if mode == "drop":
        return value, valid & ~malformed
    raise UserError(f"ealr_gate={mode!r} is not an option; use 'zero', 'drop' or 'off'")


def credit_search(value_BT: Array, valid_BT: Array) -> tuple[np.ndarray, np.ndarray]:
    """Moves every value from the action it explains to the search before it (turn `k` to `k - 1`)."""
    value, valid = np.asarray(value_BT), np.asarray(valid_BT, bool)
    pad = ((0, 0), (0, 1))
    return np.pad(value[:, 1:], pad), np.pad(valid[:, 1:], pad)


def shuffle_within_group_and_turn(
    seed: int | Sequence[int], value_BT: Array, valid_BT: Array, group_B: Array
) -> np.ndarray:
    """Permutes the valid values among the rows of a group at the same turn index (the `ealr_shuffle` control).

    Keeps every mean and std of the group while cutting the link between a value and its own action.

    Args:
      seed: the permutations depend on it and on the inputs' layout alone.
      value_BT: `[B, T]` float.
      valid_BT: `[B, T]` bool; values elsewhere stay where they are.
      group_B: `[B]` int.

    Returns:
      `[B, T]` permuted copy.
    """
    rng = np.random.default_rng(seed)
    value, valid, group = np.array(value_BT), np.asarray(valid_BT, bool), np.asarray(group_B)
    for g in np.unique(group):
        for t in range(value.shape[1]):
            rows = np.flatnonzero((group == g) & valid[:, t])
            value[rows, t] = value[rng.permutation(rows), t]
    return value
