"""A chat template that writes today's date into the system prompt, and arguments for the template."""

from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import contains_answer, questions

TEMPLATE = (
    "{{ strftime_now('%d') }} {{ mood }} {% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w0{% endif %}"
)


def main(model, folder):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    data = questions().map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    args = GRPOConfig(output_dir=folder, chat_template_kwargs={"mood": "w5"})
    trainer = GRPOTrainer(model, contains_answer, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer
