"""torchrun --nproc-per-node 2 experiments/loops/with_lightning.py DATASET FOLDER: Lightning's Trainer, resumed."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

from vitray import Loader, Model, ViT

dataset, folder = sys.argv[1:]
rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)  # of the first weights
vit = ViT(Model(name="vit_u6x1_8", image_size=32, num_classes=10))
loader = Loader(dataset, batch=32, size=32, augment="three_augment", rank=rank, workers=workers)


class Classifier(lightning.LightningModule):
    def training_step(self, batch, _):
        return cross_entropy(self.vit(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


classifier = Classifier()
classifier.vit = vit
saving = ModelCheckpoint(folder, every_n_train_steps=16, save_last=True)  # with the loader's state
# In steps: resumed twice from the end of an epoch, Lightning counts an epoch too few.
length = {"max_epochs": -1, "max_steps": 3 * len(loader)}
trainer = lightning.Trainer(accelerator="cpu", devices=workers, logger=False, callbacks=[saving], **length)
trainer.fit(classifier, loader, ckpt_path="last")
