"""Does EALR do what it says? Arms of one training method compared over paired seeds, resumable arm by arm.

A seed redraws world, warm start and RL; the arms of a seed start from one warm start and differ in the reward alone.
What is compared is declared before the first arm runs, and cannot change in that directory.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from cipo_jax.errors import UserError
from cipo_jax.evaluation import statistics
from cipo_jax.evaluation.report import finite
from cipo_jax.training.run_dir import write_atomic

ARMS = ("outcome", "outcome_x2", "cipo", "ealr_shuffle", "random_span")
DECLARATION = "declared.json"

MakeWarmStart = Callable[[int, Path], None]
RunArm = Callable[[str, int, float, Path], Mapping[str, Any]]


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared. Every choice here is ours.

    Attributes:
      arms: names that `run_arm` knows.
      stales: chances that a fact of an RL world is redrawn.
      seeds: paired over arms and stales. May be extended in a later run.
      endpoint: the metric that decides, lower is better.
      secondary: further metrics of the table.
      reference: the arm that every other one is compared with.
    """

    arms: Sequence[str] = ARMS
    stales: Sequence[float] = (0.1, 0.0)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    endpoint: str = "prior_driven"
    secondary: Sequence[str] = ("em", "malformed", "searches")
    reference: str = "cipo"

    def __post_init__(self):
        if self.reference not in self.arms:
            raise UserError(
                f"Comparison.reference={self.reference!r} is not among arms={tuple(self.arms)}; name one of them."
            )
        for name in ("arms", "stales", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise UserError(f"Comparison.{name}={tuple(values)} is empty or repeats a value; list each once.")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The endpoint, then the secondary metrics."""
        return (self.endpoint, *self.secondary)

    def cells(self) -> list[tuple[int, float, str]]:
        """(seed, stale, arm) in the order they run: whole seeds first, so that an unfinished study is paired."""
        return [(seed, stale, arm) for seed in self.seeds for stale in self.stales for arm in self.arms]


@gin.configurable
@dataclasses.dataclass(frozen=True)
class ArmRunner:
    """What trains, chosen in gin.

    Attributes:
      make_warm_start: called once a seed with the seed and a directory, which it fills. What it left there when it was
        killed is left in place for it.
      run_arm: called for every missing result with arm, seed, stale and the warm start's directory. It returns the
        metrics after the last step by name, as `behaviour.summarise` has them; `before` may hold the warm start's.
    """

    make_warm_start: MakeWarmStart = gin.REQUIRED
    run_arm: RunArm = gin.REQUIRED


def run_comparison(
    directory: str | Path,
    comparison: Comparison,
    runner: ArmRunner,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs every arm that has no result yet and returns `analyse` of all.

    Args:
      directory: holds `declared.json`, `warm_start/seed_<n>/` and `results/stale_<x>/seed_<n>/<arm>.json`.
      comparison: what to run.
      runner: what trains. All of it runs in this process, so that compiled programs are reused.
      say: receives a line per finished arm.

    Raises:
      UserError: the directory was declared with another endpoint, secondary metrics or reference.
      ValueError: `run_arm` returned no value for a declared metric.
    """
    directory = Path(directory)
    declare(directory, comparison)
    cells = comparison.cells()
    missing = [cell for cell in cells if not result_path(directory, *cell).exists()]
    spent: list[float] = []
    for seed, stale, arm in missing:
        start = time.monotonic()
        warm_start = _warm_start(directory, seed, runner.make_warm_start)
        result = finite(runner.run_arm(arm, seed, stale, warm_start))
        for name in comparison.metrics:
            if not isinstance(result.get(name), (int, float)):
                raise ValueError(f"arm {arm!r}, seed {seed}, stale {stale}: no value for {name!r} in {sorted(result)}")
        spent.append(time.monotonic() - start)
        record = {"arm": arm, "seed": seed, "stale": stale, "wall_s": spent[-1], "metrics": result}
        path = result_path(directory, seed, stale, arm)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1) + "\n")
        numbers = ", ".join(f"{name} {result[name]:.3f}" for name in comparison.metrics)
        left = sum(spent) / len(spent) * (len(missing) - len(spent))
        done = len(cells) - len(missing) + len(spent)
        say(f"[{done}/{len(cells)}] stale {stale:g}, seed {seed}, {arm}: {numbers} (about {left / 60:.0f} min left)")
    return analyse(load_results(directory, comparison), comparison)


