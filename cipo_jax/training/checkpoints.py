"""Checkpoints of a run: one Orbax item set per step, written in the background, complete or absent.

A step directory appears by one rename after everything in it is on disk, so a process killed at any instant leaves the
previous checkpoint as the newest. A checkpoint is the train state (arrays) and JSON metadata (data step, position in
the metrics file, best score), saved together, because a run resumes exactly only when all of them are of one step.
"""

import json
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import numpy as np
import orbax.checkpoint as ocp

from cipo_jax import compat
from cipo_jax.errors import UserError

_TRASH = "removed"  # Orbax renames an old step into it, which is atomic; its content is deleted afterwards
# By default Orbax lets replicas share the writing of a replicated array, and compiles programs that slice it.
_ARRAYS = ocp.type_handlers.create_type_handler_registry(
    (np.ndarray, ocp.type_handlers.NumpyHandler()),
    (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False)),
)
_BARRIER_MS = 3_600_000  # a host may be busy for long (compiling, evaluating); a dead one is noticed by its heartbeat


@gin.configurable(denylist=["directory", "read_only"])
class Checkpoints:
    """Saves and restores checkpoints of one run; in a multi-host run every process makes the same calls.

    Args:
      directory: Where the step directories go; created when absent.
      keep: How many of the newest are kept, besides the one with the highest score.
      background: Whether `save` returns once the arrays are copied to the host, while files are still written.
      read_only: Never write or delete (evaluation of another run's checkpoints).
    """

    def __init__(
        self, directory: str | os.PathLike, *, keep: int = 2, background: bool = True, read_only: bool = False
    ):
        if keep < 1:
            raise UserError(f"Checkpoints.keep={keep} keeps no checkpoint; use 1 or more.")
        self.directory = Path(directory).absolute()
        self._read_only = read_only
        if read_only and not self.directory.is_dir():
            raise UserError(f"There is no checkpoint directory {self.directory}; check the run directory.")
        self._empty_trash()
        self._scores: dict[int, float] = {}
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(type_handler_registry=_ARRAYS),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                create=not read_only,
                enable_async_checkpointing=background,
                cleanup_tmp_directories=not read_only,
                preservation_policy=_LatestAndBest(keep, self._scores),
                todelete_subdir=None if read_only else _TRASH,
            ),
        )
        for step in self.steps:
            self._remember_score(step, self._read_json(step)["score"])

    @property
    def steps(self) -> list[int]:
        """Complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint; None without any."""
        return self.steps[-1] if self.steps else None

    @property
    def best_step(self) -> int | None:
        """The checkpoint with the highest score, the later of equal ones; None when none has a score."""
        return _best(self.steps, self._scores)

    @property
    def selected_step(self) -> int | None:
        """The best checkpoint, the newest where none has a score; None without any."""
        return self.latest_step if self.best_step is None else self.best_step

    @property
    def best_score(self) -> float | None:
        """The highest score; None when no checkpoint has one."""
        return None if self.best_step is None else self._scores[self.best_step]

    def save(self, step: int, state: Any, meta: Mapping[str, Any], *, score: float | None = None) -> None:
        """Saves one checkpoint; waits first for an earlier one that is still being written.

        Args:
          step: Updates done. Saving a step that is already there does nothing.
          state: Any pytree of arrays, typed PRNG keys and NumPy scalars included. It may be donated to the next update
            as soon as this returns.
          meta: JSON values.
          score: Validation score, higher is better; None or a value that is not finite when there is none.
        """
        if self._read_only:
            raise ValueError(f"{self.directory} was opened to read only.")
        self.wait()
        if step in self._manager.all_steps():
            return
        score = float(score) if score is not None and math.isfinite(score) else None
        self._remember_score(step, score)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave({name: _to_disk(leaf) for name, leaf in _named(state).items()}),
                meta=ocp.args.JsonSave({"score": score, "meta": json.loads(json.dumps(dict(meta), default=_json))}),
            ),
            force=True,  # when to save is the loop's decision
        )

    def restore(self, abstract: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads one checkpoint onto whatever mesh `abstract` asks for.

        Args:
          abstract: What to read: a pytree like the saved one, or a part of it, of `jax.ShapeDtypeStruct` with
            shardings (see `abstract_like`), or of arrays. A dtype other than the saved one is cast to.
          step: Which one, the latest when None.

        Returns:
          The state with the structure, dtypes and shardings of `abstract`, and the metadata.

        Raises:
          UserError: There is no such checkpoint, or an array of `abstract` is not in it or has another shape.
        """
        step = self._existing(step)
        wanted = _named(abstract)
        saved = self._manager.item_metadata(step)["state"]
        saved = dict(getattr(saved, "tree", saved))
        where = f"{self.directory / str(step)}"
        targets = {}
        for name, leaf in wanted.items():
            targets[name] = target = _target(leaf)
            if name not in saved:
                raise UserError(
                    f"{where}: there is no array {name!r}; the checkpoint is of another model or optimiser."
                )
            if tuple(saved[name].shape) != target.shape:
                raise UserError(
                    f"{where}: {name!r} has shape {tuple(saved[name].shape)} but the configuration asks for "
                    f"{target.shape}; use the configuration it was trained with."
                )
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(
                    targets,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
                    partial_restore=True,
                ),
                meta=ocp.args.JsonRestore(),
            ),
        )
        leaves = [_from_disk(read["state"][name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), read["meta"]["meta"]

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of one checkpoint (the latest when None), without its arrays."""
        return self._read_json(self._existing(step))["meta"]

    def wait(self) -> None:
        """Returns when the checkpoint in progress is complete; raises what its writing raised."""
        self._manager.wait_until_finished()
        self._empty_trash()

    def close(self) -> None:
        """Waits for the checkpoint in progress and stops the background threads."""
        self.wait()
        self._manager.close()
        self._empty_trash()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _existing(self, step: int | None) -> int:
        self.wait()
        steps = self.steps
        if step is None and steps:
            return steps[-1]
        if step not in steps:
            held = f"it holds steps {', '.join(map(str, steps))}" if steps else "it holds none"
            raise UserError(f"{self.directory} has no checkpoint{f' {step}' if step is not None else ''}; {held}.")
        return step

    def _read_json(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def _remember_score(self, step: int, score: float | None) -> None:
        if score is not None:
            self._scores[step] = score

    def _empty_trash(self) -> None:
        if not self._read_only and jax.process_index() == 0:
            shutil.rmtree(self.directory / _TRASH, ignore_errors=True)


class _LatestAndBest:
    """Orbax's question which checkpoints stay: the newest `keep` and the one with the highest score."""

    def __init__(self, keep: int, scores: Mapping[int, float]):
        self._keep = keep
        self._scores = scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]  # ascending
        stay = {*steps[-self._keep :], _best(steps, self._scores)}
        return [step in stay for step in steps]


class StopSignal:
    """Notices a request to stop (SIGTERM, which clusters send before they take a machine away).

    The loop polls `requested()` once per update, saves, and exits 0. In a multi-host run the poll is a barrier between
    the hosts, without work for the devices, and all hosts hear of a request in the same poll, whichever was told.
    (JAX's own preemption service counts its callers' polls, and Orbax polls it too, from process 0 alone at times.)
    """

    _polls = 0  # of this process: names the barriers, which can be used only once

    def __init__(self):
        self._heard = False
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_) -> None:
        self._heard = True

    def requested(self) -> bool:
        """Whether to save and stop now. Multi-host processes call it equally often."""
        client = compat.coordination_client()
        if client is None:
            return self._heard
        StopSignal._polls += 1
        poll = f"cipo_jax_stop/{StopSignal._polls}"
        if self._heard:
            client.key_value_set(f"{poll}/{jax.process_index()}", "1")
        client.wait_at_barrier(poll, _BARRIER_MS)
        return bool(client.key_value_dir_get(f"{poll}/"))

    def close(self) -> None:
        """Restores the earlier handler."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _best(steps: Sequence[int], scores: Mapping[int, float]) -> int | None:
    scored = [(scores[step], step) for step in steps if step in scores]
    return max(scored)[1] if scored else None


def abstract_like(state: Any) -> Any:
    """`state` with every array replaced by its shape, dtype and sharding: what `restore` takes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=getattr(x, "sharding", None)), state
    )


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by path, such as `params.layers.q`: the names under which arrays are on disk."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in named:
            raise ValueError(f"Two leaves of the state are called {name!r}.")
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_disk(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(
        np.shape(leaf), np.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype, sharding=sharding
    )


def _from_disk(value: Any, like: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(value, impl=_key_implementation(like.dtype))
    return value


def _key_implementation(dtype: Any) -> str:
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype == dtype:
            return name
    raise UserError(f"The state holds a random key of kind {dtype}; checkpoints know threefry2x32, rbg and unsafe_rbg.")


def _json(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return np.asarray(value).tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON value")
