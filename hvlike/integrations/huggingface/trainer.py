"""transformers.Trainer over the ranks that mpirun has started."""

from __future__ import annotations

from transformers import Trainer

from hvlike.integrations.huggingface.accelerator import HvlikeAccelerator
from hvlike.integrations.huggingface.start import check_ranks


class DataParallelTrainer:
    """What makes a Trainer train over hvlike: `class MyTrainer(DataParallelTrainer, Seq2SeqTrainer)`.

    Call `init()` of this package before TrainingArguments are made. Data are dealt out to the ranks, the loss in the
    log and the metrics of an evaluation are of all of them, rank 0 writes checkpoints, and every rank reads them.
    Collective: every rank makes it, and makes the same calls.
    Raises: UsageError where TrainingArguments see another number of ranks than hvlike has.
    """

    accelerator: HvlikeAccelerator

    def create_accelerator_and_postprocess(self) -> None:
        """Called by the Trainer, which makes its Accelerator itself, of arguments that it alone knows."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the Trainer comes after this class
        check_ranks(self.accelerator.num_processes)
        self.accelerator.__class__ = HvlikeAccelerator


class HvlikeTrainer(DataParallelTrainer, Trainer):
    """transformers.Trainer over hvlike; see DataParallelTrainer.

    Source: transformers.Trainer.
    """
