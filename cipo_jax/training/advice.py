"""Which lines of a configuration to change when a phase does not fit."""

import math

from cipo_jax.distributed.mesh import data_shards
from cipo_jax.training.programs import Programs


def advice(phase: str, programs: Programs, sizes: dict[str, int], shrink: float = 2.0) -> list[str]:
    """Gin lines with a reason each, the most promising first; every one changes something of this configuration.

    Args:
      phase: rollout, scoring or update.
      programs: of the experiment.
      sizes: bytes per device of what it keeps, see `Programs.sizes`.
      shrink: what the phase's temporaries have to be divided by; infinity where no room is left for any.
    """
    d, mesh = programs.decoder, programs.mesh
    shards, lines = data_shards(mesh), []
    wide = d.dtype == "float32" and mesh.devices.flat[0].platform != "cpu"
    if wide:
        lines.append('DecoderConfig.dtype = "bfloat16"  # half the activations, cache and generation weights')
    if phase == "update":
        if d.remat_policy != "full":
            lines.append('DecoderConfig.remat = "full"  # keep each layer\'s input alone for the backward pass')
        if programs.micro[1] > shards:
            fewer = _divided(programs.micro[1] // shards, shrink) * shards
            count = -(-programs.micro[0] * programs.micro[1] // fewer)
            lines.append(f"Method.microbatches = {count}  # {fewer} rows at a time instead of {programs.micro[1]}")
    elif phase == "scoring":
        if programs.scoring_rows > shards:
            fewer = _divided(programs.scoring_rows // shards, shrink) * shards
            count = -(-programs.rows // fewer)
            lines.append(
                f"Method.scoring_microbatches = {count}  # {fewer} rows at a time, not {programs.scoring_rows}"
            )
        if programs.copies > 1024:
            lines.append(
                f"Method.copy_capacity = {programs.copies // 2}  # places for copies; what does not fit costs a pass"
            )
    else:
        lines += _rollout(programs, sizes, shrink)
    if phase != "rollout" and (programs.micro[1] if phase == "update" else programs.scoring_rows) <= shards:
        lines += _wider(programs, "a device then holds half of every row's heads, ffn and logits")
    state = sizes["parameters"] * 2 + sizes["optimiser state"] + sizes["gradients"] * (phase == "update")
    if mesh.shape["replica"] > 1:
        lines.append("mesh.replica = 1  # copies of the whole state become shares of one")
    devices = (
        f"more devices, shared by mesh.fsdp  # {state / 2**30:.1f} GiB a device of parameters, their reference, optimiser"
        f"{' and gradients' if phase == 'update' else ''} now on {mesh.size}"
    )
    return [devices, *lines] if shrink == math.inf else [*lines, devices]


def _rollout(programs: Programs, sizes: dict[str, int], shrink: float) -> list[str]:
    c, shards, cache = programs.config, data_shards(programs.mesh), []
    held = f"the cache holds {programs.slots} rows of {c.total_tokens} tokens: {sizes['KV cache'] / 2**30:.1f} GiB a device"
    if programs.slots > shards:
        fewer = _divided(programs.slots // shards, shrink) * shards
        cache.append(f"RolloutConfig.slots = {fewer}  # {held}; trajectories then wait for a slot")
    else:
        cache.append(f"RolloutConfig.total_tokens = {c.total_tokens // 2}  # {held}")
    whole = f"generation splits its weights over tensor alone: {sizes['generation weights'] / 2**30:.1f} GiB a device"
    weights = _wider(programs, whole)
    return weights + cache if sizes["generation weights"] > sizes["KV cache"] else cache + weights


def _wider(programs: Programs, reason: str) -> list[str]:
    """A tensor axis of twice the size, where the mesh and the decoder's heads allow it."""
    tensor, fsdp = programs.mesh.shape["tensor"], programs.mesh.shape["fsdp"]
    if fsdp % 2 or programs.decoder.heads % (2 * tensor):
        return []
    return [f"mesh.tensor = {2 * tensor} and mesh.fsdp = {fsdp // 2}  # {reason}"]


def _divided(n: int, by: float) -> int:
    """The largest `n / 2^k`, at least 1, that is no more than `n / by`; of infinity half."""
    by = 2.0 if by == math.inf else max(by, 2.0)
    return max(1, n // 2 ** math.ceil(math.log2(by)))
