"""Named operations and the buckets of backward, begun in another order on each rank, and from two threads."""

import threading

import torch

import hvlike as hvd

hvd.init()
device = hvd.pin_device()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).to(device)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
expected = size * (size + 1) / 2
side = torch.full((1 << 20,), rank + 1.0, device=device)


def named(step: int) -> None:
    result = hvd.allreduce(side, op=hvd.Sum, name=f"side{step}")
    if not bool((result == expected).all()):
        raise SystemExit(f"rank {rank}, step {step}: expected {expected}, got {result.unique()[:5]}")


for step in range(30):
    optimizer.zero_grad()
    loss = model(torch.full((8, 512), float(rank + step), device=device)).square().mean()
    if step % 3 == 2:
        thread = threading.Thread(target=named, args=(step,))
        thread.start()
        loss.backward()
        optimizer.step()
        thread.join()
        continue
    if (step + rank) % 2:
        handle = hvd.allreduce_async(side, op=hvd.Sum, name=f"first{step}")
        loss.backward()
    else:
        loss.backward()
        handle = hvd.allreduce_async(side, op=hvd.Sum, name=f"first{step}")
    optimizer.step()
    if not bool((hvd.synchronize(handle) == expected).all()):
        raise SystemExit(f"rank {rank}, step {step}: the named sum is wrong")
digest = torch.cat([each.detach().flatten() for each in model.parameters()]).double().sum().reshape(1)
everybody = hvd.allgather(digest)
if not bool((everybody == everybody[0]).all()):
    raise SystemExit(f"rank {rank}: the ranks differ: {everybody.tolist()}")
print(f"rank {rank}: 30 steps in mixed orders", flush=True)
