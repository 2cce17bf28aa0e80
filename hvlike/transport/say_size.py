"""A program of its own: every rank prints how many ranks MPI counts. Its text is run, so it imports nothing of ours."""

from mpi4py import MPI

print(f"ranks: {MPI.COMM_WORLD.Get_size()}", flush=True)
