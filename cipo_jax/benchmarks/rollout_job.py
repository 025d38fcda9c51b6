"""The job that the rollout benchmark gives to every side, and how a peer is asked to do a part of it. No jax, no torch.

The values of tokens don't matter to the time, so weights and tokens are random; the lengths of actions are forced.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# SmolLM2-135M, and something to try the programs with.
SHAPES = {
    "smollm2": dict(vocab_size=49152, width=576, depth=30, heads=9, kv_heads=3, head_dim=64, ffn=1536),
    "tiny": dict(vocab_size=512, width=64, depth=2, heads=4, kv_heads=2, head_dim=16, ffn=128),
}
ROPE_THETA, NORM_EPS = 1e5, 1e-5


@dataclasses.dataclass(frozen=True)
class Job:
    """Search rollouts: a prompt, then `turns` times an action and an observation, then a last action.

    Attributes:
      shape: name in `SHAPES`.
      rollouts: trajectories; a multiple of `slots`.
      slots: rows generated at once.
      group: trajectories per prompt.
      turns: searches of each.
      prompt, observation: their tokens.
      action: mean tokens of an action.
      sigma: of the logarithm of an action's length.
      keys: places of the decode-only comparison.
      seed: fixes tokens and lengths.
    """

    shape: str = "smollm2"
    rollouts: int = 128
    slots: int = 32
    group: int = 8
    turns: int = 3
    prompt: int = 128
    observation: int = 128
    action: float = 40.0
    sigma: float = 0.8
    keys: int = 256
    seed: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every action, `[rollouts, turns + 1]`.

        Log-normal quantiles, shuffled: in every turn each `slots` consecutive rollouts have the same lengths in another
        order, so that a part of the job stands for the whole.
        """
        rng = np.random.default_rng(self.seed)
        level = (np.arange(self.slots) + 0.5) / self.slots
        z = np.sqrt(2.0) * _inverse_erf(2 * level - 1)
        drawn = np.exp(self.sigma * z)
        quantiles = np.maximum(1, np.round(drawn * self.action / drawn.mean())).astype(np.int64)
        blocks = [
            np.stack([rng.permutation(quantiles) for _ in range(self.turns + 1)], 1)
            for _ in range(self.rollouts // self.slots)
        ]
        return np.concatenate(blocks)

    @property
    def places(self) -> int:
        """Tokens of the longest trajectory."""
        return int(self.lengths.sum(1).max()) + self.prompt + self.turns * self.observation

    def context(self, turn: int) -> np.ndarray:
        """Tokens in front of each rollout's action number `turn`, `[rollouts]`."""
        return self.prompt + turn * self.observation + self.lengths[:, :turn].sum(1)

    def tokens(self, *shape: int) -> np.ndarray:
        """Random ids, without the first few, which may be special."""
        return np.random.default_rng(self.seed + 1).integers(8, SHAPES[self.shape]["vocab_size"], shape)

    def batches(self, turn: int) -> list[np.ndarray]:
        """For a peer that encodes every turn anew: `slots` rollouts at a time, sorted by context for the least padding."""
        return np.split(np.argsort(self.context(turn), kind="stable"), self.rollouts // self.slots)

    def typical(self, number: int) -> list[tuple[int, int]]:
        """The `(turn, batch)` that stand for all `batches` of all turns in round `number`.

        First and last turn, as costs grow evenly with the turns; of each the batch whose longest context is nearest to the
        mean over the batches, and in later rounds those behind it.
        """
        chosen = []
        for turn in (0, self.turns):
            longest = np.asarray([self.context(turn)[rows].max() for rows in self.batches(turn)])
            nearest = int(np.abs(longest - longest.mean()).argmin())
            chosen.append((turn, (nearest + number) % len(longest)))
        return chosen

    def unsorted_batches(self) -> list[np.ndarray]:
        """For a peer that keeps its cache, whose rows stay together."""
        return np.split(np.arange(self.rollouts), self.rollouts // self.slots)


def _inverse_erf(x: np.ndarray) -> np.ndarray:
    from statistics import NormalDist

    return np.asarray([NormalDist().inv_cdf((v + 1) / 2) for v in x]) / np.sqrt(2.0)


class Peer:
    """A program in its own process that does parts of a job and says how many seconds each took.

    Args:
      python: its interpreter; needs nothing of this package's dependencies but numpy.
      module: what to run.
      job: the job.
    """

    def __init__(self, python: str, module: str, job: Job):
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(dataclasses.asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        )
        self.ready = self._read()

    def ask(self, *part) -> dict:
        """Runs a part of the job, such as `("reencode", turn, batch)`."""
        self._process.stdin.write(json.dumps(part) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the program."""
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print, too
                return json.loads(line)
        raise RuntimeError(f"the peer {self._process.args[2]} ended with status {self._process.wait()}")


def serve(start: Callable[[Job], tuple[dict, Callable[..., dict]]]) -> None:
    """A peer's main: `start(job)` gives what to say when ready, and the function that does a part."""
    ready, do = start(Job(**json.loads(sys.argv[1])))
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(do(*json.loads(line))), flush=True)


def whole(parts: Sequence[dict], steps: int) -> float:
    """Seconds that all of a job's decode `steps` take if they take as long as those measured in `parts`."""
    return sum(p["seconds"] for p in parts) * steps / sum(p["steps"] for p in parts)
