"""Counterfactual scoring of whole batches: visible and counterfactual log-probs from one pass, for EALR and studies."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from cipo_jax.distributed.arrays import fetch
from cipo_jax.distributed.mesh import data_shards
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.config import DecoderConfig
from cipo_jax.scoring.copies import Copy
from cipo_jax.scoring.counterfactuals import Counterfactual, Masked, Several
from cipo_jax.scoring.packing import Packed, Rows, pack, places_needed
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Trajectories


@dataclasses.dataclass(frozen=True)
class Effect:
    """What one counterfactual changed about one action.

    Attributes:
      kind: name of the counterfactual.
      row: trajectory of the batch.
      turn: the retrieval turn whose evidence it is about.
      action: the turn of the action; `action - turn` is the lag, 1 for the next action.
      difference: `[m]` float32, visible minus counterfactual log-prob (nats) of each of the action's tokens.
    """

    kind: str
    row: int
    turn: int
    action: int
    difference: np.ndarray

    @property
    def ealr(self) -> float:
        """Mean difference in nats per token (arXiv 2608.06128, Eq. 5)."""
        return float(self.difference.mean(dtype=np.float64))


@dataclasses.dataclass
class EvidenceScores:
    """Log-probs that are being computed; the methods wait for them.

    Attributes:
      trajectories: what was scored, host arrays.
      rows: how they were laid out.
      copies: of all trajectories.
      owner: the trajectory of each copy.
      packed: where each copy lies.
      passes: device results of each stream.
    """

    trajectories: Trajectories
    rows: Rows
    copies: list[Copy]
    owner: list[int]
    packed: Packed
    passes: list[tuple[Any, Any, Any]]
    _host: Any = None

    def visible(self) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropies with everything in sight, float32 `[B, L]`, 0 off action tokens."""
        length = self.trajectories.tokens.shape[1]
        logprob, entropy, _ = self._fetched()[0]
        return self.rows.unpack(logprob, length), self.rows.unpack(entropy, length)

    def fetch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Host arrays `(visible, entropy, counterfactual)` `[B, L]`; the third is the first where nothing was hidden.

        Raises:
          UserError: a token was scored under several counterfactuals, so that one array cannot hold them.
        """
        visible, entropy = self.visible()
        hidden, seen = visible.copy(), np.zeros(visible.shape, bool)
        for c, owner in enumerate(self.owner):
            place, logprob = self._targets(c)
            if seen[owner, place].any():
                raise UserError(
                    f"the counterfactual {self.copies[c].kind!r} scores a token more than once; choose one that scores the "
                    "next action alone, such as Masked, or read the effects one by one."
                )
            hidden[owner, place], seen[owner, place] = logprob, True
        return visible, entropy, hidden

    def effects(self) -> Iterator[Effect]:
        """One effect per counterfactual, evidence and scored action."""
        visible, _ = self.visible()
        for c, (copy, b) in enumerate(zip(self.copies, self.owner)):
            place, logprob = self._targets(c)
            turns = np.asarray(self.trajectories.turn[b])[place]
            for action in np.unique(turns).tolist() or [copy.turn + 1]:
                start, end = (int(x) for x in self.trajectories.action_span[b, action])
                difference, here = np.zeros(end - start, visible.dtype), turns == action
                difference[place[here] - start] = visible[b, place[here]] - logprob[here]
                yield Effect(copy.kind, b, copy.turn, action, difference)

    def _targets(self, c: int) -> tuple[np.ndarray, np.ndarray]:
        stream, row, at = self.packed.place[c]
        wanted = np.flatnonzero(self.copies[c].target >= 0)
        return self.copies[c].target[wanted], np.asarray(self._fetched()[stream][2])[row, at + wanted]

    def _fetched(self):
        if self._host is None:
            self._host = fetch(self.passes)
        return self._host


class EvidenceScorer:
    """Scores trajectories and counterfactuals of them in a single forward, at temperature 1 and without gradients.

    Args:
      scorer: scores tokens under a policy.
      counterfactual: what is hidden from later actions; `Several` for several.
      rules: sharding table.
      capacity: places per row for copied tokens; None for the length of a row. Copies that don't fit cost another pass.
      bucket: instead of a fixed capacity, take what a batch needs, rounded up to a multiple of this; each multiple is
        compiled once.
    """

    def __init__(
        self,
        scorer: Scorer,
        counterfactual: Counterfactual,
        rules: ShardingRules,
        capacity: int | None = None,
        bucket: int | None = None,
    ):
        self.counterfactual, self.capacity, self.rules, self.scorer = counterfactual, capacity, rules, scorer
        self.bucket = bucket
        self._config: DecoderConfig | None = None

        def program(params, tokens, length, active, temperature, copies, start):
            return scorer(jax.lax.stop_gradient(params), tokens, length, active, temperature, copies, start)

        self._program = jax.jit(program, out_shardings=rules.batch)

    def __call__(
        self, params, trajectories: Trajectories, host: Trajectories, supportive: np.ndarray | None = None
    ) -> EvidenceScores:
        """Starts the pass (both terms of EALR come from it, never from behaviour log-probs), one trajectory a row.

        Args:
          params: the frozen rollout policy's parameters.
          trajectories: on the device; `host` holds the same on this process.
          supportive: `[B, T, K]` bool, passages that hold a gold answer, for the counterfactuals that ask for it.
        """
        batch = trajectories.tokens, trajectories.length, trajectories.action_mask
        return self._start(params, host, Rows.one_each(host), batch, None, supportive)

    def score_packed(
        self,
        params,
        host: Trajectories,
        places: int,
        supportive: np.ndarray | None = None,
        rows: int = 1,
    ) -> EvidenceScores:
        """The same with several trajectories in a row.

        Args:
          params: the policy's parameters.
          host: host arrays.
          places: length of a row.
          supportive: see `__call__`.
          rows: the number of rows is rounded up to a multiple of this and of the batch's shards; one shape of rows, one
            program.
        """
        shards = data_shards(self.rules.mesh)
        packed = Rows.pack(host, places, multiple=-(-rows // shards) * shards)
        *batch, start = self.rules.put_batch((packed.tokens, packed.length, packed.active, packed.start))
        return self._start(params, host, packed, batch, start, supportive)

    def _start(self, params, host, rows: Rows, batch, start, supportive) -> EvidenceScores:
        if self._config is None:
            self._config = nnx.merge(self.scorer.graph, params).config
        check(self.counterfactual, self._config)
        copies, owner = [], []
        for b in range(len(host)):
            some = self.counterfactual.copies(host, b, None if supportive is None else supportive[b])
            copies += some
            owner += [b] * len(some)
        (R, L), align = rows.tokens.shape, self._config.copy_alignment
        capacity = self.capacity or L
        if self.bucket:
            capacity = -(-places_needed(copies, rows.row[owner], align) // self.bucket) * self.bucket
        packed = pack(copies, rows.row[owner], rows.offset[owner], (R, capacity), align)
        passes = [
            self._program(params, *batch, np.float32(1.0), self.rules.put_batch(stream), start)
            for stream in packed.streams
        ]
        return EvidenceScores(host, rows, copies, owner, packed, passes)


def check(counterfactual: Counterfactual, config: DecoderConfig) -> None:
    """Raises `UserError` for a mask that has no meaning in the model's layers."""
    for c in counterfactual.counterfactuals if isinstance(counterfactual, Several) else [counterfactual]:
        edges = isinstance(c, Masked) and c.mask_rows != "post_evidence" and c.gdn_mask == "snapshot"
        if edges and config.delta_layers:
            raise UserError(
                f"Masked.mask_rows={c.mask_rows!r} leaves tokens that have read the evidence in sight, and a delta layer's "
                "state cannot forget them; set Masked.gdn_mask='unmasked', or Masked.mask_rows='post_evidence'."
            )
