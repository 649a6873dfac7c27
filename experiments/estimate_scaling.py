"""python experiments/estimate_scaling.py: print the table "on paper" of docs/scaling.md, from the stream's plan."""

import numpy as np

from vitray.data.shards.options import ShardSettings
from vitray.data.shards.writing import GROUP_BYTES
from vitray.data.stream.epoch_order import Cut, EpochOrder
from vitray.data.stream.ray_reader import PIECES_AT_ONCE

# ImageNet, and a cluster of 8 nodes with 8 GPUs.
IMAGES, IMAGE_BYTES, PIXELS = 1_281_167, 110_000, 224
GPUS, NODES, BATCH_PER_GPU, IMAGES_PER_GPU = 64, 8, 64, 2_000
# CPU time per image of the whole stream, in microseconds: LOG.md, 2026-11-21, "Is the stream as fast as a DataLoader?"
CPU_US = 1_562
STORE = 8 * 200 * 10**9
PIECES = 400  # to average over


def main() -> None:
    """Print the table."""
    group = max(16, min(128, GROUP_BYTES // IMAGE_BYTES))
    shards = -(-IMAGES * IMAGE_BYTES // ShardSettings().shard_bytes)
    groups = np.full(IMAGES // group, group)
    cut = Cut.fitting(3 * PIXELS**2, STORE // 4, GPUS * BATCH_PER_GPU, GPUS)._replace(executions=NODES)
    order, ends = EpochOrder(groups, None, ("", 0, 0)), np.cumsum(groups)
    pieces = list(cut.pieces(0, 0, int(groups.sum()) // cut.batch * cut.batch))[:PIECES]
    rows = [order.at(np.concatenate(cut.shares(piece)))[0] for piece in pieces]
    per_task = float(np.mean([len(each) for each in rows]))
    touched = float(np.mean([len(np.unique(np.searchsorted(ends, each, side="right"))) for each in rows]))

    speed = GPUS * IMAGES_PER_GPU
    tasks = speed / per_task
    pixels = speed * PIXELS * PIXELS * 3
    read = tasks * touched * group * IMAGE_BYTES
    moved = pixels * (1 - 1 / NODES)  # to a worker on another node, with one execution for all
    cores = speed * CPU_US / 1e6
    lines = {
        "images/s": f"{GPUS} GPUs x {IMAGES_PER_GPU:,} = {speed:,}",
        "epoch": f"{IMAGES / speed:.0f} s",
        "shards": f"{shards:,}, with {len(groups):,} row groups of {group} images",
        "tasks": f"{tasks:.0f}/s of {per_task:,.0f} images",
        "blocks": f"{tasks * cut.members:,.0f}/s; {cut.members} a task, of {per_task / cut.members:.0f} images;"
        f" {tasks * cut.members / NODES:,.0f}/s of each execution",
        "row groups": f"{touched:.1f} a task; {touched * group / per_task:.2f} images read for each one used",
        "S3 requests": f"{tasks * touched:,.0f}/s, one for a row group; 2 for each shard once in each process",
        "S3 bytes": f"{read / 1e9:.1f} GB/s; {8 * read / NODES / 1e9:.0f} Gbit/s into a node",
        "pixels": f"{pixels / 1e9:.1f} GB/s; none between nodes, where one execution for all would send"
        f" {8 * moved / NODES / 1e9:.0f} Gbit/s into a node and out of it",
        "cores": f"{cores:.0f}; {cores / NODES:.0f} a node",
        "executions": f"a new one every {PIECES_AT_ONCE / tasks:.0f} s, after {PIECES_AT_ONCE:,} tasks",
    }
    print("| quantity | value |\n|---|---|")
    for name, value in lines.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
