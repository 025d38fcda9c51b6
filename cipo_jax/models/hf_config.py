"""`DecoderConfig` from a Hugging Face `config.json`, and back.

Every field is either read, known to leave a text forward unchanged, or refused by name: a setting that is ignored gives
a model that is wrong by a little, which nobody notices.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cipo_jax.errors import UserError
from cipo_jax.models.config import ATTENTION, DELTA, DecoderConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
MULTIMODAL = {"qwen3_5"}  # the decoder's settings sit in `text_config`

# Training, generation, bookkeeping, image and speculative-decoding settings, and sizes that only bound positions.
_NEUTRAL = (
    "_name_or_path architectures attention_dropout attn_implementation _attn_implementation auto_map bos_token_id "
    "chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id do_sample dtype eos_token_id "
    "finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range label2id language_model_only "
    "mamba_ssm_dtype max_length max_position_embeddings max_window_layers min_length model_type mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings num_beams num_labels output_attentions output_hidden_states output_scores "
    "pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id task_specific_params temperature "
    "tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id "
    "use_cache use_return_dict bad_words_ids begin_suppress_tokens suppress_tokens is_decoder is_encoder_decoder "
    "is_llama_config rope_interleaved repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences "
    "early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty diversity_penalty num_beam_groups "
    "remove_invalid_values return_dict_in_generate tie_encoder_decoder"
)
_READ = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "tie_word_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor hidden_act "
    "attention_bias mlp_bias use_sliding_window sliding_window layer_types full_attention_interval attn_output_gate "
    "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim "
    "quantization_config mlp_only_layers"
)
_KNOWN = {*_NEUTRAL.split(), *_READ.split()}
_ROPE_NEUTRAL = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a missing or broken file is the user's error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} does not exist; name a Hugging Face model folder with config.json and weights."
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); fetch the file again.") from error


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the text decoder, which multimodal configs nest."""
    if hf.get("model_type") in MULTIMODAL:
        text = dict(hf.get("text_config") or {})
        text.setdefault("tie_word_embeddings", hf.get("tie_word_embeddings", False))
        text.setdefault("model_type", f"{hf['model_type']}_text")
        if "quantization_config" in hf:
            text["quantization_config"] = hf["quantization_config"]
        return text
    return dict(hf)


