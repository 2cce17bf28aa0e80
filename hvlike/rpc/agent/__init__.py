"""The RPC agent of a worker: calls and their replies, options, futures, profiling, the end of a session."""
