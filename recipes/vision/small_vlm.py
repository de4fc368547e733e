"""A vision-language model that is small enough to learn a task on a CPU in minutes, and that is taught a format first.

`small_vlm` makes an Idefics3, of the family of SmolVLM, with 0.2 million parameters and random weights, and its
processor. `taught` shows it examples with TRL's `SFTTrainer`. The examples show what an answer looks like; to answer
well is left to reinforcement learning.
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, PrinterCallback, set_seed
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import idefics3_chat_template

sys.path.append(str(Path(__file__).parents[1] / "agents"))
from small_policy import fast, merged

BEGIN, END = "<|begin_of_text|>", "<end_of_utterance>"
SPECIAL = [BEGIN, END, "<fake_token_around_image>", "<image>", "<global-img>"]
WORDS = r" ?\w+|[^\w ]"
PATCH, SHUFFLE = 8, 2  # pixels of a patch's side; patches of the side of what becomes one token
BATCH = 16  # pictures of a supervised step
LEARNING_RATE = 1e-3  # of the supervised steps


def small_vlm(
    texts: Iterable[str], *, side: int, seed: int
) -> tuple[Idefics3ForConditionalGeneration, Idefics3Processor]:
    """A model with random weights, and its processor.

    Args:
        texts: what is asked and answered; each word is a token.
        side: of the pictures, in pixels; a multiple of 16.
        seed: of the weights.
    """
    tokenizer = fast(merged([f"User:\nAssistant:{text}" for text in texts], WORDS))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "eos_token": END})
    tokenizer.padding_side = "left"
    whole = {"longest_edge": side}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size=whole, max_image_size=whole, do_image_splitting=False),
        tokenizer,
        image_seq_len=(side // PATCH // SHUFFLE) ** 2,
        chat_template=idefics3_chat_template,
    )
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.1,  # of the order of 1 / √hidden_size; the default is for wide models
    }
    text = {"model_type": "llama", "num_key_value_heads": 4, "max_position_embeddings": 128}
    set_seed(seed)
    config = Idefics3Config(
        text_config={**size, **ids, **text, "vocab_size": len(tokenizer), "tie_word_embeddings": True},
        vision_config={**size, "image_size": side, "patch_size": PATCH},
        scale_factor=SHUFFLE,
        image_token_id=processor.image_token_id,
        tie_word_embeddings=True,
        **ids,
    )
    return Idefics3ForConditionalGeneration(config).to(torch.float32), processor


def taught(
    model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, examples: Dataset, *, steps: int, seed: int
) -> None:
    """Supervised steps on the completions of the examples, which have columns `prompt`, `completion` and `image`."""
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            max_length=None,  # nothing of a picture is cut off
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        trainer = SFTTrainer(model, args=args, train_dataset=examples, processing_class=processor)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
