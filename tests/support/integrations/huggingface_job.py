"""A job for test_huggingface.py: a Trainer on several ranks is held against one process with the whole batches."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

import hvlike as hvd
from hvlike.errors import UsageError
from hvlike.integrations import huggingface

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import huggingface_tiny
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from huggingface_tiny import make_model, make_sequences, share_of_right_tokens
from transformers import TrainingArguments

BATCH, PASSES, EPOCHS, LR = 2, 2, 2, 0.2
TRAINING, TEST = make_sequences(32, seed=3), make_sequences(19, seed=4)
for number, sequence in enumerate(TRAINING):
    # Ranks have different numbers of tokens to learn from, and average over all of them.
    sequence["labels"] = sequence["labels"].clone()
    sequence["labels"][: number % 7] = -100


class OrderedTrainer(huggingface.HvlikeTrainer):
    """Takes the samples as they come."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(TRAINING)


def fresh_model() -> Any:
    torch.manual_seed(5 + hvd.rank())
    return make_model()


def make_trainer(folder: str, epochs: int = EPOCHS, **more: Any) -> OrderedTrainer:
    settings = TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=PASSES,
        max_grad_norm=0.5,
        save_strategy="epoch",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
    )
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = {"train_dataset": TRAINING, "eval_dataset": TEST}
    return OrderedTrainer(model=model, args=settings, optimizers=(optimizer, schedule), **data, **more)


def reference() -> nn.Module:
    """What one process learns from the whole batches."""
    model = fresh_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    whole = BATCH * PASSES * hvd.size()
    tokens, labels = (torch.stack([each[key] for each in TRAINING]) for key in ("input_ids", "labels"))
    for _ in range(EPOCHS):
        for ids, targets in zip(tokens.split(whole), labels.split(whole), strict=True):
            optimizer.zero_grad()
            model(input_ids=ids, labels=targets).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


def check_same(model: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
        assert all(torch.equal(value, other) for other in hvd.allgather(value[None])), name


def training(folder: str) -> None:
    expected = reference()
    trainer = make_trainer(
        folder, compute_metrics=share_of_right_tokens, preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1)
    )
    trainer.train()
    check_same(trainer.model, expected.state_dict())
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    assert trainer.model_wrapped is not trainer.model
    assert trainer.is_world_process_zero() == (hvd.rank() == 0)
    metrics = trainer.evaluate()
    tokens = torch.stack([sequence["input_ids"] for sequence in TEST])
    with torch.no_grad():
        guessed = expected.eval()(input_ids=tokens).logits.argmax(-1)
    right = (guessed[:, 1:-1] == tokens[:, 2:]).float().mean().item()
    assert metrics["eval_sequences"] == len(TEST)
    # Another machine may see a token or two otherwise.
    assert metrics["eval_guessed"] == pytest.approx(right, abs=2.5 / tokens[:, 2:].numel())


def going_on_from_a_checkpoint(folder: str) -> None:
    whole = make_trainer(f"{folder}/whole")
    whole.train()
    make_trainer(f"{folder}/parts", epochs=1).train()
    hvd.barrier()
    parts = make_trainer(f"{folder}/parts")
    parts.train(resume_from_checkpoint=True)
    assert parts.state.global_step == whole.state.global_step
    check_same(parts.model, whole.model.state_dict(), tolerance=1e-6)
    written = sorted(path.name for path in Path(folder, "whole").iterdir())
    assert written == ["checkpoint-4", "checkpoint-8"]


def an_accelerator_by_itself(folder: str) -> None:
    accelerator = huggingface.HvlikeAccelerator(gradient_accumulation_steps=2)
    inner = nn.Linear(3, 1, bias=False)
    model, _optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 3), float(hvd.rank()))).sum())
    assert torch.equal(inner.weight.grad, torch.full((1, 3), (hvd.size() - 1) / 2))
    assert accelerator.gather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    with pytest.raises(UsageError, match="Pass the plain optimizer"):
        accelerator.prepare(hvd.DistributedOptimizer(torch.optim.SGD(inner.parameters(), lr=0.1)))


def an_accelerator_with_a_hook(folder: str) -> None:
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    accelerator = huggingface.HvlikeAccelerator(kwargs_handlers=[hook])
    inner = nn.Linear(3, 1, bias=False)
    model = accelerator.prepare(inner)
    accelerator.backward(model(torch.full((1, 3), 1 + hvd.rank() / 1024)).sum())
    # What bfloat16 has of it, on both ranks.
    assert torch.equal(inner.weight.grad, torch.ones(1, 3))


def the_example_learns(folder: str) -> None:
    metrics = huggingface_tiny.main(["--output", folder, "--epochs", "3", "--batch-size", "16"])
    assert metrics["eval_guessed"] > 0.3
    assert metrics["eval_sequences"] == 101


def an_accelerator_that_was_made_too_early_is_found() -> None:
    """Before anything else: accelerate looks around once. Under an unknown launcher it sees a job of one."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "LOCAL_RANK")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name, raising=False)
        early = Accelerator(cpu=True)
        assert early.num_processes == 1
    with pytest.raises(UsageError, match=r"sees 1 of the \d ranks"):
        huggingface.init()
    early.state._reset_state(reset_partial_state=True)


def main() -> None:
    hvd.init()
    an_accelerator_that_was_made_too_early_is_found()
    huggingface.init()
    checks = (
        training,
        going_on_from_a_checkpoint,
        an_accelerator_by_itself,
        an_accelerator_with_a_hook,
        the_example_learns,
    )
    for check in checks:
        folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
        check(folder)
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"{check.__name__}: well", flush=True)


if __name__ == "__main__":
    main()
