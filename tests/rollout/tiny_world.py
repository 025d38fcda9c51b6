"""A tiny search world: two dozen words, so that random policies search, answer and break off by chance."""

import dataclasses

import jax
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cipo_jax.data.questions import Question
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import GENERATION_RULES, ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.rollout.engine import Rollout, RolloutConfig
from cipo_jax.rollout.environment import Environment

# Stop strings come whole, split over tokens, and inside a token with text behind them.
WORDS = ["<pad>", "<eos>", "<unk>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
WORDS += [
    "</",
    "search",
    ">",
    "answer>",
    "</search> x",
    "</answer>\n",
    "\n\n",
    "\n",
    "Doc",
    "(",
    ")",
    "1",
    "2",
    "3",
    ":",
]
WORDS += [" ", "Title", "a", "b", "c", "d", "e"]
WORDS += ["<search>a</search>", "<search>b d</search>\n", "<search>c e", "d</search>", "<answer>a", "c</answer>"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|\n+|[A-Za-z]+|\s|."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Echo:
    """Answers a query with passages made of it; an empty-handed answer for queries that hold an `e`."""

    def retrieve(self, queries, top_k):
        return [
            [Passage(i, str(i), "a", "b c " * (i + 1) + q[:1]) for i in range(top_k)] if "e" not in q else []
            for q in queries
        ]

    def passage(self, row):
        raise IndexError(row)


CONFIG = RolloutConfig(
    max_turns=2,
    top_k=2,
    prompt_tokens=12,
    action_tokens=14,
    observation_tokens=40,
    total_tokens=96,
    query_tokens=10,
    chunk=8,
)
DECODER = DecoderConfig(
    vocab_size=len(WORDS) + 1, width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=48, tied=False
)


@dataclasses.dataclass
class Setting:
    """One policy in the tiny world on a mesh."""

    rules: ShardingRules
    graph: object
    params: object
    environment: Environment

    def rollout(self, **changes) -> Rollout:
        config = dataclasses.replace(CONFIG, **changes)
        generation = ShardingRules(self.rules.mesh, GENERATION_RULES)
        return Rollout(DECODER, self.graph, config, self.environment, generation)


def questions(n: int) -> list[Question]:
    return [Question(f"q{i}", "a b c d e"[: 1 + 2 * (i % 5)], ("a",)) for i in range(n)]


def build_setting(fsdp: int = 1, tensor: int = 1, retriever=None, protocol=SearchR1) -> Setting:
    """A `Setting` on `fsdp x tensor` devices, with the same parameters on every mesh."""
    devices = jax.devices()[: fsdp * tensor]
    rules = ShardingRules(mesh(fsdp=fsdp, tensor=tensor, devices=devices))
    graph, params = init_decoder(DECODER, 3, rules)
    params = jax.tree.map(lambda x: x * 1.5, params)
    talk = protocol(tiny_tokenizer(), instruction="{question}\n")
    environment = Environment(talk, {"default": retriever or Echo()}, CONFIG.top_k, CONFIG.observation_tokens)
    return Setting(rules, graph, params, environment)


def assert_same_trajectories(got, want):
    """Equal up to rounding of the log-probs."""
    for field in dataclasses.fields(want):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if field.name == "behaviour_logprob":
            np.testing.assert_allclose(a, b, atol=1e-4)
        else:
            np.testing.assert_array_equal(a, b, err_msg=field.name)
