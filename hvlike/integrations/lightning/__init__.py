"""Lightning: `Trainer(strategy=HvlikeStrategy())`, or `Trainer(strategy="hvlike")` once this is imported."""

from hvlike.integrations.lightning.strategy import HvlikeStrategy

__all__ = ["HvlikeStrategy"]
