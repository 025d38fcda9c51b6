"""Compiles an experiment's rollout, scoring and update for a TPU topology that need not be here, and tells whether they fit.

    pip install libtpu
    python -m cipo_jax.plan --topology=v5e:4x4 --gin_file=experiment.gin

where the file is one that `cipo_jax.train` takes, or binds `Plan.decoder` and what else of `Plan` it needs.

The programs are the ones that training runs, with their real shapes; only weights, questions and the tokenizer are
stand-ins. Every number is per device.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import gin
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from cipo_jax import cli
from cipo_jax.distributed.compiled import HBM, Cost, bytes_per_device, compile_cost, topology_devices, with_shardings
from cipo_jax.distributed.mesh import data_shards, mesh
from cipo_jax.errors import UserError
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.models.attention import Visibility
from cipo_jax.models.cache import KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, parameter_shardings
from cipo_jax.rollout.engine import Rollout, RolloutConfig
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.scoring.packing import CopyStream
from cipo_jax.training.loop import Run
from cipo_jax.training.policy import Learner, Policy
from cipo_jax.training.step import Method

flags.DEFINE_string("topology", None, "TPU topology, such as v5e:4x4; the devices of this machine when not set.")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
      name: rollout, scoring or update.
      cost: of its program.
      resident: bytes that stay in memory beside the program's own.
      seconds: the compilation took.
    """

    name: str
    cost: Cost
    resident: int
    seconds: float

    @property
    def peak(self) -> int:
        return self.cost.peak + self.resident


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compile.

    Attributes:
      decoder: the policy's shape; None takes decoder, rollout, method and mesh from the experiment's `Run`.
      rollout: sizes of trajectories.
      method: batch sizes, objective and optimiser.
      mesh: builds the device mesh; called with `devices`.
      phases: which of rollout, scoring and update to compile.
      headroom: the fraction of the memory that is to stay free.
    """

    decoder: DecoderConfig | None = None
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    method: Method = dataclasses.field(default_factory=Method)
    mesh: Callable[..., Mesh] = mesh
    phases: tuple[str, ...] = ("rollout", "scoring", "update")
    headroom: float = 0.03


class Programs:
    """The programs of an experiment, lowered for a mesh of devices that need not exist."""

    def __init__(self, plan: Plan, devices):
        self.plan, self.mesh = plan, plan.mesh(devices=devices)
        m, c = plan.method, plan.rollout
        self.policy = Policy(plan.decoder, self.mesh)
        self.policy.graph, _ = abstract_decoder(plan.decoder, self.policy.rules)
        self.policy.scorer.graph = self.policy.graph
        self.learner = Learner(self.policy, m.objective, m.optimizer(), m.microbatches, m.temperature)
        self.params = with_shardings(self.policy.shapes, self.policy.sharding)
        state = jax.eval_shape(self.learner.optimizer.init, self.policy.shapes)
        self.state = with_shardings(state, self.learner.sharding)
        self.rows = m.questions * m.samples
        shards = data_shards(self.mesh)
        if m.questions % shards:
            raise UserError(
                f"Method.questions={m.questions} does not divide over {shards} data shards; use a multiple."
            )
        per_update = -(-self.rows // m.minibatches)
        self.micro = m.microbatches, -(-per_update // (m.microbatches * shards)) * shards
        self.length = c.total_tokens

    def array(self, shape, dtype, axes=("batch",)):
        """The shape of an operand split along its batch."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.policy.rules.sharding(axes))

    def scalar(self, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((), dtype, sharding=self.policy.rules.replicated)

    def rollout(self) -> jax.stages.Lowered:
        """The generation loop over the whole batch."""
        c, m = self.plan.rollout, self.plan.method
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        c = dataclasses.replace(c, unroll=on_cpu if c.unroll is None else c.unroll)
        environment = Environment(_protocol(), {}, c.top_k, c.observation_tokens)
        program = Rollout(self.plan.decoder, self.policy.graph, c, environment, self.policy.generation_rules)
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.policy.rules.replicated)
        sampling = Sampling(self.scalar(), self.scalar(jnp.int32), self.scalar())
        ids = self.array((m.questions, c.prompt_tokens), jnp.int32)
        return program._program.lower(
            self.params, ids, self.array((m.questions,), jnp.int32), key, sampling, samples=m.samples
        )

    def scoring(self) -> jax.stages.Lowered:
        """The visible and counterfactual log-probs of one microbatch of rows."""
        rows, capacity = self.micro[1], self.plan.method.copy_capacity or self.length
        batch = functools.partial(self.array, (rows, self.length))
        place = functools.partial(self.array, (rows, capacity), jnp.int32)
        fields = {f.name: place() for f in dataclasses.fields(CopyStream) if f.name != "visibility"}
        copies = CopyStream(**fields, visibility=Visibility(*(place() for _ in dataclasses.fields(Visibility))))

        def program(params, tokens, length, active, temperature, copies):
            return self.policy.scorer(jax.lax.stop_gradient(params), tokens, length, active, temperature, copies)

        lengths = self.array((rows,), jnp.int32)
        return jax.jit(program, out_shardings=self.policy.rules.batch).lower(
            self.params, batch(jnp.int32), lengths, batch(bool), self.scalar(), copies
        )

    def update(self) -> jax.stages.Lowered:
        """One optimiser step over its microbatches."""
        M, b = self.micro
        token = functools.partial(self.array, (M, b, self.length), axes=(None, "batch"))
        row = functools.partial(self.array, (M, b), axes=(None, "batch"))
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
        return self.learner._update.lower(self.state, batch, self.scalar(), self.scalar())

    def sizes(self) -> dict[str, int]:
        """Bytes per device of what an experiment keeps."""
        rules = self.policy.generation_rules
        cache = jax.eval_shape(lambda: KVCache.zeros(self.plan.decoder, self.rows, self.length))
        kv = rules.sharding(("layers", "batch", "kv_heads", None, "head_dim"), cache.key.shape)
        state = rules.sharding((None, "batch"))
        cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state), cache)
        cache = dataclasses.replace(
            cache, **{k: jax.ShapeDtypeStruct(cache.key.shape, cache.key.dtype, sharding=kv) for k in ("key", "value")}
        )
        generation = with_shardings(self.policy.shapes, parameter_shardings(self.policy.shapes, rules))
        gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), self.params)
        return {
            "parameters": bytes_per_device(self.params),
            "optimiser state": bytes_per_device(self.state.opt_state),
            "gradients": bytes_per_device(gradients),
            "generation weights": bytes_per_device(generation),
            "KV cache": bytes_per_device(cache),
        }


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


