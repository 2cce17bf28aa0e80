"""RRefs: who owns a value, how long it lives, remote() and proxies."""
