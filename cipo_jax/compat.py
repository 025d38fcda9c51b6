"""Where JAX 0.10 (Python 3.11) and later releases (up to 0.12) differ. Nothing else branches on the version."""

import jax

try:
    from jax import shard_map
except ImportError:  # before the promotion out of jax.experimental
    from jax.experimental.shard_map import shard_map  # type: ignore[no-redef]

__all__ = ["COMPILE_EVENT", "add_duration_listener", "coordination_client", "remove_duration_listener", "shard_map"]

# Duration event that JAX records once per XLA compilation (a load from the persistent cache included).
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def add_duration_listener(listener) -> None:
    """Calls `listener(event, seconds, **metadata)` for every duration that JAX records."""
    jax.monitoring.register_event_duration_secs_listener(listener)


def remove_duration_listener(listener) -> None:
    """Undoes `add_duration_listener`; a listener that is not registered is ignored."""
    remove = getattr(jax.monitoring, "unregister_event_duration_listener", None)
    if remove is None:
        from jax._src import monitoring

        remove = getattr(monitoring, "unregister_event_duration_listener", lambda _: None)
    try:
        remove(listener)
    except (AssertionError, ValueError):
        return


def coordination_client():
    """The client of the key-value store and barriers that `jax.distributed` runs on the hosts; None when alone.

    It has no public name yet. Used: `key_value_set`, `key_value_dir_get`, `wait_at_barrier`.
    """
    from jax._src import distributed

    return distributed.global_state.client
