"""The only package that touches MPI: processes, shared memory, doorbells, the loop, messages."""
