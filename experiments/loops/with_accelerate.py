"""torchrun --nproc-per-node 2 experiments/loops/with_accelerate.py DATASET FOLDER: a loop of Accelerate, resumed."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.nn.functional import cross_entropy

from vitray import Loader, Model, ViT

dataset, folder = sys.argv[1:]
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=project)
loader = Loader(dataset, batch=32, size=32, augment="three_augment", device=accelerator.device)  # not prepared
torch.manual_seed(0)  # of the first weights
vit = ViT(Model(name="vit_u6x1_8", image_size=32, num_classes=len(loader.classes)))
model, optimizer = accelerator.prepare(vit, torch.optim.AdamW(vit.parameters(), 1e-3))
accelerator.register_for_checkpointing(loader)
if saved := [int(path.name.split("_")[1]) for path in Path(folder).glob("checkpoints/*")]:
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_{max(saved)}")
    project.iteration = max(saved) + 1
while loader.epoch < 3:
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(images), labels))
        optimizer.step()
        if loader.step % 16 == 0:
            accelerator.save_state()
