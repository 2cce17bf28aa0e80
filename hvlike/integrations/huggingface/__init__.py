"""Hugging Face: call `init()`, then train with HvlikeTrainer in the place of transformers.Trainer."""

from hvlike.integrations.huggingface.accelerator import HvlikeAccelerator
from hvlike.integrations.huggingface.start import init
from hvlike.integrations.huggingface.trainer import DataParallelTrainer, HvlikeTrainer

__all__ = ["DataParallelTrainer", "HvlikeAccelerator", "HvlikeTrainer", "init"]
