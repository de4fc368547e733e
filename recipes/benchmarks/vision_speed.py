"""A vision-language model with GRPOTrainer and with A3POTrainer: seconds a step, and memory.

    python recipes/benchmarks/vision_speed.py                        # one GPU, the shape of Qwen2.5-VL-3B
    python recipes/benchmarks/vision_speed.py --shape tiny --cpu     # to try it

Random weights, images of noise, one a prompt, and completions of equal length. `grpo` samples with `generate`, `a3po`
with the transformers engine on the same GPU. `a3po:lora` and `grpo:lora` train adapters of the language model alone.

`step`, `wait` (for a batch) and `publish` are seconds per optimizer step. GRPOTrainer's `wait` is its generation. The
memory is the most that the process of the trainer, and for `a3po` that of the engine, has reserved, in GiB.
"""

import argparse
import subprocess

import torch
from arms import add_arguments, end_arm, first_token_reward, mean, run_arms, step_clock, step_notes
from many_gpus import word_tokenizer
from vllm_publish import WARM, common, timed

COLUMNS = ("step", "wait", "publish", "tokens/s", "trainer GiB", "whole GiB")
ARMS = ("grpo", "a3po", "grpo:lora", "a3po:lora")
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endfor %}"
)
SHAPES = {  # of the text model, and of the vision tower
    "tiny": (
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {"hidden_size": 64, "intermediate_size": 96, "depth": 2, "num_heads": 4, "out_hidden_size": 64,
         "fullatt_block_indexes": [1]},
    ),
    "qwen2.5-vl-3b": (
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                       "mrope_section": [16, 24, 24]}},
        {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "out_hidden_size": 2048},
    ),
}  # fmt: skip


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, arms=["grpo", "a3po"], timeout=280.0, json="vision_speed.json")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-3b")
    parser.add_argument("--vocabulary", type=int, default=32768, help="words")
    parser.add_argument("--side", type=int, default=336, help="pixels of an image's side")
    parser.add_argument("--completions", type=int, default=64, help="completions an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--max_staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    arguments = parser.parse_args()
    if unknown := set(arguments.arms) - set(ARMS):
        parser.error(f"the arms {sorted(unknown)} are not known: give some of {', '.join(ARMS)}")
    return arguments


# --- the process of an arm ----------------------------------------------------------------------------------------


def make_processor(words: int):
    """Qwen2.5-VL's, without its part for videos, which needs torchvision."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImagesOnly(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return argument if argument is None else super().check_argument_for_proper_class(name, argument)

    tokenizer = word_tokenizer(words)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.padding_side = "left"
    return ImagesOnly(Qwen2VLImageProcessorPil(), tokenizer, None, chat_template=TEMPLATE)


def make_model(arguments, tokenizer):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    start, image, end, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    text, tower = SHAPES[arguments.shape]
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": 8192, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2_5_VLConfig(
        text_config={**text, **more},
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    dtype = torch.float32 if arguments.cpu else torch.bfloat16
    with torch.device("cpu" if arguments.cpu else "cuda"):
        return Qwen2_5_VLForConditionalGeneration(config).to(dtype)


def rows(side: int):
    """256 prompts with an image each."""
    import numpy as np
    from datasets import Dataset
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (256, side, side, 3), dtype=np.uint8)
    prompts = [[{"role": "user", "content": f"t{3 + row} t{4 + row}"}] for row in range(256)]
    return Dataset.from_dict({"prompt": prompts, "image": [Image.fromarray(array) for array in pixels]})


def train(arguments) -> None:
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from trl_a3po import A3POConfig, A3POTrainer

    way, _, lora = arguments.arm.partition(":")
    processor, steps, generations = make_processor(arguments.vocabulary), [], []
    settings = {**common(arguments), "generation_kwargs": {"min_new_tokens": arguments.tokens}}
    if way == "grpo":
        trainer_class, args = GRPOTrainer, GRPOConfig(**settings)
    else:
        args = A3POConfig(**settings, max_staleness=arguments.max_staleness, log_all_metrics=True)
        trainer_class = A3POTrainer
    trainer = trainer_class(
        make_model(arguments, processor.tokenizer),
        first_token_reward,
        args=args,
        train_dataset=rows(arguments.side),
        processing_class=processor,
        callbacks=[step_clock(steps)],
        peft_config=LoraConfig(r=16, target_modules=r".*language_model.*_proj") if lora else None,
    )
    if way == "grpo":
        trainer._generate_single_turn = timed(trainer._generate_single_turn, generations)

    def measured() -> dict[str, float]:
        history = [entry for entry in trainer.state.log_history if "a3po/time/wait" in entry][WARM:]
        waits = generations[WARM:] if way == "grpo" else [entry["a3po/time/wait"] for entry in history]
        step = mean(steps[WARM:])
        result = {
            "steps": len(steps[WARM:]),
            "step": step,
            "wait": mean(waits),
            "publish": mean([entry["a3po/time/publish"] for entry in history] or [0.0]),
            "tokens/s": arguments.completions * arguments.tokens / step,
            "trainer GiB": 0.0 if arguments.cpu else torch.cuda.max_memory_reserved() / 2**30,
            "whole GiB": 0.0 if arguments.cpu else used_memory(),
        }
        gap = [entry["a3po/engine_gap/mean"] for entry in trainer.state.log_history if "a3po/engine_gap/mean" in entry]
        return result | ({"engine gap": gap[0]} if gap else {})

    trainer.add_callback(step_notes(arguments, WARM, measured))
    trainer.train()
    end_arm(arguments, measured())


def used_memory() -> float:
    """GiB that all processes have on the first GPU now."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024


def main():
    arguments = parse_arguments()
    if arguments.arm:
        train(arguments)
    run_arms(arguments, COLUMNS)


if __name__ == "__main__":
    main()
