"""RRefs: who owns a value, how long it lives, remote() and proxies.

records     names, notices, the owner's values and the users' forks
lifetime    the protocol, pure
session     the same with a lock and the agent; serves remote() and to_here(); statistics
proxy       calls methods of a value on its owner
rref        RRef and remote()
"""
