"""Sizes and schedule of a rollout."""

import dataclasses

import gin

from cipo_jax.errors import UserError
from cipo_jax.rollout.sampling import SAMPLERS

BLOCKING, LAG, READY = RETRIEVALS = ("blocking", "lag", "ready")


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
      slots: trajectories in work at once, over all devices; a finished one makes room for the next. None: all of them.
      extend_slots: slots of one data shard that an extend step takes; None: all of them. Few waste less where
        observations arrive one by one; `extend_slots x chunk` of a few hundred tokens keeps a device busy.
      reads: how many programs of a decode step there are. They attend to the first 1, 1/2, 1/4, ... of `total_tokens`
        places; the smallest that holds the longest running trajectory is taken. Each is compiled.
      retrieval: when answers of the retriever are taken. `blocking`: all at once, when nothing else is left to do. `lag`:
        each one `retrieval_lag` decode steps after its search, which waits for a late one: other slots decode meanwhile,
        and the same trajectories come out bit for bit however long the retriever takes. `ready`: as soon as they are
        there; the schedule, and with it the last bits, depend on the retriever's speed.
      retrieval_lag: see above.
      poll_steps: `lag` and `ready` turn to the host after this many decode steps at the earliest.
      retrieval_timeout_s: a search that takes longer fails: the agent is told, and it is counted.
      retrieval_workers: calls of retrievers at once, per process.
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
    slots: int | None = None
    extend_slots: int | None = None
    reads: int = 1
    retrieval: str = BLOCKING
    retrieval_lag: int = 8
    poll_steps: int = 1
    retrieval_timeout_s: float = 60.0
    retrieval_workers: int = 4

    def __post_init__(self):
        for name, values in (("sampler", SAMPLERS), ("retrieval", RETRIEVALS)):
            if getattr(self, name) not in values:
                raise UserError(f"RolloutConfig.{name}={getattr(self, name)!r} is not one of {', '.join(values)}")
        if self.prompt_tokens >= self.total_tokens:
            raise UserError(
                f"RolloutConfig.prompt_tokens={self.prompt_tokens} leaves nothing of total_tokens={self.total_tokens}"
            )
        for name in ("slots", "extend_slots", "reads", "retrieval_lag", "poll_steps", "retrieval_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"RolloutConfig.{name}={value}: use a whole number from 1")

    @property
    def read_places(self) -> list[int]:
        """Places of the cache that each program of a decode step attends to, shortest first."""
        shares = (-(-self.total_tokens // 2**i) for i in range(self.reads))
        return sorted({share + -share % 8 for share in shares if share < self.total_tokens} | {self.total_tokens})
