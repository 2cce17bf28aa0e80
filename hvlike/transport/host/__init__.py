"""What surrounds a rank: MPI library, launcher, nodes and cores."""
