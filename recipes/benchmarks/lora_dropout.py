"""How far dropout in a LoRA adapter moves training from GRPOTrainer's at staleness 0.

    python recipes/benchmarks/lora_dropout.py
    python recipes/benchmarks/lora_dropout.py --dropout 0.1 --steps 30

SmolLM2-135M learns one-digit sums, as in the README's quickstart. At each optimizer step, the gradient of the batch is
computed twice with the same dropout: by A3POTrainer, for which dropout is part of the importance ratio, and by the
loss of GRPOTrainer, whose ratio is 1. The distance is that of the two gradients over the length of GRPOTrainer's.
"""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed

from trl_a3po import A3POConfig, A3POTrainer

sys.path.append(str(Path(__file__).parents[1]))
from smollm2 import smollm2_path

GENERATIONS = 8
OF_THE_ENGINE = ("behavior_versions", "staleness", "old_per_token_logps")  # without them, TRL's loss has ratio 1


class Compared(A3POTrainer):
    """Notes, for each optimizer step, the distance from GRPOTrainer's gradient."""

    def __init__(self, *args, **kwargs):
        self.distances = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        noise = torch.get_rng_state()
        plain = {name: value for name, value in inputs.items() if name not in OF_THE_ENGINE}
        expected = self._gradient(super()._compute_loss(model, plain))
        torch.set_rng_state(noise)
        loss = super()._compute_loss(model, inputs)
        difference = self._gradient(loss, retain_graph=True) - expected
        self.distances.append((difference.norm() / expected.norm()).item())
        return loss

    def _gradient(self, loss, **options):
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, trained, **options)])


def sums() -> Dataset:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs])


def correct(completions, answer, **kwargs) -> list[float]:
    return [float(text.split()[:1] == [right]) for text, right in zip(completions, answer, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    set_seed(0)
    path = smollm2_path()
    args = A3POConfig(
        output_dir=tempfile.mkdtemp(),
        max_staleness=0,
        per_device_train_batch_size=4 * GENERATIONS,  # the whole batch of a step
        num_generations=GENERATIONS,
        max_completion_length=6,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        log_all_metrics=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Compared(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        correct,
        args=args,
        train_dataset=sums(),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=arguments.dropout, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "a3po/clip/low" in entry]
    for distance, entry in zip(trainer.distances, logged, strict=True):
        clipped = entry["a3po/clip/low"] + entry["a3po/clip/high"]
        ratios = f"{entry['a3po/rho/min']:.2f} to {entry['a3po/rho/max']:.2f}"
        apart = "no gradient: its rewards are all alike" if math.isnan(distance) else f"distance {distance:.1%}"
        print(f"step {entry['step']}: {clipped:.1%} of the tokens clipped, ratios {ratios}, {apart}")


if __name__ == "__main__":
    main()
