"""Compiling for devices that are not here, and reading what a compiled program costs."""

import dataclasses
import math
import re
from typing import Any

import jax
from jax.experimental import topologies

from cipo_jax.errors import UserError

# High-bandwidth memory per device in bytes, less what the runtime keeps; by `device_kind`.
HBM = {
    "TPU v4": 32 * 2**30,
    "TPU v5 lite": 15.75 * 2**30,
    "TPU v5": 95.74 * 2**30,
    "TPU v6 lite": 31.25 * 2**30,
}


def topology_devices(name: str) -> list:
    """The devices of a TPU topology such as `v5e:4x4`, none of which need exist; needs the package libtpu.

    Raises:
      UserError: libtpu is missing or does not know the topology.
    """
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # libtpu tells what is wrong in many types
        raise UserError(
            f"no compiler for the topology {name!r} ({str(error).splitlines()[0]}); pip install libtpu, and name it like "
            "v5e:2x2, v5p:2x2x4 or v6e:4x4."
        ) from error


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Shapes that carry shardings: what a program is lowered for."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def bytes_per_device(shapes: Any) -> int:
    """The largest share of a pytree of sharded shapes that one device holds."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
        if hasattr(x.dtype, "itemsize")
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one program needs on one device, in bytes.

    Attributes:
      arguments: its operands.
      outputs: its results, less those that reuse an operand's memory.
      temporaries: everything in between.
      collectives: bytes that its collectives bring to one device, by kind; loops count every turn whose number is known.
      error: the compiler's words when it did not fit at all.
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def peak(self) -> int:
        """All of it at once."""
        return self.arguments + self.outputs + self.temporaries


def compile_cost(lowered: jax.stages.Lowered) -> Cost:
    """Compiles a lowered program and reads its cost."""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+)([GM]) of ([\d.]+)([GM]) hbm", str(error))
        size = float(used[1]) * (2**30 if used[2] == "G" else 2**20) if used else 0
        return Cost(temporaries=int(size), error=used[0] if used else str(error).splitlines()[0])
    memory = compiled.memory_analysis()
    return Cost(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        collectives=collective_bytes(compiled.as_text()),
    )


_WIDTH = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1, "s16": 2, "s64": 8}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_CALLS = re.compile(
    r"(?:body|calls|to_apply|condition|branch_computations|true_computation|false_computation)="
    r"\{?([^,}\s]+(?:, ?%[^,}\s]+)*)\}?"
)


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes that arrive at one device through each kind of collective, from a compiled program's text.

    A loop's body counts as often as the compiler knows it to turn, once where it does not (`while` on data).
    """
    own: dict[str, dict[str, int]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            match = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            if match:
                name = match[2]
                entry = name if match[1] else entry
                own[name], calls[name] = {}, []
            continue
        match = re.search(rf"= (.*?) ({_KINDS})(-start)?\(", line)
        if match and name:
            own[name][match[2]] = own[name].get(match[2], 0) + _shape_bytes(match[1], bool(match[3]))
        turns = re.search(r'known_trip_count[\\":{ ]+n[\\": ]+(\d+)', line)
        for called in _CALLS.findall(line):
            for one in called.split(","):
                calls.get(name, []).append((one.strip().lstrip("%"), int(turns[1]) if turns and "body=" in line else 1))

    known: dict[str, dict[str, int]] = {}

    def total(computation: str) -> dict[str, int]:
        if computation not in known:
            known[computation] = {}
            found = dict(own.get(computation, {}))
            for called, turns in calls.get(computation, []):
                for kind, size in total(called).items():
                    found[kind] = found.get(kind, 0) + turns * size
            known[computation] = found
        return known[computation]

    return total(entry)


def _shape_bytes(text: str, started: bool) -> int:
    sizes = [
        _WIDTH.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", text)
        if kind in _WIDTH
    ]
    # a started collective shows its operand beside its result
    return (max(sizes) if started else sum(sizes)) if sizes else 0
