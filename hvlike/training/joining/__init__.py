"""Join: contexts that let ranks have different numbers of inputs."""
