"""Rollout speed against transformers and Tunix: the same search turns, sampled tokens per second.

    JAX_PLATFORMS=cpu python -m cipo_jax.benchmarks.rollout --peer_python=TUNIX_VENV/bin/python --json=out.json

SmolLM2-135M's shape in float32 with random weights; 128 rollouts of a 128-token prompt, three searches with 128-token
observations, and a last action, 32 at a time; the lengths of actions are log-normal and the same for every side. Our side is
`Rollout` with an ordinary environment, whose retriever answers at once. Peers (`rollout_torch.py`, `rollout_tunix.py`) run
in processes of their own, one part of the job after the other between ours, and wait without work meanwhile; one batch (of
those that encode anew: in the first and the last turn) is timed per round, and the whole job's time follows by its decode
steps. Peers compute no log-probs; ours does. `--peer_python` must import `tunix`; without it that row is left out.
`--shape=tiny` tries everything out.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cipo_jax.benchmarks.report import write_report
from cipo_jax.benchmarks.rollout_job import NORM_EPS, ROPE_THETA, SHAPES, Job, Peer, whole
from cipo_jax.data.questions import Question
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder, parameter_count
from cipo_jax.protocols.base import Action, ActionKind, Observation, Protocol
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.rollout.config import RolloutConfig
from cipo_jax.rollout.engine import Rollout
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.rollout.stops import compile_stops, token_bytes

DECODE_PROMPT = 8  # tokens in front of the decode-only comparison


class Scripted(Protocol):
    """Prompts and observations are random ids; every action is a search."""

    stop_strings = ("</search>", "</answer>")
    terminal_stops = ("</answer>",)

    def __init__(self, job: Job, prompt: int):
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPES[job.shape]["vocab_size"])}, "w0"))
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=words))
        self._prompts = job.tokens(job.rollouts, prompt).tolist()
        self.observation = job.tokens(job.observation).tolist()

    def prompt_ids(self, question: str) -> list[int]:
        return self._prompts[int(question)]

    def parse_action(self, text: str) -> Action:
        return Action(ActionKind.SEARCH, query=text)

    def observe(self, passages, budget: int) -> Observation:
        size = len(self.observation)
        return Observation(self.observation, (0, size), [(0, size)], [passages[0].row])

    def correction(self, reason: str) -> Observation:
        raise ValueError(reason)

    def final_answer(self, text: str) -> None:
        return None

    def format_valid(self, text: str) -> bool:
        return True


class OnePassage:
    """A retriever that answers at once."""

    def retrieve(self, queries, top_k: int) -> list[list[Passage]]:
        return [[self.passage(0)] for _ in queries]

    def passage(self, row: int) -> Passage:
        return Passage(row, "0", "", "a passage")


class Ours:
    """This package's rollouts of a job."""

    def __init__(self, job: Job):
        self.job = job
        shape = SHAPES[job.shape]
        self.decoder = DecoderConfig(**shape, qk_norm=False, rope_theta=ROPE_THETA, norm_eps=NORM_EPS)
        self.rules = ShardingRules(mesh(devices=jax.devices()[:1]))
        self.graph, self.params = init_decoder(self.decoder, 0, self.rules)
        observation, longest = job.observation, int(job.lengths.max())
        self.search = self._rollout(
            job.prompt,
            max_turns=job.turns,
            action_tokens=longest,
            total_tokens=-(-job.places // 16) * 16,
            observation_tokens=observation,
            slots=job.slots,
            # An observation and the action's last token are forwarded together, a slot at a time as they arrive.
            chunk=observation,
            extend_slots=1,
            retrieval="lag",
            retrieval_lag=1,
        )
        self.plain = self._rollout(
            DECODE_PROMPT, max_turns=0, action_tokens=job.keys - DECODE_PROMPT, total_tokens=job.keys,
            observation_tokens=1, chunk=DECODE_PROMPT,
        )  # fmt: skip

    def _rollout(self, prompt: int, **sizes) -> Rollout:
        config = RolloutConfig(top_k=1, prompt_tokens=prompt, query_tokens=16, **sizes)
        environment = Environment(Scripted(self.job, prompt), {"default": OnePassage()}, 1, config.observation_tokens)
        return Rollout(self.decoder, self.graph, config, environment, self.rules)

    def run(self, rollout: Rollout, questions: int, samples: int, limits: np.ndarray) -> tuple[dict, np.ndarray]:
        """Seconds and counters of a rollout whose actions are at most `limits` long, and their lengths, `[B, T]` both."""
        asked = [Question(str(i), str(i), ()) for i in range(questions)]
        begin = time.perf_counter()
        trajectories, counters = jax.block_until_ready(
            rollout(self.params, asked, samples, jax.random.key(0), Sampling(), action_limits=limits.astype(np.int32))
        )
        seconds = time.perf_counter() - begin
        span = np.asarray(trajectories.action_span)
        done = {"seconds": seconds, "tokens": int(limits.sum())} | {k: float(v) for k, v in counters.items()}
        return done, span[..., 1] - span[..., 0]

    def search_job(self) -> dict:
        """The whole job."""
        job = self.job
        done, lengths = self.run(self.search, job.rollouts // job.group, job.group, job.lengths)
        assert (lengths == job.lengths).all(), "actions have other lengths than asked for"
        return done

    def decode_job(self) -> dict:
        """Decoding alone, up to `keys` places."""
        limits = np.full((self.job.slots, 1), self.job.keys - DECODE_PROMPT)
        done, lengths = self.run(self.plain, self.job.slots, 1, limits)
        assert (lengths == limits).all(), "actions have other lengths than asked for"
        return done

    def warm_up(self) -> None:
        """Compiles both programs on rollouts that end with their first token, as an empty observation does not fit."""
        job, protocol = self.job, self.search.environment.protocol
        protocol.observation, kept = [], protocol.observation
        self.run(self.search, job.rollouts // job.group, job.group, np.ones_like(job.lengths))
        protocol.observation = kept
        self.run(self.plain, job.slots, 1, np.ones((job.slots, 1)))

    def work(self, decode_seconds: float) -> dict[str, float]:
        """The least arithmetic and memory traffic of `decode_job`, per second."""
        c, job = self.decoder, self.job
        steps = job.keys - DECODE_PROMPT
        keys = (DECODE_PROMPT + job.keys) / 2 * job.slots  # read per step and layer
        weights = parameter_count(self.params)
        flops = 2 * weights * job.slots + 4 * keys * c.depth * c.heads * c.head_dim
        traffic = 4 * (weights + 2 * keys * c.depth * c.kv_heads * c.head_dim)
        return {"gflops": flops * steps / decode_seconds / 1e9, "gbytes": traffic * steps / decode_seconds / 1e9}


def automaton_seconds(job: Job, steps: int = 2000) -> float:
    """Seconds that looking for stop strings takes in a decode step."""
    protocol, vocabulary = Scripted(job, DECODE_PROMPT), SHAPES[job.shape]["vocab_size"]
    table = compile_stops(protocol.stop_strings, token_bytes(protocol.tokenizer, vocabulary))

    @jax.jit
    def run(token, state):
        def body(_, carry):
            token, state, stops = carry
            stopped = jnp.asarray(table.found)[token, state] > 0
            state = jnp.asarray(table.next_state)[token, state].astype(jnp.int32)
            return (token * 5 + 1) % vocabulary, state, stops + stopped

        return jax.lax.fori_loop(0, steps, body, (token, state, jnp.zeros_like(state)))

    start = jnp.arange(job.slots, dtype=jnp.int32), jnp.zeros(job.slots, jnp.int32)
    return _best(functools.partial(run, *start), 0.5) / steps


def _best(call, seconds: float) -> float:
    """Seconds of the fastest of many calls."""
    taken, start = [], time.perf_counter()
    while len(taken) < 4 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return min(taken)


def machine(seconds: float = 1.0) -> dict[str, float]:
    """What XLA reaches on this machine: GFLOP/s of a large matmul, GB/s of reading a large array; best of many."""
    square, long = jnp.ones((2048, 2048), jnp.float32), jnp.ones((64, 2**20), jnp.float32)

    return {
        "gflops": 2 * 2048**3 / _best(functools.partial(jax.jit(jnp.matmul), square, square), seconds) / 1e9,
        "gbytes": long.nbytes / _best(functools.partial(jax.jit(lambda x: x.sum(1)), long), seconds) / 1e9,
    }


def measure(job: Job, rounds: int, torch_python: str | None, tunix_python: str | None) -> dict:
    """Everything, in rounds; peers without a Python are left out."""
    ours = Ours(job)
    ours.warm_up()
    torch = Peer(torch_python, "cipo_jax.benchmarks.rollout_torch", job) if torch_python else None
    tunix = Peer(tunix_python, "cipo_jax.benchmarks.rollout_tunix", job) if tunix_python else None
    lengths, turns = job.lengths, range(job.turns + 1)
    sorted_steps = sum(int(lengths[rows, t].max()) for t in turns for rows in job.batches(t))
    fixed_steps = sum(int(lengths[rows].max(0).sum()) for rows in job.unsorted_batches())
    tokens, batches = int(lengths.sum()), job.rollouts // job.slots
    rates: dict[str, list[float]] = {}
    details = []

    def note(name: str, tokens: int, seconds: float):
        rates.setdefault(name, []).append(tokens / seconds)
        print(f"{name}: {tokens / seconds:.1f} tokens/s", flush=True)

    for number in range(rounds):
        details.append(ours.search_job())
        note("ours", tokens, details[-1]["seconds"])
        decoded = ours.decode_job()
        note("ours_decode", decoded["tokens"], decoded["seconds"])
        parts = job.typical(number)
        if torch:
            note("decode_only", decoded["tokens"], torch.ask("decode")["seconds"])
            note("transformers_reencode", tokens, whole([torch.ask("reencode", *p) for p in parts], sorted_steps))
            note("transformers_cached", tokens, whole([torch.ask("cached", number % batches)], fixed_steps))
        if tunix:
            for part in parts:
                tunix.ask("prepare", *part)
            note("tunix", tokens, whole([tunix.ask("reencode", *p) for p in parts], sorted_steps))
    for peer in (torch, tunix):
        if peer:
            peer.close()
    decode_seconds = job.slots * (job.keys - DECODE_PROMPT) / statistics.median(rates["ours_decode"])
    reached, possible = ours.work(decode_seconds), machine()
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates[_counterpart(name)], values, strict=True))
        for name, values in rates.items()
        if not name.startswith("ours")
    }
    return {
        "job": dataclasses.asdict(job),
        "ratios": ratios,
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "rounds": rates,
        "decode_share_of_matmul_rate": reached["gflops"] / possible["gflops"],
        "decode_share_of_bandwidth": reached["gbytes"] / possible["gbytes"],
        "decode_reached": reached,
        "machine_reaches": possible,
        "automaton_share_of_decode_step": automaton_seconds(job) * (job.keys - DECODE_PROMPT) / decode_seconds,
        "ours": details,
        "torch": torch.ready if torch else None,
    }


