"""Two optimizer steps of a tiny random model with the installed package, in the current folder and without a network:
the engine's worker process, a publish and the report of a run work outside a clone."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import trl_a3po
from trl_a3po import A3POConfig, A3POTrainer

WORDS = [f"w{i}" for i in range(61)]


def save_model(folder: Path) -> None:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def sum_of_ids(completion_ids, **kwargs):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def main() -> None:
    assert Path(trl_a3po.__file__).is_relative_to(sys.prefix), f"{trl_a3po.__file__} is not the installed package"
    model = Path("model")
    save_model(model)
    args = A3POConfig(
        output_dir="run",
        max_steps=2,
        max_staleness=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    prompts = Dataset.from_dict({"prompt": [f"{a} {b}" for a in WORDS[:4] for b in WORDS[4:8]]})
    trainer = A3POTrainer(str(model), sum_of_ids, args=args, train_dataset=prompts)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
    assert (Path("run") / "timeline.jsonl").is_file()
    print(f"trained 2 steps with trl-a3po {trl_a3po.__version__} from {Path.cwd()}")


if __name__ == "__main__":
    main()
