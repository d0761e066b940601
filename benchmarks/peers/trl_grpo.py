"""How fast is TRL's GRPOTrainer on the benchmark's job? Run by ``grpo_vs_trl.py`` with the Python of TRL's environment.

    python benchmarks/peers/trl_grpo.py MODEL STEPS PROMPTS GROUP NEW_TOKENS

Prints one JSON object on its last line: the seconds of every step after the first.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", WANDB_DISABLED="true", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def digits(completions, **columns):
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]


class Clock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def main():
    model, (steps, prompts, group, new_tokens) = sys.argv[1], map(int, sys.argv[2:6])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=new_tokens,
            max_steps=steps,
            learning_rate=1e-3,
            logging_steps=1000,
            report_to=[],
            use_cpu=True,
            bf16=False,
            fp16=False,
            save_strategy="no",
            beta=0.0,
            gradient_checkpointing=False,
            temperature=1.0,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            generation_kwargs={"min_new_tokens": new_tokens},
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=digits,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"{a} + {b} = "} for a in range(20) for b in range(20)]),
            callbacks=[clock],
        )
        trainer.train()
    seconds = [end - begin for begin, end in itertools.pairwise(clock.ends)]
    print(json.dumps({"trl": trl.__version__, "step_s": seconds}))


main()
