"""The policy and the programs that run it: rollout, scoring, updates. Built once, then only called."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cipo_jax.distributed.mesh import data_shards
from cipo_jax.distributed.sharding import GENERATION_RULES, ShardingRules
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.microbatch import split_microbatches
from cipo_jax.learning.state import Optimizer, TrainState
from cipo_jax.learning.update import make_update
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, init_decoder, parameter_count, parameter_shardings
from cipo_jax.models.weights import check_decoder, load_decoder, open_checkpoint
from cipo_jax.rollout.engine import Rollout, RolloutConfig
from cipo_jax.rollout.environment import Environment
from cipo_jax.scoring.score import Scorer
from cipo_jax.training.task import Task


class Policy:
    """A decoder on a mesh.

    Args:
      decoder: its shape.
      device_mesh: the mesh.
      weights: folder, `.safetensors` or `.gguf` file that `init` reads; None for random parameters.

    Raises:
      UserError: the checkpoint cannot be opened, or describes another decoder.
    """

    def __init__(self, decoder: DecoderConfig, device_mesh: Mesh, weights: str | None = None):
        self.decoder = decoder
        self._checkpoint = None if weights is None else open_checkpoint(weights)
        if self._checkpoint is not None:
            check_decoder(self._checkpoint, decoder)
        self.rules = ShardingRules(device_mesh)
        self.generation_rules = ShardingRules(device_mesh, GENERATION_RULES)
        self.graph, self.shapes = abstract_decoder(decoder, self.rules)
        self.sharding = parameter_shardings(self.shapes, self.rules)
        self.scorer = Scorer(self.graph)
        self.size = parameter_count(self.shapes)

    def init(self, seed: int) -> Any:
        """The checkpoint's parameters, or random ones; created sharded."""
        if self._checkpoint is not None:
            return load_decoder(self._checkpoint, self.rules, self.decoder).params
        return init_decoder(self.decoder, seed, self.rules)[1]

    def environment(self, task: Task, config: RolloutConfig) -> Environment:
        """The host side of rollouts on `task`."""
        c = config
        return Environment(
            task.protocol,
            task.retrievers,
            c.top_k,
            c.observation_tokens,
            timeout_s=c.retrieval_timeout_s,
            workers=c.retrieval_workers,
        )

    def rollout(self, environment: Environment, config: RolloutConfig) -> Rollout:
        """The rollout program."""
        return Rollout(self.decoder, self.graph, config, environment, self.generation_rules)


class Learner:
    """An optimiser and an objective on a policy: splits a batch into microbatches and runs the jitted update.

    Args:
      policy: whose parameters are trained.
      objective: see `learning/objective.py`.
      optimizer: see `learning/state.py`.
      microbatches: pieces of a minibatch whose gradients are accumulated.
      temperature: of the log-probs in the objective.
    """

    def __init__(
        self, policy: Policy, objective: Any, optimizer: Optimizer, microbatches: int = 1, temperature: float = 1.0
    ):
        self.policy, self.optimizer, self.microbatches = policy, optimizer, microbatches
        self.temperature = np.float32(temperature)
        self.sharding = optimizer.state_sharding(policy.shapes, policy.sharding)
        self._init = jax.jit(optimizer.init, out_shardings=self.sharding)
        scorer = policy.scorer

        def logprobs(params, tokens, length, active, temperature):
            return scorer(params, tokens, length, active, temperature)

        self._update = make_update(logprobs, objective, optimizer, state_sharding=self.sharding)

    def init(self, params) -> TrainState:
        """A fresh state around a copy of `params`."""
        return self._init(params)

    def update(self, state: TrainState, batch: UpdateBatch, number: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimiser step on a host batch; `number` counts updates, for the schedule. Metrics stay on the device."""
        rules = self.policy.rules
        micro = split_microbatches(batch, self.microbatches, data_shards(rules.mesh))
        micro = jax.device_put(micro, rules.sharding((None, "batch")))
        return self._update(state, micro, self.optimizer.rate(number), self.temperature)
