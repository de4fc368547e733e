"""open-r1's GRPO script: a parser for the script's arguments, a registry of rewards with weights, a system prompt, the
last checkpoint found and resumed from, metrics and state saved, a model card."""

import math
import re
from dataclasses import dataclass, field

from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config  # isort: skip

from tests.scripts.data import questions, text_of


@dataclass
class Arguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy", "format", "cosine", "repetition"])
    cosine_max_len: int = 20
    system_prompt: str = "w1 w2 w3"


def accuracy(completions, answer, **kwargs):
    pairs = zip(completions, answer, strict=True)
    return [1.0 if text_of(text)[-1:] == gold[-1:] else 0.0 for text, gold in pairs]


def format_reward(completions, **kwargs):
    return [1.0 if re.match(r"^w\d+ w\d+", text_of(text)) else 0.0 for text in completions]


def cosine_scaled(max_len):
    def cosine_reward(completions, answer, **kwargs):
        lengths = [min(len(text_of(text)), max_len) for text in completions]
        return [0.5 * (1 + math.cos(math.pi * length / max_len)) for length in lengths]

    return cosine_reward


def repetition(completions, **kwargs):
    words = [text_of(text).split() for text in completions]
    return [len(set(text)) / max(1, len(text)) - 1 for text in words]


def main(model, folder):
    parser = TrlParser((Arguments, GRPOConfig, ModelConfig))
    options = {"output_dir": folder, "model_name_or_path": model, "dataset_name": "questions", "dtype": "float32"}
    options |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options["reward_weights"] = "1.0 0.5 0.5 0.1"
    command = [word for name, value in options.items() for word in (f"--{name}", *str(value).split())]
    script, args, model_args = parser.parse_args_and_config(command)
    registry = {
        "accuracy": accuracy,
        "format": format_reward,
        "cosine": cosine_scaled(script.cosine_max_len),
        "repetition": repetition,
    }

    def conversation(row):
        system = {"role": "system", "content": script.system_prompt}
        return {"prompt": [system, {"role": "user", "content": row["question"]}]}

    def train(steps):
        args.max_steps = steps
        trainer = GRPOTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=[registry[name] for name in script.reward_funcs],
            args=args,
            train_dataset=questions().map(conversation),
            eval_dataset=questions(2, first=30).map(conversation),
            peft_config=get_peft_config(model_args),
        )
        result = trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        trainer.save_model(args.output_dir)
        trainer.create_model_card(dataset_name=script.dataset_name, tags=["open-r1"])
        trainer.model.config.use_cache = True
        trainer.model.config.save_pretrained(args.output_dir)
        metrics = trainer.evaluate()
        metrics["eval_samples"] = 2
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        return trainer

    train(2)
    return train(3)
