"""Members that meet through `connect_store` and add up their ranks; prints one line each. Arguments are echoed."""

import os
import sys

import torch
import torch.distributed as dist

from lightning_ntp.comm.rendezvous import check_world_size, connect_store

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
check_world_size(world_size)
store = connect_store(timeout_s=60)
dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=world_size)
total = torch.tensor(rank + 1)
dist.all_reduce(total)
dist.destroy_process_group()
print(f"rank {rank} of {world_size}: {total.item()} {sys.argv[1:]}\n", end="", flush=True)
