"""Scoring a batch a few rows at a time inside one program, which then needs the memory of those rows alone."""

import jax
import jax.numpy as jnp

from cipo_jax.distributed.mesh import data_shards
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.scoring.score import Scorer


class ScorerInPieces:
    """Scores as a `Scorer` does, `rows` rows at a time.

    Args:
      scorer: scores a piece.
      rows: rows of a piece, over all devices. A batch of no more rows is scored at once.
      rules: sharding table; every device takes its piece from the rows that it holds, so no row moves.
    """

    def __init__(self, scorer: Scorer, rows: int, rules: ShardingRules):
        self.scorer, self.rows, self.rules = scorer, rows, rules

    @property
    def graph(self):
        """The decoder's graph definition."""
        return self.scorer.graph

    def __call__(self, params, tokens_BL, length_B, active_BL, temperature=1.0, copies=None, start_BL=None):
        """See `Scorer.__call__`; the number of rows must divide over the data shards."""
        B = tokens_BL.shape[0]
        count = -(-B // self.rows)
        if count <= 1:
            return self.scorer(params, tokens_BL, length_B, active_BL, temperature, copies, start_BL)
        shards = data_shards(self.rules.mesh)
        rows = -(-B // (shards * count))  # of one piece on one device
        place = self.rules.sharding((None, "batch"))

        def split(x):  # [B, ..] -> [count, shards * rows, ..]; the last row fills up and is dropped by `join`
            x = x.reshape(shards, B // shards, *x.shape[1:])
            x = jnp.pad(x, ((0, 0), (0, count * rows - x.shape[1])) + ((0, 0),) * (x.ndim - 2), mode="edge")
            x = jnp.moveaxis(x.reshape(shards, count, rows, *x.shape[2:]), 1, 0)
            return jax.lax.with_sharding_constraint(x.reshape(count, shards * rows, *x.shape[3:]), place)

        def join(x):
            x = jnp.moveaxis(x.reshape(count, shards, rows, *x.shape[2:]), 0, 1)
            return x.reshape(shards, count * rows, *x.shape[3:])[:, : B // shards].reshape(B, *x.shape[3:])

        def piece(xs):
            tokens, length, active, copies, start = xs
            return self.scorer(params, tokens, length, active, temperature, copies, start)

        return jax.tree.map(
            join, jax.lax.map(piece, jax.tree.map(split, (tokens_BL, length_B, active_BL, copies, start_BL)))
        )
