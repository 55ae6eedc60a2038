"""Members without a Trainer that meet as any torch script does and add up their ranks; arguments are echoed."""

import os
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    line = f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}: {total.item()} {sys.argv[1:]}"
    dist.destroy_process_group()
    print(f"{line}\n", end="", flush=True)