def decoder_config(hf: Mapping[str, Any], ignore: Collection[str] = (), **overrides) -> DecoderConfig:
    """The decoder that a `config.json` describes.

    Args:
      hf: the parsed file.
      ignore: fields that you know not to change the computation, besides those known here.
      **overrides: fields of `DecoderConfig` to set instead (dtype, param_dtype, remat).

    Raises:
      UserError: an unsupported architecture, a missing field, or one that this decoder would have to ignore; it is named.
    """
    text = text_config(hf)
    kind = text.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"config.json: model_type {kind!r} is not supported; supported are {', '.join([*ARCHITECTURES, *MULTIMODAL])}."
        )

    def refuse(field: str, why: str):
        raise UserError(f"config.json: {field}={text.get(field)!r} {why}")

    def need(field: str):
        if text.get(field) is None:
            raise UserError(f"config.json ({kind}): {field} is missing; it fixes a tensor's shape.")
        return text[field]

    for field, value in text.items():
        if field not in _KNOWN and field not in ignore and value not in (None, False, [], {}, ""):
            refuse(field, "is unknown here and might change the computation; pass it in `ignore` if it does not.")
    if text.get("quantization_config"):
        refuse("quantization_config", "means quantised weights; use the bf16 checkpoint, or a GGUF file.")
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "is not supported; the decoders here use silu.")
    for field in ("attention_bias", "mlp_bias", "mlp_only_layers"):
        if text.get(field):
            refuse(field, "is not supported; this decoder has no such parameters.")
    window = text.get("use_sliding_window", kind in ("llama",)) and text.get("sliding_window") is not None
    if window or "sliding_attention" in (text.get("layer_types") or ()):
        refuse(
            "sliding_window", "is in use, and every layer here attends to everything; choose a full-attention model."
        )

    depth, heads = need("num_hidden_layers"), need("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or (128 if kind == "qwen3" else need("hidden_size") // heads)
    theta, rotary, llama3 = _rope(text, 0.25 if kind == "qwen3_5_text" else 1.0)
    settings = dict(
        vocab_size=need("vocab_size"),
        width=need("hidden_size"),
        depth=depth,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=need("intermediate_size"),
        tied=bool(text.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_5_text"),
        rope_theta=theta,
        rotary=rotary,
        rope_llama3=llama3,
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        gated=False,
        zero_centred=False,
        period=(ATTENTION,),
    )
    if kind == "qwen3_5_text":
        if not text.get("attn_output_gate", True):
            refuse("attn_output_gate", "is not supported; Qwen3.5's attention is gated.")
        settings |= dict(
            gated=True,
            zero_centred=True,
            period=_period(text, depth),
            delta_key_heads=need("linear_num_key_heads"),
            delta_value_heads=need("linear_num_value_heads"),
            delta_key_dim=need("linear_key_head_dim"),
            delta_value_dim=need("linear_value_head_dim"),
            delta_conv=text.get("linear_conv_kernel_dim") or 4,
        )
    elif set(text.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        refuse("layer_types", f"is not supported for {kind}.")
    return DecoderConfig(**(settings | overrides))


def _rope(text: Mapping[str, Any], default_rotary: float):
    """Base, rotated fraction and Llama 3 scaling, from `rope_parameters` (transformers 5) or the older flat fields."""
    rope = dict(text.get("rope_parameters") or {})
    if not rope:
        rope = dict(text.get("rope_scaling") or {})
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if theta is None:
        raise UserError("config.json: neither rope_theta nor rope_parameters.rope_theta is there; the base is needed.")
    rotary = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", default_rotary))
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        missing = [field for field in _LLAMA3 if field not in rope]
        if missing:
            raise UserError(f"config.json: rope scaling 'llama3' lacks {missing[0]}.")
        scaling = tuple(rope[field] for field in _LLAMA3)
    elif kind not in ("default", "mrope"):
        raise UserError(
            f"config.json: rope scaling {kind!r} is not supported (default and llama3 are); remove it for contexts as "
            "long as the model was trained on."
        )
    unknown = set(rope) - _ROPE_NEUTRAL - set(_LLAMA3 if kind == "llama3" else ())
    unknown = {field for field in unknown if rope[field] is not None}
    if unknown:
        raise UserError(f"config.json: rope setting {sorted(unknown)[0]!r} of type {kind!r} is not known here.")
    return float(theta), float(rotary), scaling


def _period(text: Mapping[str, Any], depth: int) -> tuple[str, ...]:
    """The shortest repeating pattern of layer kinds."""
    names = {"full_attention": ATTENTION, "linear_attention": DELTA}
    every = text.get("full_attention_interval") or 4
    kinds = text.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)
    ]
    unknown = set(kinds) - set(names)
    if unknown or len(kinds) != depth:
        raise UserError(f"config.json: layer_types must hold {depth} of {sorted(names)}, not {sorted(set(kinds))}.")
    for size in range(1, depth + 1):
        if depth % size == 0 and kinds == kinds[:size] * (depth // size):
            return tuple(names[kind] for kind in kinds[:size])
    raise AssertionError("a sequence repeats itself")


def model_type(config: DecoderConfig) -> str:
    """The Hugging Face architecture that computes what `config` says."""
    if config.gated and config.zero_centred and config.qk_norm and not config.qkv_bias:
        return "qwen3_5_text"
    plain = not (config.gated or config.zero_centred or config.delta_layers) and config.rotary == 1.0
    known = {(False, True): "qwen3", (True, False): "qwen2", (False, False): "llama"}
    if not plain or (config.qkv_bias, config.qk_norm) not in known:
        raise UserError(
            "no Hugging Face architecture computes this DecoderConfig; export one of the published variants."
        )
    return known[config.qkv_bias, config.qk_norm]


def hf_config(config: DecoderConfig, max_positions: int = 32768, dtype: str = "bfloat16", **extra) -> dict[str, Any]:
    """A `config.json` that transformers and vLLM read as `config`.

    Args:
      config: the decoder.
      max_positions: longest context, which the decoder itself does not bound.
      dtype: of the stored weights.
      **extra: further fields, for instance `eos_token_id`.
    """
    c, kind = config, model_type(config)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_llama3 is not None:
        rope |= {"rope_type": "llama3", **dict(zip(_LLAMA3, c.rope_llama3, strict=True))}
    hf = dict(
        architectures=[ARCHITECTURES[kind]],
        model_type=kind,
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        num_hidden_layers=c.depth,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.ffn,
        hidden_act="silu",
        max_position_embeddings=max_positions,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied,
        rope_theta=c.rope_theta,
        rope_parameters=rope,
        dtype=dtype,
        torch_dtype=dtype,
    )
    if kind == "qwen2":
        del hf["head_dim"]  # implied there
        if c.heads * c.head_dim != c.width:
            raise UserError(f"qwen2 needs heads x head_dim = width, not {c.heads} x {c.head_dim} = {c.width}.")
    if kind == "qwen3_5_text":
        rope["partial_rotary_factor"] = c.rotary
        names = {ATTENTION: "full_attention", DELTA: "linear_attention"}
        hf |= dict(
            layer_types=[names[kind] for kind in c.period] * c.periods,
            attn_output_gate=True,
            partial_rotary_factor=c.rotary,
            linear_num_key_heads=c.delta_key_heads,
            linear_num_value_heads=c.delta_value_heads,
            linear_key_head_dim=c.delta_key_dim,
            linear_value_head_dim=c.delta_value_dim,
            linear_conv_kernel_dim=c.delta_conv,
        )
    return hf | extra
