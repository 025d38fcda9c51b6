"""Starting JAX on several processes or hosts."""

import os
import sys
import time
import traceback
from collections.abc import Callable

import jax

from cipo_jax.errors import UserError

_CLUSTER = ("CIPO_COORDINATOR", "CIPO_PROCESS_ID", "CIPO_NUM_PROCESSES")


def initialise(environment: dict[str, str] | None = None) -> bool:
    """Connects this process to its fellows; without them it does nothing.

    Call it before anything touches a device. Two ways to say that there are several processes:

    - `CIPO_COORDINATOR=host:port`, `CIPO_PROCESS_ID`, `CIPO_NUM_PROCESSES`, which `launch/local.sh` sets;
    - `CIPO_DISTRIBUTED=auto` where JAX finds its fellows by itself (Cloud TPU pods, SLURM, Kubernetes, MPI).

    Args:
      environment: Variables to read, `os.environ` when None.

    Returns:
      Whether this process is one of several.

    Raises:
      UserError: Some but not all variables are set, or one does not make sense.
    """
    environment = dict(os.environ if environment is None else environment)
    # `training.checkpoints.StopSignal` handles SIGTERM; JAX's service would swallow it from the first moment on.
    jax.config.update("jax_enable_preemption_service", False)
    if environment.get("CIPO_DISTRIBUTED", "") == "auto":
        jax.distributed.initialize()
        return jax.process_count() > 1
    given = {name: environment[name] for name in _CLUSTER if environment.get(name)}
    if not given:
        return False
    if missing := [name for name in _CLUSTER if name not in given]:
        raise UserError(f"{missing[0]} is not set although {next(iter(given))} is; set all of {', '.join(_CLUSTER)}.")
    coordinator = given["CIPO_COORDINATOR"]
    process, count = (_integer(name, given[name]) for name in _CLUSTER[1:])
    if not 0 <= process < count:
        raise UserError(f"CIPO_PROCESS_ID={process} is not below CIPO_NUM_PROCESSES={count}; number processes from 0.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"CIPO_COORDINATOR={coordinator!r} is not host:port; use for example 127.0.0.1:12345.")
    if count == 1:
        return False
    if jax.config.jax_platforms == "cpu" or environment.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A loopback coordinator binds to loopback alone; otherwise JAX's default, all addresses, is needed.
    bind = f"{host}:{port}" if host in ("127.0.0.1", "localhost") else None
    jax.distributed.initialize(
        coordinator, num_processes=count, process_id=process, coordinator_bind_address=bind, initialization_timeout=120
    )
    return True


def leave_on_failure(program: Callable[[], int]) -> int:
    """Runs `program`; when it fails as one of several processes, ends this process at once.

    An ordinary exit waits until all processes reach their end, which fellows that wait for this one never do.

    Args:
      program: Returns the exit code.

    Returns:
      The exit code, if it is 0 or this process is alone. What `program` raises passes through when it is alone.
    """
    try:
        code = program()
    except BaseException:
        if not _connected():
            raise
        traceback.print_exc()
        code = 1
    if code and _connected():
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(2)  # process 0 hosts the coordinator: fellows with the same error first get to tell it
        os._exit(code)
    return code


def _connected() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is not a whole number; use for example {name}=0.") from None
