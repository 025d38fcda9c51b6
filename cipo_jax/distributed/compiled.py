"""Compiling for devices that are not here, and reading what a compiled program costs."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
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
      collectives: bytes that its collectives bring to one device, by kind, every turn of every loop counted.
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


def compile_cost(lowered: jax.stages.Lowered, turns: Mapping[str, int] | None = None) -> Cost:
    """Compiles a lowered program and reads its cost; for `turns` see `collective_bytes`."""
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
        collectives=collective_bytes(compiled.as_text(), turns),
    )


_WIDTH = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1, "s16": 2, "s64": 8}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_CALLS = re.compile(
    r"(?:calls|to_apply|branch_computations|true_computation|false_computation|called_computations)="
    r"\{?%?([^,}\s]+(?:, ?%[^,}\s]+)*)\}?"
)


def collective_bytes(text: str, turns: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes that arrive at one device through each kind of collective, from a compiled program's text.

    A loop's body counts as often as it turns: the number that the compiler notes, or that the loop's condition compares
    its counter with. For a loop over a number that only the data knows, `turns` is asked.

    Args:
      text: the compiled program.
      turns: by name of a `jax.named_scope`, how often a loop of unknown number turns that lies in the scope, or whose body
        does; 1 where none applies.
    """
    computations, entry = _computations(text)
    times = dict.fromkeys(computations, 0) | {entry: 1}  # how often each computation runs
    found: dict[str, int] = {}
    chains: dict[tuple[str, str], tuple[str, int]] = {}
    for name in reversed(computations):  # callers are printed behind what they call
        for line in computations[name]:
            if match := re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line):
                count = _trip_count(line, computations.get(match[1], ()))
                count = count or _guess(line, computations.get(match[2], ()), turns or {})
                times[match[2]] = times.get(match[2], 0) + count * times[name]
            for called in _CALLS.findall(line):
                for one in called.split(","):
                    one = one.strip().lstrip("%")
                    times[one] = times.get(one, 0) + times[name]
            if match := re.search(rf"= (.*?) ({_KINDS})(-start)?\(", line):
                size = times[name] * _shape_bytes(match[1], bool(match[3]))
                # The TPU compiler spreads a collective over fusions that compute something else meanwhile, also inside a
                # loop; each names all of it. It happens as often as the rarest of them.
                if part := re.search(r'channel_id=(\d+).*chain_id="(\d+)"', line):
                    _, least = chains.get(part.groups(), ("", size))
                    chains[part.groups()] = match[2], min(size, least)
                else:
                    found[match[2]] = found.get(match[2], 0) + size
    for kind, size in chains.values():
        found[kind] = found.get(kind, 0) + size
    return {kind: size for kind, size in found.items() if size}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            match = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            lines = found.setdefault(match[2], []) if match else []
            entry = match[2] if match and match[1] else entry
        else:
            lines.append(line)
    return found, entry


def _trip_count(line: str, condition: Sequence[str]) -> int:
    """Turns of the loop in `line`; 0 if unknown."""
    if match := re.search(r'known_trip_count[\\":{ ]+n[\\": ]+(\d+)', line):
        return int(match[1])
    constants = {}
    for instruction in condition:
        if match := re.search(r"%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)", instruction):
            constants[match[1]] = int(match[2])
        if match := re.search(r"ROOT .* compare\((.*?), %?([\w.\-]+)\), direction=LT", instruction):
            return constants.get(match[2], 0)  # loops count from 0
    return 0


def _guess(line: str, body: Sequence[str], turns: Mapping[str, int]) -> int:
    """The largest of `turns` whose scope the loop is in, or which its body is in; of no loop around or inside it; else 1."""
    if not (own := re.search(r'op_name="([^"]*)"', line)):
        return 1
    inside = re.findall(rf'op_name="{re.escape(own[1])}/body/([^"]*)"', "\n".join(body))
    names = [own[1].removesuffix("/while").split("/while/")[-1], *(name.split("while")[0] for name in inside)]
    return max((n for scope, n in turns.items() if any(re.search(rf"\b{scope}\b", name) for name in names)), default=1)


def _shape_bytes(text: str, started: bool) -> int:
    sizes = [
        _WIDTH.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", text)
        if kind in _WIDTH
    ]
    # a started collective shows its operand beside its result
    return (max(sizes) if started else sum(sizes)) if sizes else 0
