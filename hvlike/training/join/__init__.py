"""Join: ranks with different numbers of inputs."""
