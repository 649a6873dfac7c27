"""torchrun --nproc-per-node 2 experiments/loops/with_timm.py TRAIN.PY DATASET FOLDER: timm's own train.py, resumed.

It reads the splits train and val of a dataset of `vitray shard`, and resumes after the last epoch, as it does itself.
"""

import os
import runpy
import sys

import timm.data

from vitray import Loader

script, dataset, folder = sys.argv[1:]


def create_dataset(name, root, split, is_training, **_):
    loader = Loader(root, split=split, batch=32, size=32, augment="three_augment" if is_training else None)
    loader.dataset, loader.batch_sampler, loader.sampler = loader, None, None  # train.py tells them the epoch
    return loader


timm.data.create_dataset, timm.data.create_loader = create_dataset, lambda loader, **_: loader
last = f"{folder}/run/last.pth.tar"
words = f"--data-dir {dataset} --val-split val --model test_vit --img-size 32 --num-classes 10 --device cpu --opt adamw"
words += f" --lr 1e-3 --epochs 3 --no-prefetcher --batch-size 32 --output {folder} --experiment run"
sys.argv = [script, *words.split(), *(["--resume", last] if os.path.exists(last) else [])]
runpy.run_path(script, run_name="__main__")
