"""hvlike inside other libraries: torch.distributed, Lightning, Hugging Face. Nothing is imported until it is asked for.

torch_distributed       init_process_group: torch.distributed over the ranks of hvlike
distributed_checkpoint  torch.distributed.checkpoint of wrapped models and optimizers
lightning               HvlikeStrategy for lightning.pytorch.Trainer
pytorch_lightning       the same for pytorch_lightning.Trainer
huggingface             HvlikeTrainer for transformers, HvlikeAccelerator for accelerate
"""
