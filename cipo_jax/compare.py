"""Compares arms of one training method over paired seeds; run it again to resume after a kill.

    python -m cipo_jax.compare --gin_file=configs/compare.gin --run_dir=runs/compare

Every finished arm leaves a JSON under RUN_DIR/results and is skipped by a later run. At the end, and whenever the
program starts with results in place, RUN_DIR holds table.md, comparison.png and comparison.json. Seeds, arms and stales
may be added later (Comparison.seeds = (0, 1, ..)); endpoint, secondary metrics and reference may not change.
"""

from collections.abc import Callable
from pathlib import Path

import gin
from rich.console import Console

from cipo_jax import cli
from cipo_jax.evaluation import compare_report
from cipo_jax.evaluation.compare import ArmRunner, Comparison, analyse, load_results, run_comparison
from cipo_jax.training.run_dir import open_run_dir

MAY_CHANGE = ("Comparison.seeds", "Comparison.arms", "Comparison.stales", "Progress.*")


@gin.configurable
def arm_runner(build: Callable[[], ArmRunner] = ArmRunner) -> ArmRunner:
    """What trains the arms, chosen in gin."""
    return build()


def main(run_dir: Path) -> None:
    comparison, runner = Comparison(), arm_runner()
    with open_run_dir(run_dir, may_change=MAY_CHANGE) as opened:
        try:
            run_comparison(opened.path, comparison, runner)
        finally:  # what is finished is reported, also after Ctrl-C
            results = load_results(opened.path, comparison)
            if results and opened.writes:
                analysis = analyse(results, comparison)
                written = compare_report.write_report(opened.path, analysis, comparison)
                console = Console()
                for table in compare_report.tables(analysis, comparison):
                    console.print(table)
                console.print(compare_report.NOTE)
                for path in written:
                    console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    cli.run(main, run_dir=True)
