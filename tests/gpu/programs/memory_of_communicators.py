"""How much memory of the GPU each communicator takes."""

import torch

import hvlike as hvd


def used() -> int:
    torch.cuda.synchronize()
    hvd.barrier()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


hvd.init()
device = hvd.pin_device()
x = torch.ones(1 << 10, device=device)
last = used()


def report(what: str) -> None:
    global last
    now = used()
    if hvd.rank() == 0:
        print(f"{what}: {now - last} MiB on this GPU, for {hvd.size()} ranks of the node", flush=True)
    last = now


hvd.allreduce(x, name="first")
report("the first allreduce (root and first queue)")
for number in range(3):
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        [(f"{number}.{name}", each) for name, each in model.named_parameters()],
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4, device=device)).sum().backward()
        optimizer.step()
    report(f"optimizer {number + 1}")
