"""torchrun --nproc-per-node 2 experiments/loops/torch_ddp.py DATASET FOLDER: a loop of plain torch, resumed."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from vitray import Loader, Model, ViT

dataset, last = sys.argv[1], f"{sys.argv[2]}/last.pt"
dist.init_process_group("gloo")
torch.manual_seed(0)  # of the first weights
loader = Loader(dataset, batch=32, size=32, augment="three_augment")  # its share of each batch, by the process group
vit = ViT(Model(name="vit_u6x1_8", image_size=32, num_classes=len(loader.classes)))
model, optimizer = DistributedDataParallel(vit), torch.optim.AdamW(vit.parameters(), 1e-3)
parts = {"vit": vit, "optimizer": optimizer, "loader": loader}
if os.path.exists(last):
    for name, state in torch.load(last, weights_only=True).items():
        parts[name].load_state_dict(state)
while loader.epoch < 3:
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        if loader.step % 16 == 0 and dist.get_rank() == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{last}.new")
            os.replace(f"{last}.new", last)
