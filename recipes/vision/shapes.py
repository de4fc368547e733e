"""A small vision-language model learns to name the colour and the shape in a picture, on a CPU.

    python recipes/vision/shapes.py                       # two trainers, three seeds; reward curves as JSON and PNG
    python recipes/vision/shapes.py --arms A3POTrainer --seeds 0 --steps 20  # one short run

Supervised steps first teach the model what an answer looks like, such as `red circle`. Who wrote these answers has
looked up every third word, on average, and drawn the others by lot. RL then teaches the model to look. There are two
rewards, for the colour and for the shape, and each counts for half. No picture comes twice, so the reward of a step is
that of pictures which the policy was not trained on. `GRPOTrainer` has the same settings.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from small_vlm import small_vlm, taught
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from trl_a3po import A3POConfig, A3POTrainer

sys.path.append(str(Path(__file__).parents[1] / "agents"))
from curves import Curve, curve_of, study

SIDE = 32  # pixels
COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180), "yellow": (240, 200, 30)}
SHAPES = ("circle", "cross", "triangle")
QUESTION = "What is this?"
PROMPTS, GENERATIONS = 16, 4  # a batch: 64 answers
EXAMPLES, TAUGHT_STEPS = 2400, 150
LOOKED = 1 / 3  # the share of words in the examples whose writer has looked at the picture
HELD_OUT = 200  # pictures that are never trained on


def colour_is_right(completions: list, colour: list[str], **columns) -> list[float]:
    """Whether the answer begins with the colour."""
    return [float(said(messages)[:1] == [right]) for messages, right in zip(completions, colour, strict=True)]


def shape_is_right(completions: list, shape: list[str], **columns) -> list[float]:
    """Whether the shape is the second word of the answer, and the last."""
    return [float(said(messages)[1:] == [right]) for messages, right in zip(completions, shape, strict=True)]


def said(messages: list[dict[str, Any]]) -> list[str]:
    """The words of a completion."""
    (message,) = messages
    return message["content"].split()


def main():
    study(
        run,
        name="shapes",
        title="The colour and the shape in a picture",
        steps=200,
        arms=("A3POTrainer", "GRPOTrainer"),
        output="outputs/vision",
    )


def run(arm: str, seed: int, steps: int, folder: str) -> Curve:
    draw = random.Random(seed)
    model, processor = policy(draw, seed)
    held_out = rows(HELD_OUT, random.Random(f"held out {seed}"))
    before = right(model, processor, held_out)
    trainer_class, config = (A3POTrainer, A3POConfig) if arm == "A3POTrainer" else (GRPOTrainer, GRPOConfig)
    trainer = trainer_class(
        model,
        reward_funcs=[colour_is_right, shape_is_right],
        args=config(**settings(seed, steps, folder), bf16=False),
        train_dataset=Dataset.from_list(rows(steps * PROMPTS, draw)),
        processing_class=processor,
    )
    curve = curve_of(trainer, f"{arm}, seed {seed}")
    after = right(model, processor, held_out)
    print(f"{arm}, seed {seed}: of {HELD_OUT} held-out pictures, {before:.0%} were right before, {after:.0%} after")
    return curve


def settings(seed: int, steps: int, folder: str) -> dict[str, Any]:
    """The settings that `GRPOConfig` has too."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
        "num_generations": GENERATIONS,
        "reward_weights": [0.5, 0.5],
        "max_completion_length": 4,
        "max_steps": steps,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def policy(draw: random.Random, seed: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A model that has seen what an answer looks like, and its processor."""
    texts = [f"{QUESTION} {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    model, processor = small_vlm(texts, side=SIDE, seed=seed)
    examples = Dataset.from_list([example(draw) for _ in range(EXAMPLES)])
    taught(model, processor, examples, steps=TAUGHT_STEPS, seed=seed)
    return model, processor


def example(draw: random.Random) -> dict[str, Any]:
    """A picture with the answer of someone who looks up every third word, on average, and draws the others by lot."""
    (row,) = rows(1, draw)
    seen = ((row["colour"], [*COLOURS]), (row["shape"], [*SHAPES]))
    words = [right if draw.random() < LOOKED else draw.choice(others) for right, others in seen]
    completion = [{"role": "assistant", "content": " ".join(words)}]
    return {"prompt": row["prompt"], "image": row["image"], "completion": completion}


def rows(number: int, draw: random.Random) -> list[dict[str, Any]]:
    """Rows of a dataset: a question, a picture, and what is in it."""
    prompt = [{"role": "user", "content": QUESTION}]
    pairs = [(draw.choice([*COLOURS]), draw.choice([*SHAPES])) for _ in range(number)]
    return [{"prompt": prompt, "image": picture(c, s, draw), "colour": c, "shape": s} for c, s in pairs]


def picture(colour: str, shape: str, draw: random.Random) -> Image.Image:
    """The shape on a light ground; place, size, shade and ground are drawn by lot."""
    scale = 4  # drawn larger and made smaller, so that edges are smooth
    image = Image.new("RGB", (SIDE * scale,) * 2, (draw.randrange(190, 256),) * 3)
    radius = draw.uniform(11, 14) * scale
    x, y = ((SIDE / 2 + draw.uniform(-2, 2)) * scale for _ in range(2))
    shade = tuple(min(255, max(0, part + draw.randrange(-30, 31))) for part in COLOURS[colour])
    pen, arm = ImageDraw.Draw(image), radius / 3
    if shape == "circle":
        pen.circle((x, y), radius, fill=shade)
    elif shape == "triangle":
        pen.regular_polygon((x, y, radius), 3, fill=shade)
    else:
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=shade)
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=shade)
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


@torch.no_grad()
def answers(model: PreTrainedModel, processor: ProcessorMixin, pictures: list[Image.Image]) -> list[str]:
    """What the model answers when it does not sample."""
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(question, add_generation_prompt=True)
    inputs = processor(text=[text] * len(pictures), images=[[image] for image in pictures], return_tensors="pt")
    inputs = inputs.to(model.device)
    ids = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
    return processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def right(model: PreTrainedModel, processor: ProcessorMixin, held_out: list[dict[str, Any]]) -> float:
    """The share of pictures of which the model names the colour and the shape."""
    given = answers(model, processor, [row["image"] for row in held_out])
    return sum(a.split() == [r["colour"], r["shape"]] for a, r in zip(given, held_out, strict=True)) / len(held_out)


if __name__ == "__main__":
    main()
