"""Rewards with weights, one of them for some rows only, one with a column and a metric of its own."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import contains_answer, length, prompts


def for_some(completions, answer, log_extra=None, log_metric=None, **kwargs):
    log_extra("gold", list(answer))
    log_metric("rows", float(len(answer)))
    return [
        None if gold in ("w0", "w3", "w6") else len(text) / 9 for text, gold in zip(completions, answer, strict=True)
    ]


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder,
        reward_weights=[1.0, 0.3, 2.0],
        scale_rewards="batch",
        log_completions=True,
        num_completions_to_print=1,
    )
    trainer = GRPOTrainer(model, [contains_answer, length, for_some], args=args, train_dataset=prompts())
    trainer.train()
    return trainer