def flops(config: DecoderConfig, size: int, tokens: int, context: float) -> float:
    """Matmul FLOPs of a forward over `tokens` tokens that each see `context` earlier ones on average."""
    dense = 2.0 * size * tokens
    attention = 4.0 * config.attention_layers * config.heads * config.head_dim * context * tokens
    delta = (
        6.0 * config.delta_layers * config.delta_value_heads * config.delta_key_dim * config.delta_value_dim * tokens
    )
    return dense + attention + delta


def make_plan(plan: Plan, devices, say=print) -> list[Phase]:
    """Compiles the phases and prints the table; returns them."""
    programs = Programs(plan, devices)
    sizes = programs.sizes()
    reference = sizes["parameters"]  # the initial policy, for the KL term and EALR
    resident = {
        "rollout": sizes["optimiser state"] + reference,
        "scoring": sizes["optimiser state"] + reference,
        "update": reference,
    }
    phases = []
    for name in plan.phases:
        began = time.perf_counter()
        cost = compile_cost(getattr(programs, name)())
        phases.append(Phase(name, cost, resident[name], time.perf_counter() - began))
        say(f"compiled {name} in {phases[-1].seconds:.0f} s")
    _show(programs, sizes, phases)
    return phases


def main() -> int:
    name = flags.FLAGS.topology
    if name:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    devices = topology_devices(name) if name else jax.devices()
    plan = Plan()
    if plan.decoder is None:
        run = Run()
        plan = dataclasses.replace(plan, decoder=run.decoder, rollout=run.rollout, method=run.method, mesh=run.mesh)
    phases = make_plan(plan, devices)
    limit = HBM.get(devices[0].device_kind)
    return 1 if limit and any(p.cost.error or p.peak > (1 - plan.headroom) * limit for p in phases) else 0


_MEND = {
    "rollout": "lower Method.questions or RolloutConfig.total_tokens, raise mesh.tensor or mesh.fsdp",
    "scoring": "raise Method.microbatches, lower Method.copy_capacity",
    "update": "raise Method.microbatches, set DecoderConfig.remat = 'full', raise mesh.fsdp",
}


def _show(programs: Programs, sizes: dict[str, int], phases: list[Phase]) -> None:
    plan, console, gib = programs.plan, Console(width=150), 2**30
    device = programs.mesh.devices.flat[0]
    limit = HBM.get(device.device_kind)
    shape = " x ".join(f"{name} {size}" for name, size in programs.mesh.shape.items())
    size, m = programs.policy.size, plan.method
    console.print(
        f"{size / 1e9:.3f} B parameters on {programs.mesh.size} {device.device_kind}, {shape}; {m.questions} questions x "
        f"{m.samples} samples x {programs.length} tokens, update in {programs.micro[0]} x {programs.micro[1]} rows"
    )
    kept = Table(title="kept per device, GiB")
    kept.add_column("what")
    kept.add_column("GiB", justify="right")
    for name, value in sizes.items():
        kept.add_row(name, f"{value / gib:.2f}")
    console.print(kept)
    tokens = programs.rows * programs.length
    forward = flops(plan.decoder, size, 1, programs.length / 2)
    work = {
        "rollout": forward * tokens,
        "scoring": forward * 2 * programs.micro[1] * programs.length,
        "update": (4 if plan.decoder.remat_policy == "full" else 3)
        * forward
        * np.prod(programs.micro)
        * programs.length,
    }
    table = Table(title="phases, GiB per device")
    for column in (
        "phase",
        "arguments",
        "results",
        "activations, temporaries",
        "resident",
        "peak",
        "of",
        "TFLOP",
        "moved",
    ):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in phases:
        c = phase.cost
        moved = ", ".join(f"{kind} {size / gib:.2f}" for kind, size in sorted(c.collectives.items())) or "-"
        cells = (c.arguments, c.outputs, c.temporaries, phase.resident, phase.peak, limit or 0)
        cells = [f"{x / gib:.2f}" for x in cells]
        table.add_row(phase.name, *cells, f"{work[phase.name] / programs.mesh.size / 1e12:.1f}", moved)
    console.print(table)
    for phase in phases:
        if phase.cost.error:
            console.print(f"{phase.name} does not fit ({phase.cost.error}): {_MEND[phase.name]}")
        elif limit and phase.peak > (1 - plan.headroom) * limit:
            console.print(
                f"{phase.name} does not fit ({phase.peak / gib:.1f} of {limit / gib:.1f}): {_MEND[phase.name]}"
            )
        elif limit:
            console.print(f"{phase.name} fits")


if __name__ == "__main__":
    cli.run(main)
