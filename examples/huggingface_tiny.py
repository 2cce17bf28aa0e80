"""Train a tiny language model with the Hugging Face Trainer, on any number of ranks.

    mpirun -n 2 python examples/huggingface_tiny.py

The model is made from a configuration and the data are sequences of numbers that count on in steps, so nothing is
downloaded. What is hvlike's: `huggingface.init()` before the TrainingArguments, and HvlikeTrainer in the place of
Trainer. Batches are dealt out to the ranks, metrics are of all of them, and rank 0 writes the checkpoints. `--resume`
goes on from the last one.
"""

import argparse
from pathlib import Path

import numpy
import torch
from torch import Tensor
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, TrainingArguments

from hvlike.integrations import huggingface

VOCABULARY, LENGTH = 29, 12


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, or go on training, then test. Returns the metrics."""
    options = parse_arguments(arguments)
    huggingface.init()
    settings = TrainingArguments(
        output_dir=str(options.output),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        max_grad_norm=1.0,
        seed=options.seed,
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    torch.manual_seed(options.seed)
    trainer = huggingface.HvlikeTrainer(
        model=make_model(),
        args=settings,
        train_dataset=make_sequences(512, seed=1),
        eval_dataset=make_sequences(101, seed=2),
        compute_metrics=share_of_right_tokens,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"tokens guessed: {metrics['eval_guessed']:.3f}", flush=True)
    return metrics


def make_model() -> GPT2LMHeadModel:
    """A transformer of two layers, with fresh weights; those of rank 0 become those of all."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def make_sequences(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences that begin somewhere and go on in steps of 1 to 4: two tokens say how all others are."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 5, (number, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def share_of_right_tokens(prediction: EvalPrediction) -> dict[str, float]:
    """How many of the tokens after the second are guessed."""
    guessed, tokens = prediction.predictions[:, 1:-1], prediction.label_ids[:, 2:]
    return {"guessed": float(numpy.mean(guessed == tokens)), "sequences": len(tokens)}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("out/huggingface"), help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
