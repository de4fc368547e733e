"""A model card and a saved model, nothing pushed."""

from pathlib import Path

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    trainer = GRPOTrainer(
        model, length, args=GRPOConfig(output_dir=folder, push_to_hub=False), train_dataset=prompts()
    )
    trainer.train()
    trainer.save_model(folder)
    trainer.create_model_card(model_name="tiny", dataset_name="words", tags=["mine"])
    card = (Path(folder) / "README.md").read_text()
    assert "words" in card and "mine" in card
    return trainer
