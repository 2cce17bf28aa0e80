"""Training that goes on after an error of the job: state to return to, a loop that starts again, a sampler."""
