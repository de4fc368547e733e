"""The shape of TRL's own examples: model and PEFT from a parser, TRL's think-format and overlong rewards."""

from trl import GRPOConfig, GRPOTrainer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config  # isort: skip
from trl.rewards import get_soft_overlong_punishment, think_format_reward

from tests.scripts.data import contains_answer, questions


def main(model, folder):
    command = [
        "--output_dir",
        folder,
        "--model_name_or_path",
        model,
        "--use_peft",
        "--lora_r",
        "4",
        "--dtype",
        "float32",
    ]
    command += ["--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0.0", "--learning_rate", "0.1"]
    _, args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(command)

    def make_conversation(row):
        return {"prompt": [{"role": "user", "content": row["question"]}]}

    data = questions().map(make_conversation, remove_columns=["question"])
    overlong = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=args,
        reward_funcs=[think_format_reward, overlong, contains_answer],
        train_dataset=data,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    return trainer
