"""The conditions of a run, as reports show them."""

CONDITIONS = {
    "ranks": 2,
    "nodes": 1,
    "cores": 2,
    "torch_threads": 1,
    "hvlike": "0",
    "torch": "2",
    "python": "3",
    "mpi": "Open MPI",
    "left_out": [],
}
