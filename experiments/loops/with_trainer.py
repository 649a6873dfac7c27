"""torchrun --nproc-per-node 2 experiments/loops/with_trainer.py DATASET FOLDER: Hugging Face's Trainer, resumed."""

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from vitray import Loader, Model, ViT

dataset, folder = sys.argv[1:]
settings = {"save_strategy": "steps", "save_steps": 16, "save_total_limit": 3, "num_train_epochs": 3, "use_cpu": True}
arguments = TrainingArguments(folder, ignore_data_skip=True, learning_rate=1e-3, report_to=[], **settings)
loader = Loader(dataset, batch=32, size=32, augment="three_augment")
torch.manual_seed(0)  # of the first weights
vit = ViT(Model(name="vit_u6x1_8", image_size=32, num_classes=len(loader.classes)))


class Resume(TrainerCallback):
    def on_train_begin(self, arguments, state, control, **_):
        loader.seek(state.global_step)


class ImageTrainer(Trainer):
    def get_train_dataloader(self):
        return loader

    def compute_loss(self, model, batch, **_):
        return cross_entropy(model(batch[0]), batch[1])


trainer = ImageTrainer(vit, arguments, callbacks=[Resume()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
