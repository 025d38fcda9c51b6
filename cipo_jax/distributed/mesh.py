"""The device mesh `(replica, fsdp, tensor)`."""

import gin
import jax
import numpy as np
from jax.sharding import Mesh

from cipo_jax.errors import UserError

AXES = ("replica", "fsdp", "tensor")
DATA_AXES = ("replica", "fsdp")  # a batch is split over both


@gin.configurable
def mesh(replica: int = 1, fsdp: int = -1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over all devices (or `devices`), with axes `(replica, fsdp, tensor)`.

    Args:
      replica: copies of the parameters, each with its own share of the batch.
      fsdp: devices that share the parameters and the batch; -1 takes what the other two leave.
      tensor: devices that split heads, ffn and vocabulary of one row.
      devices: devices to use; all of them if None.

    Raises:
      UserError: the product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if fsdp == -1:
        fsdp = max(1, len(devices) // (replica * tensor))
    if replica * fsdp * tensor != len(devices):
        raise UserError(
            f"mesh replica={replica} x fsdp={fsdp} x tensor={tensor} needs {replica * fsdp * tensor} devices, "
            f"there are {len(devices)}; set mesh.replica, mesh.fsdp and mesh.tensor to a product of {len(devices)}"
        )
    return Mesh(np.array(devices).reshape(replica, fsdp, tensor), AXES)


def data_shards(mesh: Mesh) -> int:
    """The number of parts that a batch is split into."""
    return mesh.shape["replica"] * mesh.shape["fsdp"]
