"""Fixed trajectories of the synthetic task, a small policy, and the plain arithmetic that its updates are held against.

Written trajectories and not sampled ones: a random policy never searches, and here every count is known by hand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cipo_jax.data.demonstrations import Demonstration, Turn
from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.distributed.mesh import mesh
from cipo_jax.evaluation.scripted import demonstration_trajectories
from cipo_jax.learning.state import Optimizer
from cipo_jax.models.config import DecoderConfig
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.training.policy import Policy
from cipo_jax.training.task import Task
from cipo_jax.types import StopReason, Trajectories

WORLD = SyntheticTask(
    seed=3, rl_worlds=1, warm_start_worlds=1, validation_questions=4, conflict_questions=4, stratum_questions=4
)
DECODER = DecoderConfig(vocab_size=960, width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
GROUPS, SAMPLES, TURNS, LENGTH = 3, 4, 5, 224
OBSERVATION_TOKENS = 64


def build_task() -> Task:
    """The questions that the stored trajectories answer."""
    part = WORLD.rl()
    return Task(
        protocol=SearchR1(build_tokenizer(), instruction="Question: {question}\n"),
        retrievers={name: sparse_retriever(ListCorpus(world.corpus)) for name, world in part.worlds.items()},
        train=part.questions[:GROUPS],
        validation=(),
        reported={},
        worlds=part.worlds,
    )


def stored_trajectories(task: Task) -> Trajectories:
    """Three questions, four trajectories each, host arrays; `behaviour_logprob` is 0. By row: searches, then the answer.

    0: 2, gold. 1: 0, wrong. 2: 1, cut at the token limit. 3: 1, gold.
    4: a query outside its tags, 1, gold. 5: 3, turn limit. 6: an empty answer. 7: 2, wrong.
    8: 1, wrong. 9: 2, wrong. 10: 1, wrong. 11: 0, wrong.
    """
    demos = []
    for number, q in enumerate(task.train):
        country, relation, capital, gold = (q.meta[x] for x in ("country", "relation", "capital", "gold"))

        def search(query, q=q):
            shown = tuple(task.retrievers[q.corpus].retrieve([query], 2)[0])
            return Turn(f"<think> I need the {query}. </think><search> {query} </search>", shown)

        def answer(text):
            return Turn(f"<think> The answer is {text}. </think><answer> {text} </answer>")

        first, second = search(f"capital of {country}"), search(f"{relation} of {capital}")
        other = search(f"capital of {capital}")
        wrong = next(name for name in ("Ashawen", "Ashewe", "Ashilka") if name not in (gold, q.meta["prior_answer"]))
        rows = [
            [
                [first, second, answer(gold)],
                [answer(wrong)],
                [first, Turn(f"<think> The {relation} of")],
                [first, answer(gold)],
            ],
            [
                [Turn(f"capital of {country}"), first, answer(gold)],
                [first, second, other, Turn("<think> Also the </think>")],
                [Turn("<think> So </think><answer> </answer>")],
                [first, second, answer(wrong)],
            ],
            [[first, answer(wrong)], [second, first, answer(wrong)], [other, answer(wrong)], [answer(wrong)]],
        ][number]
        demos += [Demonstration(q.question, tuple(turns)) for turns in rows]
    small = demonstration_trajectories(demos, task.protocol, OBSERVATION_TOKENS)
    assert small.tokens.shape[1] <= LENGTH and small.action_span.shape[1] <= TURNS

    def padded(name, x):
        shape = (len(x), *((LENGTH,) if x.shape[1:] == small.tokens.shape[1:] else (TURNS, *x.shape[2:])))
        out = np.full(shape if x.ndim > 1 else x.shape, -1 if name in ("turn", "passage_row") else 0, x.dtype)
        out[tuple(slice(n) for n in x.shape)] = x
        return out

    out = Trajectories(**{f.name: padded(f.name, getattr(small, f.name)) for f in dataclasses.fields(small)})
    out.group[:] = np.repeat(np.arange(GROUPS), SAMPLES)
    out.stop_reason[2], out.stop_reason[5] = StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT
    return out


def build_policy(fsdp: int = 1, tensor: int = 1) -> Policy:
    """The small policy on `fsdp x tensor` devices."""
    return Policy(DECODER, mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[: fsdp * tensor]))


def build_params(policy: Policy, seed: int):
    """Its parameters, the same on every mesh; sharper than at init, so that what is seen matters."""
    host = jax.device_get(build_policy().init(seed))
    return jax.device_put(jax.tree.map(lambda x: np.asarray(x) * np.float32(1.5), host), policy.sharding)


class DenseContext:
    """Softmax over one explicit mask `[B, L, L]`."""

    def __init__(self, mask_BLL):
        self.mask = mask_BLL

    def attention(self, q, k, v, cache, layer):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        s = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(jnp.where(self.mask[:, None], s, -1e30), -1), v), cache


def plain_logits(graph, params, tokens_BL, mask_BLL):
    """All logits, read at the token they predict: `[B, L - 1, V]` for tokens 1 to L - 1."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1])[None], tokens_BL.shape)
    hidden, _ = model(tokens_BL, positions, DenseContext(mask_BLL), unroll=True)
    return jnp.einsum("bld,vd->blv", hidden, model.unembedding)[:, :-1]


def plain_logprobs(logits, tokens_BL):
    """Log-probs `[B, L]` of the tokens; 0 at the first."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens_BL[:, 1:, None], -1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def causal(trajectories: Trajectories) -> np.ndarray:
    """Each token sees itself and what is before it; `[B, L, L]` bool."""
    rows, length = trajectories.tokens.shape
    return np.broadcast_to(np.tri(length, dtype=bool), (rows, length, length))


def gradient_optimizer() -> Optimizer:
    """An optimiser whose step is the gradient, large enough that rounding of the parameters does not blur it."""
    return Optimizer(optax.identity(), learning_rate=1024.0, max_grad_norm=None)


def read_gradient(before, after) -> dict[str, np.ndarray]:
    """The gradient from the parameters around an update by `gradient_optimizer`, by path."""
    moved = jax.tree.map(
        lambda b, a: (np.float64(b) - np.float64(a)) / 1024.0, jax.device_get(before), jax.device_get(after)
    )
    return by_path(moved)


def by_path(tree) -> dict[str, np.ndarray]:
    """Leaves of a pytree by path."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def norm(leaves) -> float:
    """The norm of all leaves together."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in leaves)))