def declare(directory: Path, comparison: Comparison) -> None:
    """Writes what will be compared, or checks that it is what this directory was started for."""
    declared = json.loads(json.dumps(dataclasses.asdict(comparison)))
    path = directory / DECLARATION
    directory.mkdir(parents=True, exist_ok=True)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in ("endpoint", "secondary", "reference"):
            if before[name] != declared[name]:
                raise UserError(
                    f"{path} declared {name}={before[name]!r}, this run has {declared[name]!r}; use another directory."
                )
    else:
        write_atomic(path, json.dumps(declared, indent=1) + "\n")


def result_path(directory: Path, seed: int, stale: float, arm: str) -> Path:
    """Where the result of one arm lies."""
    return directory / "results" / f"stale_{stale:g}" / f"seed_{seed}" / f"{arm}.json"


def load_results(directory: Path, comparison: Comparison) -> list[dict[str, Any]]:
    """The finished results of the declared cells, in their order."""
    paths = [result_path(Path(directory), *cell) for cell in comparison.cells()]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def analyse(results: Sequence[Mapping[str, Any]], comparison: Comparison) -> dict[str, Any]:
    """Means over seeds and paired differences from the reference arm.

    Args:
      results: as `load_results` returns them.
      comparison: what was declared.

    Returns:
      `{"complete": bool, "stale": {"0.1": {"arms": {arm: {metric: summary}}, "before": {metric: summary},
      "differences": {arm: {metric: summary}}}}}`; `complete` says whether every arm has finished. A summary holds
      `mean`, `std` (sample), `low`, `high` (95 %, Student's t), `n` and `values` by seed. Differences are reference
      minus arm over the seeds that both finished, with the paired t-test's `p`; those of the endpoint also hold
      `p_holm`, adjusted over all arms and stales.
    """
    out: dict[str, Any] = {"complete": len(results) == len(comparison.cells()), "stale": {}}
    family = []
    for stale in comparison.stales:
        mine = [result for result in results if result["stale"] == stale]
        by_arm = {arm: {r["seed"]: r["metrics"] for r in mine if r["arm"] == arm} for arm in comparison.arms}
        arms = {
            arm: {name: _summary({seed: m[name] for seed, m in by_seed.items()}) for name in comparison.metrics}
            for arm, by_seed in by_arm.items()
            if by_seed
        }
        before = {r["seed"]: r["metrics"]["before"] for r in mine if "before" in r["metrics"]}
        starts = {
            name: _summary({seed: m[name] for seed, m in before.items() if m.get(name) is not None})
            for name in comparison.metrics
        }
        differences: dict[str, Any] = {}
        for arm in arms:
            seeds = sorted(by_arm[arm].keys() & by_arm[comparison.reference].keys())
            if arm == comparison.reference or not seeds:
                continue
            differences[arm] = {
                name: _difference(by_arm[comparison.reference], by_arm[arm], seeds, name) for name in comparison.metrics
            }
            family.append(differences[arm][comparison.endpoint])
        out["stale"][f"{stale:g}"] = {"arms": arms, "before": starts if before else {}, "differences": differences}
    for difference, p in zip(family, statistics.holm([d["p"] for d in family])):
        difference["p_holm"] = p
    return out


def _summary(values: Mapping[int, float]) -> dict[str, Any]:
    numbers = [values[seed] for seed in sorted(values)]
    estimate = statistics.mean_interval(numbers)
    std = statistics.spread(numbers).std if numbers else math.nan
    return {
        "mean": estimate.value,
        "std": std,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.n,
        "values": {str(seed): values[seed] for seed in sorted(values)},
    }


def _difference(
    reference: Mapping[int, Any], arm: Mapping[int, Any], seeds: Sequence[int], name: str
) -> dict[str, Any]:
    pairs = {seed: reference[seed][name] - arm[seed][name] for seed in seeds}
    _, p = statistics.paired_difference([reference[s][name] for s in seeds], [arm[s][name] for s in seeds])
    return _summary(pairs) | {"p": p}


def _warm_start(directory: Path, seed: int, make: MakeWarmStart) -> Path:
    path = directory / "warm_start" / f"seed_{seed}"
    done = path.with_name(f"{path.name}.done")
    if not done.exists():
        path.mkdir(parents=True, exist_ok=True)
        make(seed, path)
        write_atomic(done, "")
    return path
