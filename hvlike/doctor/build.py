"""--check-build: Horovod's list of what was built in."""

from __future__ import annotations

import hvlike
from hvlike.collectives import abilities


def check_build() -> str:
    """The list. Local; starts neither MPI nor a GPU."""
    groups: dict[str, dict[str, bool | int]] = {
        "Available Frameworks": {
            "TensorFlow": abilities.extension_available("tensorflow"),
            "PyTorch": abilities.extension_available("torch"),
            "MXNet": abilities.extension_available("mxnet"),
        },
        "Available Controllers": {"MPI": abilities.mpi_built(), "Gloo": abilities.gloo_built()},
        "Available Tensor Operations": {
            "NCCL": abilities.nccl_built(),
            "DDL": abilities.ddl_built(),
            "CCL": abilities.ccl_built(),
            "MPI": abilities.mpi_built(),
            "Gloo": abilities.gloo_built(),
        },
    }
    lines = [f"hvlike v{hvlike.__version__}:"]
    for title, entries in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    return "\n".join(lines)
