"""Every method of `GRPOTrainer` and of the `Trainer` that a subclass can override, and what becomes of it.

Guarantees: a refused method raises when the trainer is built and when it trains (see `overrides`); every other one is
called as in GRPOTrainer.
"""

from trl_a3po.config.border_rows import BorderRow

_ROWS_ARE_READ_AHEAD = (
    "the rows of training are read ahead by the queue, not by the Trainer's dataloader. Override _get_train_sampler "
    "for another order, and change the rows in train_dataset"
)

METHODS = (
    BorderRow(
        "followed",
        "the order of the rows is that of the sampler; every row must come num_generations times in succession",
        ("_get_train_sampler", "_set_signature_columns_if_needed"),
    ),
    BorderRow(
        "refused",
        _ROWS_ARE_READ_AHEAD,
        (
            "get_train_dataloader",
            "_get_dataloader",
            "get_batch_samples",
            "_remove_unused_columns",
            "_get_collator_with_removed_columns",
        ),
    ),
    BorderRow(
        "followed",
        "it calls super(), which gives it what the engine and the reward functions have done; otherwise, or if it "
        "changes the completions, the first step raises an error",
        (
            "_prepare_inputs",
            "_generate_and_score_completions",
            "_generate",
            "_generate_single_turn",
            "_tokenize_prompts",
            "_tool_call_loop",
            "_calculate_rewards",
            "training_step",
            "train",
        ),
    ),
    BorderRow(
        "followed",
        "calling super() applies the objective; a loss of its own gets inputs['old_per_token_logps'], with a warning, "
        "and an error if it reads none of the sampling log-probs while tokens are stale",
        ("compute_loss", "_compute_loss"),
    ),
    BorderRow(
        "followed",
        "it calls super(), whose log-probs the objective is applied to; otherwise the first step raises an error",
        ("_get_per_token_logps_and_entropies",),
    ),
    BorderRow(
        "followed",
        "TRL's loss calls it",
        ("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),
    ),
    BorderRow(
        "followed",
        "optimizer, scheduler and gradients are the Trainer's",
        (
            "create_optimizer",
            "create_scheduler",
            "create_optimizer_and_scheduler",
            "get_optimizer_cls_and_kwargs",
            "get_decay_parameter_names",
            "_clip_grad_norm",
            "_get_grad_norm",
            "_get_learning_rate",
            "get_learning_rates",
            "get_optimizer_group",
            "autocast_smart_context_manager",
            "compute_loss_context_manager",
            "_has_mixed_mesh_grads",
            "_mixed_mesh_grad_norm",
            "_defer_fsdp_gradient_reduction",
            "_sync_replicated_trainable_parameters",
        ),
    ),
    BorderRow(
        "followed",
        "evaluation is the Trainer's; during training, the rows of its dataloader are sampled by the engine",
        (
            "evaluate",
            "_evaluate",
            "evaluation_loop",
            "prediction_step",
            "predict",
            "get_eval_dataloader",
            "get_test_dataloader",
            "_get_eval_sampler",
            "_determine_best_metric",
        ),
    ),
    BorderRow(
        "followed",
        "it is called when a checkpoint or a model is saved, loaded or pushed",
        (
            "save_model",
            "_save",
            "_save_checkpoint",
            "_save_optimizer_and_scheduler",
            "_save_rng_state",
            "_save_scaler",
            "save_state",
            "save_metrics",
            "_get_output_dir",
            "_push_from_checkpoint",
            "_finish_current_push",
            "push_to_hub",
            "init_hf_repo",
            "create_model_card",
            "_load_from_checkpoint",
            "_load_best_model",
            "_load_optimizer_and_scheduler",
            "_load_rng_state",
            "_load_scaler",
            "_load_callback_state",
            "_issue_warnings_after_load",
        ),
    ),
    BorderRow(
        "followed",
        "it is called when something is logged; `log` also gets the metrics of this package",
        ("log", "_log_metric", "_log_completion_extra", "_maybe_log_save_evaluate", "log_metrics", "metrics_format"),
    ),
    BorderRow(
        "followed",
        "the Trainer's loop calls it as it does in GRPOTrainer",
        (
            "_inner_training_loop",
            "_run_epoch",
            "_prepare_for_training",
            "_init_training_state",
            "_finalize_training",
            "_wrap_model",
            "_move_model_to_device",
            "_prepare_input",
            "_validate_args",
            "_build_accelerator_args",
            "create_accelerator_and_postprocess",
            "set_initial_training_values",
            "num_examples",
            "get_total_train_batch_size",
            "add_callback",
            "pop_callback",
            "remove_callback",
            "is_local_process_zero",
            "is_world_process_zero",
            "get_num_trainable_parameters",
            "end",
        ),
    ),
    BorderRow(
        "refused",
        "the tools of an episode are called in the background, as TRL's loop calls them. Change what they do in "
        "tools or environment_factory, or pass a rollout_func",
        ("_get_tool_suffix_ids",),
    ),
    BorderRow(
        "followed",
        "as in GRPOTrainer, which has no model_init to search with",
        (
            "hyperparameter_search",
            "_hp_search_setup",
            "_report_to_hp_search",
            "_tune_save_checkpoint",
            "call_model_init",
        ),
    ),
    BorderRow(
        "refused",
        "the batch size is fixed when the queue is built. Set a smaller per_device_train_batch_size",
        ("_update_auto_batch_size",),
    ),
    BorderRow(
        "refused",
        "a policy that is split by tensor, context or sequence parallelism cannot be trained here. Train with DDP, "
        "DeepSpeed ZeRO or FSDP2",
        ("_prepare_context_parallel_inputs",),
    ),
    BorderRow(
        "followed",
        "the Trainer counts its batches with it; a size above 1 is refused when the trainer is built",
        ("get_cp_size", "get_sp_size", "get_tp_size"),
    ),
    BorderRow(
        "no effect",
        "GRPOTrainer's loss counts its tokens itself, and what is counted here is only logged",
        ("_get_num_items_in_batch", "_track_num_input_tokens", "floating_point_ops", "store_flos", "_send_telemetry"),
    ),
)
