"""The fields of `GRPOConfig` that decide nothing here, or decide it only for some engines.

Guarantees: such a field is left at its default, or raises with what to set instead; which fields these are is said in
the tables of this module.
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from trl import GRPOConfig

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig

_CORRECTION = (
    "importance weights correct every batch by the objective, with its own settings: set behavior_weight_cap, "
    "behavior_weight_mode ('truncate' or 'mask') and importance_sampling_level ('token' or 'sequence') instead"
)
_BATCHES_ITSELF = "the 'transformers' engine batches continuously by itself"
# Fields that no engine follows -> what to do instead.
NEVER = {
    "cache_implementation": "the engine has a cache of its own, which grows with the completions",
    "use_transformers_continuous_batching": _BATCHES_ITSELF,
    "use_transformers_paged": _BATCHES_ITSELF,
    "transformers_continuous_batching_config": _BATCHES_ITSELF,
    "vllm_importance_sampling_correction": _CORRECTION,
    "vllm_importance_sampling_mode": _CORRECTION,
    "vllm_importance_sampling_clip_max": _CORRECTION,
    "vllm_importance_sampling_clip_min": _CORRECTION,
    "vllm_importance_sampling_cap": _CORRECTION,
    "vllm_structured_outputs_regex": "completions are not constrained",
    "vllm_enable_sleep_mode": "vLLM samples while the trainer trains",
    "vllm_group_port": "weights reach the server as vllm_weight_transfer says, on ports that are found free",
}
# Fields that give the address of a running server, as `vllm_server_urls` does.
ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
# Fields that only engine='vllm' follows.
ONLY_VLLM = (
    *ADDRESS,
    "vllm_mode",
    "vllm_server_timeout",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_model_impl",
    "vllm_tensor_parallel_size",
)
# Fields that only vLLM in a process of the trainer follows, without vllm_server_urls.
ONLY_WITHOUT_SERVERS = (
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_model_impl",
    "vllm_tensor_parallel_size",
)


def check_inherited(config: "A3POConfig") -> None:
    """Raise `ValueError` for a field of `GRPOConfig` that would have no effect."""
    changed = {
        field.name: field.default
        for field in fields(GRPOConfig)
        if (field.name in NEVER or field.name in ONLY_VLLM) and getattr(config, field.name) != field.default
    }
    for name, unset in changed.items():
        given = f"{name}={getattr(config, name)!r}"
        if name in NEVER:
            raise ValueError(f"{given} has no effect here: leave it at {unset!r}; {NEVER[name]}.")
        if config.engine != "vllm":
            raise ValueError(
                f"{given} has no effect with engine={config.engine!r}: leave it at {unset!r}, or set engine='vllm'."
            )
        if name in ONLY_WITHOUT_SERVERS and config.vllm_server_urls:
            raise ValueError(
                f"{given} is decided by running vLLM servers: leave it at {unset!r}, and start the servers with "
                "--gpu-memory-utilization, --max-model-len, --model-impl or --tensor-parallel-size."
            )
    _check_one_address(config, [name for name in ADDRESS if name in changed])


def _check_one_address(config: "A3POConfig", given: list[str]) -> None:
    """TRL's address of a server has been mapped to `vllm_server_urls` if `use_vllm=True` came with it."""
    if given and config.vllm_server_urls != [trl_server_url(config)]:
        name = given[0]
        raise ValueError(
            f"{name}={getattr(config, name)!r} has no effect with engine='vllm' and vllm_server_urls="
            f"{config.vllm_server_urls!r}: set vllm_server_urls=[{trl_server_url(config)!r}], or leave {name} out."
        )


def trl_server_url(config: "A3POConfig") -> str:
    """The server that TRL's fields name."""
    return config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