def _counterpart(name: str) -> str:
    return "ours_decode" if name == "decode_only" else "ours"


_ROWS = {
    "transformers_reencode": "transformers, each turn encoded anew",
    "transformers_cached": "transformers, cache kept",
    "tunix": "Tunix, each turn prefilled anew",
    "decode_only": "transformers, decoding alone",
}


def show(report: dict) -> None:
    """Prints the table."""
    rounds = len(report["rounds"]["ours"])
    table = Table(title=f"Sampled tokens per second, {rounds} round(s)")
    for column in ("", "theirs", "ours", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    speed = report["tokens_per_s"]
    for name, label in _ROWS.items():
        if name in report["ratios"]:
            theirs, ours, ratio = speed[name], speed[_counterpart(name)], report["ratios"][name]
            table.add_row(label, f"{theirs:.0f}", f"{ours:.0f}", f"{ratio:.2f}")
    Console().print(table)
    print(
        f"Search rows of peers: {rounds} of {report['job']['rollouts'] // report['job']['slots']} batches, of those that "
        "encode anew in the first and the last turn; the whole job's time by decode steps.\n"
        f"Decoding alone reaches {report['decode_share_of_matmul_rate']:.0%} of the matmul rate and "
        f"{report['decode_share_of_bandwidth']:.0%} of the memory bandwidth that XLA reaches here;\n"
        f"the automaton that looks for stop strings is {report['automaton_share_of_decode_step']:.2%} of it."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    parser.add_argument("--rollouts", type=int, default=128, help="a multiple of the slots")
    parser.add_argument("--slots", type=int, default=32, help="rollouts at a time, for every side")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--torch_python", default=sys.executable, help="imports torch and transformers; empty: left out"
    )
    parser.add_argument("--peer_python", default="", help="imports tunix; empty: left out")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args()
    sizes = dict(prompt=16, observation=16, action=8.0, keys=32) if args.shape == "tiny" else {}
    report = measure(
        Job(args.shape, args.rollouts, args.slots, **sizes), args.rounds, args.torch_python, args.peer_python
    )
    show(report)
    write_report(report, args.json)


if __name__ == "__main__":
    main()
