"""LoRA, then the adapter merged into the model, saved and loaded again."""

from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    trainer = GRPOTrainer(
        model,
        length,
        args=GRPOConfig(output_dir=folder, learning_rate=0.1),
        train_dataset=prompts(),
        peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(folder)
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(f"{folder}/merged")
    AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
    return trainer
