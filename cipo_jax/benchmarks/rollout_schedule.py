"""What refilled slots and searches beside the rollout are worth.

    JAX_PLATFORMS=cpu python -m cipo_jax.benchmarks.rollout_schedule --json=out.json

SmolLM2-135M's shape in float32 with random weights (`--depth` for fewer layers); the lengths of actions are forced.

*Refill*: one action per trajectory, of log-normal length (sigma 0.8), eight times as many trajectories as slots. Compared:
slots that are refilled; one batch after the other, each run to its longest row; and the ideal, which is the prompts' time
and as many decode steps as list scheduling takes (the next trajectory goes to the slot that is free first), each of the time
that a step takes when no slot ever ends.

*Latency*: trajectories of two searches and an answer, four times as many as slots, with a retriever that takes no time, and
one that takes as long as eight decode steps: `ready` and `lag` decode meanwhile, `blocking` asks when all slots wait.
"""

import argparse
import heapq
import statistics
import time
from collections.abc import Iterable

import jax
import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cipo_jax.benchmarks.report import write_report
from cipo_jax.data.questions import Question
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.protocols.base import Action, ActionKind, Observation, Protocol
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.rollout.config import RolloutConfig
from cipo_jax.rollout.engine import Rollout
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import Sampling

SIGMA = 0.8
PROMPT = 16
STEP_TOKENS = 64  # per slot, for the time of a step


class Scripted(Protocol):
    """Every action is a search, however it ended; every observation has the same ids."""

    stop_strings = ("</search>", "</answer>")
    terminal_stops = ("</answer>",)

    def __init__(self, vocab_size: int, observation: int):
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, "w0"))
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=words))
        self._observation = list(range(observation))

    def prompt_ids(self, question: str) -> list[int]:
        return list(range(PROMPT))

    def parse_action(self, text: str) -> Action:
        return Action(ActionKind.SEARCH, query=text)

    def observe(self, passages, budget: int) -> Observation:
        size = len(self._observation)
        return Observation(self._observation, (0, size), [(0, size)], [0])

    def correction(self, reason: str) -> Observation:
        raise ValueError(reason)

    def final_answer(self, text: str) -> None:
        return None

    def format_valid(self, text: str) -> bool:
        return True


class Delayed:
    """A retriever that answers every call after `seconds`."""

    seconds = 0.0

    def retrieve(self, queries, top_k: int) -> list[list[Passage]]:
        time.sleep(self.seconds)
        return [[self.passage(0)] for _ in queries]

    def passage(self, row: int) -> Passage:
        return Passage(row, "0", "", "a passage")


class Bench:
    """Runs rollouts of forced lengths with one set of weights."""

    def __init__(self, depth: int, vocab: int, width: int, slots: int, observation: int):
        self.decoder = DecoderConfig(
            vocab_size=vocab, width=width, depth=depth, heads=9, kv_heads=3, head_dim=64, ffn=1536, qk_norm=False
        )
        self.slots, self.observation = slots, observation
        self.rules = ShardingRules(mesh(devices=jax.devices()[:1]))
        self.graph, self.params = init_decoder(self.decoder, 0, self.rules)
        self.retriever = Delayed()

    def rollout(self, turns: int, longest: int, **schedule) -> Rollout:
        """A program for actions of up to `longest` tokens."""
        places = PROMPT + turns * self.observation + (turns + 1) * longest
        config = RolloutConfig(
            max_turns=turns, top_k=1, prompt_tokens=PROMPT, action_tokens=longest, observation_tokens=self.observation,
            total_tokens=places + -places % 16, query_tokens=8, chunk=self.observation, extend_slots=1, **schedule,
        )  # fmt: skip
        environment = Environment(
            Scripted(self.decoder.vocab_size, self.observation), {"default": self.retriever}, 1, self.observation
        )
        return Rollout(self.decoder, self.graph, config, environment, self.rules)

    def run(self, rollout: Rollout, limits: np.ndarray) -> dict[str, float]:
        """Seconds and counters of one rollout with actions of `limits` `[rows, turns + 1]` tokens."""
        rows = len(limits)
        asked = [Question(str(i), str(i), ()) for i in range(rows)]
        begin = time.perf_counter()
        trajectories, counters = jax.block_until_ready(
            rollout(self.params, asked, 1, jax.random.key(0), Sampling(), action_limits=limits.astype(np.int32))
        )
        seconds = time.perf_counter() - begin
        span = np.asarray(trajectories.action_span)
        assert ((span[..., 1] - span[..., 0]) == limits).all(), "actions have other lengths than asked for"
        return {"seconds": seconds, "tokens": int(limits.sum())} | {k: float(v) for k, v in counters.items()}


def list_schedule(lengths: Iterable[int], slots: int) -> int:
    """Steps until all are done, if each goes to the slot that is free first, in order."""
    free = [0] * slots
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + int(length))
    return max(free)


