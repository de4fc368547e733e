"""How completions are sampled: TRL's `generation_config` and the model's own, as settings of the engine.

Guarantees: every field of the two configurations is followed, or has no effect on what is sampled, or raises; what the
engine samples with does not change while it runs.
"""

from dataclasses import fields
from typing import Any

from transformers import GenerationConfig

from trl_a3po.config import A3POConfig
from trl_a3po.protocol.engine import SamplingSettings

# Fields that the engine follows.
FOLLOWED = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "suppress_tokens",
    "eos_token_id",
    "pad_token_id",
)
# Fields that are not followed -> values with which `generate` samples as the engine does; None always is one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "min_length": (0,),
    "typical_p": (1,),
    "top_h": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "use_mtp": (False,),
    "cache_implementation": (),
    "max_time": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "prompt_lookup_num_tokens": (),
    "continuous_batching_config": (),
}
# Fields that decide nothing here, with the reason.
WITHOUT_EFFECT = {
    "use_cache": "the engine has a cache of its own",
    "cache_config": "the engine has a cache of its own",
    "max_cache_len": "the engine has a cache of its own",
    "low_memory": "the engine has a cache of its own",
    "prefill_chunk_size": "the engine has a cache of its own",
    "compile_config": "the engine does not compile",
    "disable_compile": "the engine does not compile",
    "max_length": "max_new_tokens takes its place, as in TRL",
    "early_stopping": "it belongs to beam search",
    "length_penalty": "it belongs to beam search",
    "output_attentions": "TRL reads only the tokens",
    "output_hidden_states": "TRL reads only the tokens",
    "output_scores": "TRL reads only the tokens",
    "output_logits": "TRL reads only the tokens",
    "return_dict_in_generate": "TRL reads only the tokens",
    "bos_token_id": "every prompt has tokens",
    "decoder_start_token_id": "it belongs to encoder-decoder models",
    "is_assistant": "it belongs to an assistant model, which TRL does not pass",
    "num_assistant_tokens": "it belongs to an assistant model, which TRL does not pass",
    "num_assistant_tokens_schedule": "it belongs to an assistant model, which TRL does not pass",
    "assistant_confidence_threshold": "it belongs to an assistant model, which TRL does not pass",
    "assistant_early_exit": "it belongs to an assistant model, which TRL does not pass",
    "assistant_lookbehind": "it belongs to an assistant model, which TRL does not pass",
    "target_lookbehind": "it belongs to an assistant model, which TRL does not pass",
    "assistant_ensemble_weight": "it belongs to an assistant model, which TRL does not pass",
    "max_matching_ngram_size": "it belongs to prompt lookup",
    "speculation_type": "it belongs to an assistant model, which TRL does not pass",
    "transformers_version": "it says who wrote the file",
}
STOP_TOKEN_IDS = "stop_token_ids"  # vLLM's name, for more tokens that end a completion
NAMES = {"stop_token_ids": "eos_token_id", "suppress_token_ids": "suppress_tokens"}  # by field of SamplingSettings


def sampling_settings(args: A3POConfig, generation_config: GenerationConfig, model: Any) -> SamplingSettings:
    """The sampling settings with which TRL would generate.

    Args:
        args: the arguments of the trainer.
        generation_config: the trainer's, which TRL builds from `args` and `generation_kwargs`.
        model: the policy; as in `generate`, its own `generation_config` gives the fields that the trainer's leaves
            open.

    Raises:
        ValueError: a field asks for something that the engine does not follow, or contradicts `args`.
    """
    own, of_model = _fields(generation_config), _fields(model.generation_config)
    given = args.generation_kwargs or {}
    for name, value in own.items():
        if not _can_hold(name, value):
            where = "generation_kwargs holds" if name in given else "generation_config of the trainer holds"
            raise ValueError(_not_followed(where, name, value))
    for name, value in of_model.items():
        # The model's cache is not the engine's, which changes no token.
        if own.get(name) is None and name != "cache_implementation" and not _can_hold(name, value):
            raise ValueError(
                f"{_not_followed('generation_config of the model holds', name, value)} "
                f"On the model: model.generation_config.{name} = None."
            )
    effective = {**of_model, **{name: value for name, value in own.items() if value is not None}}
    _check_against_arguments(args, effective)
    return SamplingSettings(
        max_new_tokens=effective["max_new_tokens"],
        temperature=effective["temperature"],
        top_p=1.0 if effective["top_p"] is None else effective["top_p"],  # as `generate` takes them
        top_k=effective["top_k"],
        min_p=effective["min_p"],
        repetition_penalty=1.0 if effective["repetition_penalty"] is None else effective["repetition_penalty"],
        stop_token_ids=tuple(dict.fromkeys((*_ids(own["eos_token_id"]), *_ids(own.get(STOP_TOKEN_IDS))))),
        suppress_token_ids=tuple(effective["suppress_tokens"] or ()),
        min_new_tokens=effective["min_new_tokens"] or 0,
        pad_token_id=effective["pad_token_id"],
        seed=args.seed,
    )


def check_unchanged(started_with: SamplingSettings, now: SamplingSettings) -> None:
    """Raise `ValueError` unless the settings with which the engine was started are still those of the trainer."""
    for field in fields(SamplingSettings):
        before, after = getattr(started_with, field.name), getattr(now, field.name)
        if before != after:
            name = NAMES.get(field.name, field.name)
            raise ValueError(
                f"generation_config.{name} changed from {before!r} to {after!r} during training, but the engine "
                f"samples ahead with the settings that it was started with: leave it at {before!r}, or end this run "
                "and start another one, from its weights, with the new value."
            )


def _fields(config: GenerationConfig) -> dict[str, Any]:
    """The fields of a configuration; what begins with an underscore is transformers' own record."""
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _can_hold(name: str, value: Any) -> bool:
    if value is None or name in FOLLOWED or name in WITHOUT_EFFECT or name == STOP_TOKEN_IDS:
        return True
    return value in NEUTRAL.get(name, ())


def _not_followed(where: str, name: str, value: Any) -> str:
    neutral = NEUTRAL.get(name, ())
    instead = f"set {name}={neutral[0]!r}, or leave it out" if neutral else f"leave {name} out"
    followed = ", ".join((*FOLLOWED[:-1], STOP_TOKEN_IDS))
    return f"{where} {name}={value!r}, which the engine does not follow: {instead}. It follows {followed}."


def _check_against_arguments(args: A3POConfig, effective: dict[str, Any]) -> None:
    temperature, longest = effective["temperature"], effective["max_new_tokens"]
    if temperature != args.temperature:
        raise ValueError(
            f"Completions would be sampled at temperature={temperature!r} (generation_config), but log-probs are "
            f"trained at temperature={args.temperature!r} (A3POConfig): set temperature in A3POConfig alone, before "
            "the trainer is built."
        )
    if longest > args.max_completion_length:
        raise ValueError(
            f"max_new_tokens={longest} is more than max_completion_length={args.max_completion_length}: set "
            f"max_completion_length={longest} in A3POConfig, before the trainer is built."
        )


def _ids(given: int | list[int] | None) -> list[int]:
    """Token ids, of which `GenerationConfig` takes one, several or none."""
    return [token for token in ([given] if isinstance(given, int) else given or []) if token is not None]
