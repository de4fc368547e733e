"""The model card of a run: TRL's card, corrected where it names a model that does not exist.

Guarantees: a model that was built from a configuration or loaded from a folder is not called a "fine-tuned version of
None", and the example loads the trained model; the rest of the card is TRL's.
"""

from pathlib import Path

NO_BASE = "This model is a fine-tuned version of [None](https://huggingface.co/None)"
NO_MODEL = 'model="None"'


def complete_model_card(path: Path, model_class: str, location: str) -> None:
    """Rewrite the card at `path` where it lacks a base model or a place to load the model from.

    Args:
        model_class: class of the trained model, for a card without a base model.
        location: where the example loads the model from, for a model that is not on a hub.
    """
    card = path.read_text(encoding="utf-8")
    card = card.replace(NO_BASE, f"This model is a `{model_class}`, fine-tuned from local weights")
    card = card.replace(NO_MODEL, f'model="{location}"')
    path.write_text(card, encoding="utf-8")
