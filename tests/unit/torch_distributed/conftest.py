"""What needs the backend itself is left out where torch is too old for it."""

import torch

from hvlike.torch_distributed.autoload import OLDEST_TORCH

collect_ignore = []
if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    collect_ignore.append("test_group_names.py")
