"""Every setting of `A3POConfig` is compared when a run is resumed, or is known to decide nothing that is saved."""

import dataclasses

from transformers import TrainingArguments

from tests.runs import build
from trl_a3po import A3POConfig
from trl_a3po.session.compared_settings import changed_settings, compared_settings

# These settings are part of another one that is compared.
INSIDE_ANOTHER = {"generation_kwargs"}  # of the sampling settings

# The others take effect where they are read: in the loss, in the logs, in the engine's speed.
DECIDE_NOTHING_SAVED = {
    "the loss of a step": """aipo_cap asympo_min_scale behavior_weight_cap behavior_weight_mode cast_lm_head_to_fp32
        delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
        fresh_proximal importance_sampling_level loss_type m2po_threshold masked_is_lower masked_is_upper
        off_policy_mask_threshold router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos spo_negative_scale
        top_entropy_quantile use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg
        vespo_lambda_pos disable_dropout""",
    "the reference policy of later batches": "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model",
    "the engine, whose tokens come with their log-probs": """deterministic engine engine_device engine_dtype
        engine_max_prompt_tokens engine_restarts engine_slots engine_threads kv_on_publish lora_sync
        cache_implementation ds3_gather_for_generation transformers_continuous_batching_config
        use_transformers_continuous_batching use_transformers_paged use_vllm vllm_enable_sleep_mode
        vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_max_model_length vllm_mode vllm_model_impl vllm_outage_timeout vllm_python vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_server_urls vllm_structured_outputs_regex
        vllm_tensor_parallel_size vllm_weight_transfer vllm_weights_dir""",
    "the forward pass": "packed_forward shared_prompt pad_to_multiple_of",
    "when something happens": """max_staleness weight_sync_steps max_attempts max_rejected_groups_in_a_row
        stall_timeout tool_timeout episode_timeout tool_threads environment_processes reward_timeout
        reward_on_timeout reward_workers delivery_check_steps max_engine_gap dry_run""",
    "how the model is loaded": "model_init_kwargs trust_remote_code",
    "evaluation": "num_generations_eval",
    "logs": """kept_rollouts log_all_metrics log_completions log_completions_hub_repo log_multimodal log_unique_prompts
        num_completions_to_print""",
}


def test_every_setting_is_compared_or_decides_nothing_that_is_saved(model_path, tmp_path):
    known = {name for names in DECIDE_NOTHING_SAVED.values() for name in names.split()} | INSIDE_ANOTHER
    compared = {name for group in compared_settings(build(model_path, tmp_path)).values() for name in group}
    ours = {field.name for field in dataclasses.fields(A3POConfig)}
    ours -= {field.name for field in dataclasses.fields(TrainingArguments)}
    assert ours - compared - known == set() and known - ours == set() and known & compared == set()


def test_only_what_has_changed_is_named():
    saved = {"order": {"seed": 1, "rows": 2}, "batch": {"beta": 0.0}}
    now = {"order": {"seed": 3, "rows": 2}, "batch": {"beta": 0.0}}
    assert changed_settings(saved, now) == {"order": "seed=1 (now 3)"}
