"""How CuPy's NCCL is called, at one rank; and how many streams of their own torch hands out."""

import torch

from hvlike.backends.cuda import nccl
from hvlike.backends.cuda.runtime import DeviceRuntime

facts = nccl.describe()
print(facts, flush=True)
if facts.missing:
    raise SystemExit(facts.missing)
library = nccl.load()
print("operations", library.ops, "dtypes", library.dtypes, flush=True)
device = torch.device("cuda", torch.cuda.current_device())
runtime = DeviceRuntime()
communicator = library.connect(1, library.new_id(), 0)
stream = runtime.new_stream(device)
tensor = torch.arange(1000.0, device=device)
expected = tensor.clone()
runtime.wait(stream, runtime.record(runtime.current_stream(device)))
address, number = runtime.address(stream), library.dtypes[torch.float32]
with runtime.use(stream), library.group():
    link = communicator.link
    link.allReduce(tensor.data_ptr(), tensor.data_ptr(), len(tensor), number, library.ops["sum"], address)
    link.allReduce(tensor.data_ptr(), tensor.data_ptr(), len(tensor), number, library.ops["avg"], address)
    link.reduce(tensor.data_ptr(), tensor.data_ptr(), len(tensor), number, library.ops["max"], 0, address)
    link.broadcast(tensor.data_ptr(), tensor.data_ptr(), len(tensor), number, 0, address)
torch.cuda.synchronize()
if not torch.equal(tensor, expected):
    raise SystemExit("a group of calls at one rank changed the tensor")
if communicator.error() is not None:
    raise SystemExit(f"a healthy communicator reports {communicator.error()}")
link.destroy()

low = {torch.cuda.Stream(device).cuda_stream for _ in range(100)}
high = {runtime.address(runtime.new_stream(device)) for _ in range(100)}
print(f"of 100 new streams each, {len(low)} of normal and {len(high)} of high priority are different ones", flush=True)
