"""Run with Hugging Face: recomputed activations, mixed precision and torch.compile, by the Trainer's own switches."""

import random
import sys
import tempfile

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import darknight as dk

sys.path.insert(0, sys.argv[1])
from huggingface_trainer import LENGTH, TOPICS, sentences

CONFIG = BertConfig(
    vocab_size=110,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=LENGTH,
    num_labels=TOPICS,
)

for switch in ("gradient_checkpointing", "bf16", "torch_compile"):
    model = BertForSequenceClassification(CONFIG)
    with tempfile.TemporaryDirectory() as folder, dk.Runtime(dk.Scheme(inputs=3, colluders=1), None) as runtime:
        report = dk.protect_(model, runtime)
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=8,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **{switch: True},
        )
        Trainer(model=model, args=arguments, train_dataset=sentences(32, random.Random(0))).train()
        assert len(report.masked) == 8, switch
        assert all(row.calls >= 2 for row in report.masked), switch
print("all of it works")
