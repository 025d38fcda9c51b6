"""Small byte-level tokenizers with chat templates that render tools as Qwen3.5's (nested tags) and Qwen3's (JSON) do."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cipo_jax.rollout.stops import _byte_level_alphabet

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_HEAD = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool.function.name + ': ' + tool.function.description + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
"""
_TAIL = """
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' + ('' if enable_thinking else '\\n</think>\\n\\n') }}
{%- endif %}
"""
# Both drop the thinking of earlier turns.
NESTED = f"""{_HEAD}
            {{{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}}}
            {{%- for name, value in call.function.arguments.items() %}}
                {{{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}}}
            {{%- endfor %}}
            {{{{- '</function>\\n</tool_call>' }}}}
{_TAIL}"""
JSON = f"""{_HEAD}
            {{{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}}}
{_TAIL}"""


def chat_tokenizer(template: str | None = NESTED, tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, the chat's marks, and `tokens`; every text survives encoding."""
    alphabet = _byte_level_alphabet()
    backend = Tokenizer(models.BPE({alphabet[b]: b for b in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (*CONTROL, *tokens)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer
