"""Compiles an experiment's rollout, scoring and update for a TPU topology that need not be here, and tells whether they fit.

    pip install libtpu
    python -m cipo_jax.plan --topology=v5e:4x4 --gin_file=configs/experiments/cipo_qwen2_5_3b.gin

The file is one that `cipo_jax.train` takes, or binds `Plan.decoder` and what else of `Plan` it needs. Try a change without
editing it:  --gin_binding='Method.microbatches = 32'

The programs are the ones that training runs, with their real shapes; only weights, questions and the tokenizer are
stand-ins. Every number is per device, and of a step whose rows are all full. What is moved is what arrives through
collectives, every turn of every loop counted. The exit code is 1 if a phase does not fit; then it also says which lines of
the configuration to change. Compiling takes minutes a phase; name one with --gin_binding='Plan.phases = ("update",)'.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable

import gin
import jax
from absl import flags
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from cipo_jax import cli
from cipo_jax.distributed.compiled import HBM, Cost, compile_cost, topology_devices
from cipo_jax.distributed.mesh import mesh
from cipo_jax.models.config import DecoderConfig
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.advice import advice
from cipo_jax.training.loop import Run
from cipo_jax.training.programs import Programs
from cipo_jax.training.step import Method

flags.DEFINE_string("topology", None, "TPU topology, such as v5e:4x4; the devices of this machine when not set.")
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
      name: rollout, scoring or update.
      cost: of its program.
      resident: bytes that stay in memory beside the program's own.
      flops: of its matrix products, on one device.
      seconds: the compilation took.
    """

    name: str
    cost: Cost
    resident: int
    flops: float
    seconds: float

    @property
    def peak(self) -> int:
        return self.cost.peak + self.resident

    def fits(self, limit: float | None) -> bool:
        """Whether its peak is below `limit` bytes (None: unknown, then what the compiler says)."""
        return not self.cost.error and (limit is None or self.peak <= limit)

    def shrink(self, limit: float | None) -> float:
        """What its temporaries have to be divided by to fit; infinity where the rest alone takes all."""
        size = limit or math.inf
        if self.cost.error:  # the compiler gives one number for all that the program needs
            return math.inf if self.resident >= size else self.cost.temporaries / (size - self.resident)
        room = size - (self.peak - self.cost.temporaries)
        return math.inf if room <= 0 else self.cost.temporaries / room


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

    def programs(self, devices) -> Programs:
        """Its programs on a mesh of `devices`."""
        return Programs(self.decoder, self.rollout, self.method, self.mesh(devices=devices))

    def limit(self, device) -> float | None:
        """Bytes that a phase may take on a device; None where its memory is not known."""
        size = HBM.get(device.device_kind)
        return None if size is None else (1 - self.headroom) * size


def make_plan(plan: Plan, devices, say=print) -> list[Phase]:
    """Compiles the phases and prints the table; returns them."""
    programs = plan.programs(devices)
    sizes = programs.sizes()
    reference = sizes["parameters"]  # the initial policy, for the KL term
    # Beside each program's arguments: rollout and EALR's pass get the parameters, the reference's pass the reference.
    resident = {
        "rollout": sizes["optimiser state"] + reference,
        "scoring": sizes["optimiser state"] + reference,
        "update": reference,
    }
    flops = programs.flops()
    phases = []
    for name in plan.phases:
        began = time.perf_counter()
        cost = compile_cost(getattr(programs, name)(), programs.turns(name))
        phases.append(Phase(name, cost, resident[name], flops[name], time.perf_counter() - began))
        say(f"compiled {name} in {phases[-1].seconds:.0f} s")
    _show(plan, programs, sizes, phases)
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
    return 0 if all(phase.fits(plan.limit(devices[0])) for phase in phases) else 1


def _show(plan: Plan, programs: Programs, sizes: dict[str, int], phases: list[Phase]) -> None:
    console = Console(width=150)
    device, m = programs.mesh.devices.flat[0], plan.method
    shape = " x ".join(f"{name} {size}" for name, size in programs.mesh.shape.items())
    console.print(
        f"{programs.policy.size / 1e9:.3f} B parameters on {programs.mesh.size} {device.device_kind}, {shape}; "
        f"{m.questions} questions x {m.samples} samples x {programs.length} tokens; scoring {programs.scoring_rows} rows "
        f"at a time, update in {programs.micro[0]} x {programs.micro[1]} rows"
    )
    kept = Table(title="kept per device, GiB")
    kept.add_column("what")
    kept.add_column("GiB", justify="right")
    for name, value in sizes.items():
        kept.add_row(name, f"{value / GIB:.2f}")
    console.print(kept)
    table = Table(title="phases, GiB per device")
    for column in ("phase", "arguments", "results", "temporaries", "resident", "peak", "of", "TFLOP", "moved"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in phases:
        c = phase.cost
        moved = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in sorted(c.collectives.items())) or "-"
        cells = (c.arguments, c.outputs, c.temporaries, phase.resident, phase.peak, HBM.get(device.device_kind, 0))
        table.add_row(phase.name, *(f"{x / GIB:.2f}" for x in cells), f"{phase.flops / 1e12:.1f}", moved)
    console.print(table)
    limit = plan.limit(device)
    for phase in phases:
        if phase.fits(limit):
            console.print(f"{phase.name} fits")
            continue
        why = phase.cost.error or f"{phase.peak / GIB:.1f} GiB of {limit / GIB:.1f}"
        console.print(f"{phase.name} does not fit ({why}); what helps, the best first:")
        for line in advice(phase.name, programs, sizes, phase.shrink(limit)):
            console.print(f"  {line}")


if __name__ == "__main__":
    cli.run(main)
