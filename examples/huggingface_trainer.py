"""A small BERT and the Trainer of Hugging Face as ever, and three lines of DarKnight in the script.

    pip install transformers accelerate
    python examples/huggingface_trainer.py            # every Linear layer on workers that learn nothing
    python examples/huggingface_trainer.py --plain    # the same script without DarKnight

The model is made from a configuration and the sentences are made up here, so nothing is downloaded. With weights of
your own, BertForSequenceClassification.from_pretrained takes the place of the constructor.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

import darknight as dk

TOPICS, WORDS_OF_A_TOPIC, COMMON_WORDS, LENGTH = 4, 12, 60, 24
PAD, CLS, FIRST_WORD = 0, 1, 2


@contextmanager
def privately(model: nn.Module) -> Iterator[None]:
    """All that DarKnight adds. In earnest, dk.connect("fleet.toml") takes the place of dk.local_fleet."""
    scheme = dk.Scheme(inputs=4, colluders=1)
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        report = dk.protect_(model, runtime)
        yield
        print(report)
    dk.unprotect_(model)


def sentences(count: int, draw: random.Random) -> list[dict[str, object]]:
    """Sentences of 12 to 24 words, half of them from the vocabulary of their topic, padded to one length."""
    made = []
    for _ in range(count):
        topic = draw.randrange(TOPICS)
        own = range(FIRST_WORD + topic * WORDS_OF_A_TOPIC, FIRST_WORD + (topic + 1) * WORDS_OF_A_TOPIC)
        common = range(FIRST_WORD + TOPICS * WORDS_OF_A_TOPIC, FIRST_WORD + TOPICS * WORDS_OF_A_TOPIC + COMMON_WORDS)
        words = [draw.choice(own if draw.random() < 0.5 else common) for _ in range(draw.randint(12, LENGTH) - 1)]
        missing = LENGTH - 1 - len(words)
        made.append(
            {
                "input_ids": torch.tensor([CLS, *words, *[PAD] * missing]),
                "attention_mask": torch.tensor([1] * (LENGTH - missing) + [0] * missing),
                "labels": topic,
            }
        )
    return made


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without DarKnight")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    set_seed(0)
    draw = random.Random(0)
    config = BertConfig(
        vocab_size=FIRST_WORD + TOPICS * WORDS_OF_A_TOPIC + COMMON_WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=TOPICS,
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            learning_rate=3e-3,
            warmup_steps=5,
            logging_steps=1,
            save_steps=options.steps // 2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=sentences(512, draw),
            eval_dataset=sentences(128, draw),
            compute_metrics=accuracy,
        )
        with nullcontext() if options.plain else privately(model):
            trainer.train()
            found = trainer.evaluate()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {float(entry['loss']):.6f}")
    print(f"accuracy {found['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
