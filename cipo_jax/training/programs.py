"""The programs of an experiment as training compiles them, lowered for devices that need not exist."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cipo_jax.distributed.compiled import bytes_per_device, with_shardings
from cipo_jax.distributed.mesh import data_shards
from cipo_jax.errors import UserError
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.models.attention import Visibility
from cipo_jax.models.cache import KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, cast, parameter_shardings
from cipo_jax.rollout.engine import Rollout, RolloutConfig
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.scoring.evidence import EvidenceScorer
from cipo_jax.scoring.logprobs import columns_of
from cipo_jax.scoring.packing import CopyStream
from cipo_jax.scoring.pieces import ScorerInPieces
from cipo_jax.training.policy import Learner, Policy
from cipo_jax.training.step import Method


class Programs:
    """Rollout, scoring and update with their real shapes; weights, questions and the tokenizer are stand-ins.

    Args:
      decoder: the policy's shape.
      rollout: sizes of trajectories.
      method: batch sizes, objective and optimiser.
      mesh: the device mesh.

    Attributes:
      rows: trajectories of a rollout batch.
      slots: those of them that are in work at once.
      micro: the update's microbatches and the rows of each.
      scoring_rows: rows that are scored at a time.
      length: tokens of a row.
      copies: places per row for counterfactual copies; 0 where the method scores none.
    """

    def __init__(self, decoder: DecoderConfig, rollout: RolloutConfig, method: Method, mesh: Mesh):
        self.decoder, self.config, self.method, self.mesh = decoder, rollout, method, mesh
        m, shards = method, data_shards(mesh)
        if m.questions % shards:
            raise UserError(
                f"Method.questions={m.questions} does not divide over {shards} data shards; use a multiple."
            )
        self.policy = Policy(decoder, mesh)
        self.policy.graph, _ = abstract_decoder(decoder, self.policy.rules)
        self.policy.scorer.graph = self.policy.graph
        self.learner = Learner(self.policy, m.objective, m.optimizer(), m.microbatches, m.temperature)
        self.params = with_shardings(self.policy.shapes, self.policy.sharding)
        state = jax.eval_shape(self.learner.optimizer.init, self.policy.shapes)
        self.state = with_shardings(state, self.learner.sharding)
        self.rows, self.length = m.questions * m.samples, rollout.total_tokens
        self.slots = min(rollout.slots or self.rows, self.rows)
        groups = -(-m.questions // m.minibatches)
        self.micro = m.microbatches, -(-groups * m.samples // (m.microbatches * shards)) * shards
        pieces = -(-self.rows // m.scoring_rows)
        self.scoring_rows = -(-self.rows // (pieces * shards)) * shards
        self.copies = (m.copy_capacity or self.length) if m.advantages.ealr_weight else 0

    def _array(self, shape, dtype, axes=("batch",)):
        """The shape of an operand split along its batch."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.policy.rules.sharding(axes))

    def _scalar(self, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((), dtype, sharding=self.policy.rules.replicated)

    def rollout(self) -> jax.stages.Lowered:
        """The generation loop over the whole batch."""
        c, m = self.config, self.method
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        c = dataclasses.replace(c, unroll=on_cpu if c.unroll is None else c.unroll)
        environment = Environment(_protocol(), {}, c.top_k, c.observation_tokens)
        program = Rollout(self.decoder, self.policy.graph, c, environment, self.policy.generation_rules)
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.policy.rules.replicated)
        sampling = Sampling(self._scalar(), self._scalar(jnp.int32), self._scalar())
        ids = self._array((m.questions, c.prompt_tokens), jnp.int32)
        return program._program.lower(
            self.params, ids, self._array((m.questions,), jnp.int32), key, sampling, samples=m.samples
        )

    def scoring(self) -> jax.stages.Lowered:
        """The pass over a whole rollout batch: with the counterfactual copies, or of the reference alone without them."""
        scorer = ScorerInPieces(self.policy.scorer, self.method.scoring_rows, self.policy.rules)
        batch = functools.partial(self._array, (self.rows, self.length))
        lengths = self._array((self.rows,), jnp.int32)
        operands = self.params, batch(jnp.int32), lengths, batch(bool), self._scalar()
        if not self.copies:
            return jax.jit(scorer.__call__, out_shardings=self.policy.rules.batch).lower(*operands)
        place = functools.partial(self._array, (self.rows, self.copies), jnp.int32)
        fields = {f.name: place() for f in dataclasses.fields(CopyStream) if f.name != "visibility"}
        copies = CopyStream(**fields, visibility=Visibility(*(place() for _ in dataclasses.fields(Visibility))))
        evidence = EvidenceScorer(scorer, self.method.counterfactual, self.policy.rules, self.method.copy_capacity)
        return evidence._program.lower(*operands, copies, None)

    def update(self) -> jax.stages.Lowered:
        """One optimiser step over its microbatches."""
        M, b = self.micro
        token = functools.partial(self._array, (M, b, self.length), axes=(None, "batch"))
        row = functools.partial(self._array, (M, b), axes=(None, "batch"))
        batch = UpdateBatch(
            tokens=token(jnp.int32),
            action_mask=token(bool),
            turn=token(jnp.int8),
            length=row(jnp.int32),
            group=row(jnp.int32),
            advantage=token(jnp.float32),
            old_logprob=token(jnp.float32),
            ref_logprob=token(jnp.float32),
        )
        return self.learner._update.lower(self.state, batch, self._scalar(), self._scalar())

    def flops(self) -> dict[str, float]:
        """FLOPs of each phase's matrix products on one device, every row full."""
        c, m, d = self.config, self.method, self.decoder
        prompts = m.questions * c.prompt_tokens  # forwarded once a question
        said = min((c.max_turns + 1) * c.action_tokens, c.total_tokens - c.prompt_tokens)  # a row's actions
        row = forward_flops(d, self.policy.size, self.length, said, self.length / 2)
        body = self.rows * (self.length - c.prompt_tokens)
        rollout = forward_flops(d, self.policy.size, prompts, 0, c.prompt_tokens / 2) + forward_flops(
            d, self.policy.size, body, self.rows * said, (self.length + c.prompt_tokens) / 2
        )
        # Copies read up to a row, and all of their tokens may be asked for.
        copies = forward_flops(d, self.policy.size, self.copies, self.copies, self.length / 2)
        passes = 4 if d.remat_policy == "full" else 3
        total = {
            "rollout": rollout,
            "scoring": self.rows * (row + copies),
            "update": passes * self.micro[0] * self.micro[1] * row,
        }
        return {name: value / self.mesh.size for name, value in total.items()}

    def turns(self, phase: str) -> dict[str, int]:
        """How often those loops of a phase turn whose number only the data knows, every row full; by scope."""
        c = self.config
        said = min((c.max_turns + 1) * c.action_tokens, c.total_tokens - c.prompt_tokens)
        if phase == "rollout":
            # Slots that a row leaves are taken by the next one.
            waves = self.rows / self.slots
            heard = min(c.max_turns * c.observation_tokens, c.total_tokens - c.prompt_tokens - said)
            return {
                "prefill": -(-c.prompt_tokens // c.chunk),
                "extend": math.ceil(waves * heard / c.chunk),
                "decode": math.ceil(waves * said),
            }
        rows, copied = (self.micro[1], 0) if phase == "update" else (self.scoring_rows, self.copies)
        return {"logprobs": -(-max(said, copied) // columns_of(rows, self.length, data_shards(self.mesh)))}

    def sizes(self) -> dict[str, int]:
        """Bytes per device of what an experiment keeps."""
        rules = self.policy.generation_rules
        weights = jax.eval_shape(lambda p: cast(p, self.decoder.compute_dtype), self.policy.shapes)
        gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), self.params)
        return {
            "parameters": bytes_per_device(self.params),
            "optimiser state": bytes_per_device(self.state.opt_state),
            "gradients": bytes_per_device(gradients),
            "generation weights": bytes_per_device(with_shardings(weights, parameter_shardings(weights, rules))),
            "KV cache": self._cache_bytes(self.slots, self.length),
            "prompts' KV cache": self._cache_bytes(self.method.questions, self.config.prompt_tokens),
        }

    def _cache_bytes(self, rows: int, places: int) -> int:
        """Read off the program that makes such a cache, so that its layout is known there alone."""
        rules = self.policy.generation_rules
        jaxpr = jax.make_jaxpr(lambda: KVCache.zeros(self.decoder, rows, places, rules))()
        placed = [
            jax.ShapeDtypeStruct(e.outvars[0].aval.shape, e.outvars[0].aval.dtype, sharding=e.params["sharding"])
            for e in jaxpr.eqns
            if e.primitive.name == "sharding_constraint"
        ]
        return bytes_per_device(placed)


def forward_flops(config: DecoderConfig, size: int, tokens: float, projected: float, context: float) -> float:
    """FLOPs of a forward's matrix products.

    Args:
      config: the decoder.
      size: its parameters.
      tokens: tokens forwarded.
      projected: those of them whose logits are computed.
      context: earlier tokens that each sees on average.
    """
    c = config
    vocabulary = c.vocab_size * c.width
    layers = size - vocabulary * (1 if c.tied else 2)
    attention = 4.0 * c.attention_layers * c.heads * c.head_dim * context
    delta = 6.0 * c.delta_layers * c.delta_value_heads * c.delta_key_dim * c.delta_value_dim
    return (2.0 * layers + attention + delta) * tokens + 2.0 * vocabulary * projected


def _protocol():
    """Stands in for a protocol and its tokenizer, whose vocabulary the stop table is made of."""
    backend = SimpleNamespace(to_str=lambda: '{"decoder": null}')
    tokenizer = SimpleNamespace(get_vocab=dict, backend_tokenizer=backend, added_tokens_decoder={})
    return SimpleNamespace(
        tokenizer=tokenizer,
        stop_strings=("</search>", "</answer>"),
        terminal_stops=("</answer>",),
        end_of_turn_ids=(0,),
        corrects_invalid=True,
    )
