"""What was reduced is right after shutdown(), and after its process set was removed: the end waits for the device."""

import torch

import hvlike as hvd

hvd.init()
device = hvd.pin_device()
size = hvd.size()
expected = size * (size + 1) / 2


def check(tensors: list[torch.Tensor], when: str) -> None:
    torch.cuda.synchronize()
    for number, tensor in enumerate(tensors):
        if not bool((tensor == expected).all()):
            raise SystemExit(f"rank {rank}, {when}, tensor {number}: expected {expected}, got {tensor.unique()[:5]}")
    print(f"rank {rank}: right {when}", flush=True)


rank = hvd.rank()
few = hvd.add_process_set(list(range(size))[: size if size > 2 else 2]) if size > 2 else None
tensors = [torch.full((16 << 20,), rank + 1.0, device=device) for _ in range(6)]
if few is not None:
    hvd.grouped_allreduce_(tensors, op=hvd.Sum, process_set=few)
    hvd.remove_process_set(few)
    check(tensors, "after remove_process_set()")
tensors = [torch.full((16 << 20,), rank + 1.0, device=device) for _ in range(6)]
for tensor in tensors:
    hvd.allreduce_(tensor, op=hvd.Sum)
hvd.shutdown()
check(tensors, "after shutdown()")
hvd.init()
tensors = [torch.full((1 << 20,), rank + 1.0, device=device)]
hvd.allreduce_(tensors[0], op=hvd.Sum)
check(tensors, "after a second init()")
