"""Where in a program a rank fails: the text of a program for each phase.

`fail()` is put in front by endings.py; FAILS is true on the rank that fails. The other ranks do what they would do in a
program without a fault, so they wait for that one.
"""

START = """
import hvlike as hvd
from hvlike.collectives.session import context

def say_shared():
    # What would stay behind in shared memory: names that this process maps.
    for line in open("/proc/self/maps"):
        if "/dev/shm/" in line and "(deleted)" not in line:
            print("SHARED", line.split()[-1], flush=True)

"""

INIT = """
fabric = context.Fabric

def late_in_init(*args, **kwargs):
    if FAILS:
        fail()
    return fabric(*args, **kwargs)

context.Fabric = late_in_init
hvd.init()
hvd.allreduce(torch.ones(3), name="first")
"""

BEGUN = """
hvd.init()
hvd.allreduce(torch.ones(3), name="first")
say_shared()
"""

MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if FAILS and PHASE == "step" and number == 3:
            fail()
        return super().step(closure)

optimizer = hvd.DistributedOptimizer(Optimizer(model.parameters(), lr=0.1), model.named_parameters())

def train(number):
    optimizer.zero_grad()
    output = model(torch.ones(4, 8))
    if FAILS and PHASE == "backward" and number == 3:
        output.register_hook(lambda gradient: fail())
    output.sum().backward()
    optimizer.step()
"""

STEPS = """
for number in range(1000):
    train(number)
"""

# The timer goes off anywhere in the library: between two lines of its loop, in a wait, in a copy.
SYNCHRONIZE = """
if FAILS:
    signal.signal(signal.SIGALRM, lambda *_: fail())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
while True:
    for size in (1000, 1000000):
        hvd.synchronize(hvd.allreduce_async(torch.ones(size), name=f"of {size}"))
"""

RPC = """
from hvlike import rpc

rpc.init_rpc(f"worker{RANK}", rpc_timeout=RPC_SECONDS)
if RANK == (FAILING + 1) % SIZE:
    rpc.rpc_sync(FAILING, fail)
rpc.shutdown()
"""

JOIN = """
from hvlike.join import Join

with Join([optimizer]):
    for number in range(9 if FAILS else 1):
        if number == 3:
            fail()
        train(number)
"""

SHUTDOWN = """
if FAILS:
    fail()
hvd.shutdown()
"""

PHASES = {
    "init": START + INIT,
    "backward": START + BEGUN + MODEL + STEPS,
    "synchronize": START + BEGUN + SYNCHRONIZE,
    "step": START + BEGUN + MODEL + STEPS,
    "rpc": START + BEGUN + RPC,
    "join": START + BEGUN + MODEL + JOIN,
    "shutdown": START + BEGUN + SHUTDOWN,
}
"""Program by phase."""
