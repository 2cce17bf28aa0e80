"""Data parallelism for PyTorch over MPI, with Horovod's names: `import hvlike as hvd`."""

import sys
from typing import TYPE_CHECKING

from hvlike.lazy import at_first_use
from hvlike.torch_distributed.autoload import register

if TYPE_CHECKING:
    from hvlike.names import *  # noqa: F403
    from hvlike.names import __version__ as __version__
else:
    _later = ("autograd", "checkpoint", "elastic", "errors", "horovod", "integrations", "nn", "optim", "rpc")
    __getattr__, __dir__ = at_first_use(
        globals(), *_later, others="hvlike.names", progress="hvlike.training.progress", run="hvlike.launch.run"
    )

# `import torch` imports this package where it is installed: hence no more than this. Where it is not, it is done here,
# but for `python -m hvlike COMMAND` (sys.argv is not complete yet) and `hvlike COMMAND`: not every command needs torch,
# and `run` leaves its import to the program (__main__.py).
if not ((sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)] == __name__) or sys.argv[0].endswith("/hvlike")):
    register()
