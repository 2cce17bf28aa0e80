"""What is so on this machine and in this job: every file has a record and the function that fills it; none judges."""