def step_seconds(bench: Bench, rollout: Rollout, longest: int) -> tuple[float, float]:
    """Seconds of a decode step with all slots in use, on average over `longest` tokens, and of a batch's prompts."""
    low, high = (bench.run(rollout, np.full((bench.slots, 1), n)) for n in (1, longest))
    step = (high["seconds"] - low["seconds"]) / (high["decode_steps"] - low["decode_steps"])
    return step, max(0.0, low["seconds"] - step)


def refill(bench: Bench, mean: float, rounds: int, rng: np.random.Generator) -> dict[str, float]:
    """The comparison of refilled slots with batches and with the ideal."""
    slots = bench.slots
    drawn = np.exp(SIGMA * rng.standard_normal(8 * slots))
    lengths = np.maximum(1, np.round(drawn * mean / drawn.mean())).astype(int)
    longest = int(lengths.max())
    queued, batch = (bench.rollout(0, longest, slots=s) for s in (slots, None))
    batches = lengths.reshape(8, slots, 1)
    for rollout, some in ((queued, lengths[:, None]), (batch, batches[0])):  # compiles
        bench.run(rollout, np.ones_like(some))
    step, refilled, batched = [], [], []
    for _ in range(rounds):
        step.append(step_seconds(bench, batch, longest))
        refilled.append(bench.run(queued, lengths[:, None]))
        batched.append([bench.run(batch, some) for some in batches])
    seconds = statistics.median(r["seconds"] for r in refilled)
    batch_seconds = statistics.median(sum(r["seconds"] for r in part) for part in batched)
    step_s, prompts_s = (statistics.median(values) for values in zip(*step))
    ideal_steps = list_schedule(lengths, slots)
    ideal = 8 * prompts_s + ideal_steps * step_s
    return {
        "tokens": int(lengths.sum()),
        "step_s": step_s,
        "prompts_s": 8 * prompts_s,
        "tokens_per_s": lengths.sum() / seconds,
        "batch_tokens_per_s": lengths.sum() / batch_seconds,
        "over_batches": batch_seconds / seconds,
        "over_ideal": ideal / seconds,
        "decode_steps": refilled[0]["decode_steps"],
        "ideal_steps": ideal_steps,
        "batch_steps": sum(r["decode_steps"] for r in batched[0]),
        "occupancy": refilled[0]["slot_occupancy"],
        "batch_occupancy": statistics.mean(r["slot_occupancy"] for r in batched[0]),
        "refills": refilled[0]["refills"],
    }


def latency(bench: Bench, mean: float, step_s: float, rounds: int, rng: np.random.Generator) -> dict[str, dict]:
    """Seconds with a slow retriever over seconds with one that takes no time, by mode."""
    drawn = np.exp(SIGMA * rng.standard_normal((4 * bench.slots, 3)))
    lengths = np.maximum(1, np.round(drawn * mean / drawn.mean())).astype(int)
    modes = {
        "ready": {"retrieval": "ready"},
        "lag": {"retrieval": "lag", "retrieval_lag": 8},
        "blocking": {"retrieval": "blocking"},
    }
    rollouts = {name: bench.rollout(2, int(lengths.max()), slots=bench.slots, **mode) for name, mode in modes.items()}
    told: dict[str, dict] = {}
    for name, rollout in rollouts.items():
        bench.run(rollout, np.ones_like(lengths))  # compiles
        taken: dict[float, list[dict]] = {0.0: [], 8 * step_s: []}
        for _ in range(rounds):
            for bench.retriever.seconds in taken:
                rollout.environment.take_counts()
                one = bench.run(rollout, lengths)
                taken[bench.retriever.seconds].append(one | rollout.environment.take_counts())
        none, some = (statistics.median(r["seconds"] for r in runs) for runs in taken.values())
        last = taken[8 * step_s][-1]
        told[name] = {"no_latency_s": none, "latency_s": some, "ratio": some / none} | {
            key: last[key]
            for key in (
                "slot_occupancy",
                "retrieval_wait_seconds",
                "decode_steps",
                "extend_steps",
                "ask_steps",
                "queries",
            )
        }
    fastest = min(mode["no_latency_s"] for mode in told.values())
    return {name: mode | {"over_fastest_no_latency": mode["latency_s"] / fastest} for name, mode in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--mean", type=float, default=32.0, help="tokens of an action")
    parser.add_argument("--observation", type=int, default=64, help="tokens of an observation")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--part", choices=("refill", "latency", "both"), default="both")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args()
    bench = Bench(args.depth, args.vocab, args.width, args.slots, args.observation)
    rng = np.random.default_rng(0)
    report = {"settings": {k: v for k, v in vars(args).items() if k != "json"}}
    if args.part != "latency":
        report["refill"] = refill(bench, args.mean, args.rounds, rng)
    if args.part != "refill":
        step_s = report["refill"]["step_s"] if "refill" in report else None
        if step_s is None:
            rollout = bench.rollout(0, STEP_TOKENS)
            bench.run(rollout, np.ones((args.slots, 1), int))
            step_s, _ = step_seconds(bench, rollout, STEP_TOKENS)
        report["step_s"] = step_s
        report["latency"] = latency(bench, args.mean, step_s, args.rounds, rng)
    write_report(report, args.json)


if __name__ == "__main__":
    main()
