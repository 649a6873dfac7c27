"""From encoded bytes to a training batch: decoding, augmentation of one image, mixing of a batch, and a look at them.

Knows torch, torchvision, numpy and Pillow, and neither Ray nor shards. Whatever is random is a function of its key:
(seed, epoch, image, copy) for an image, (seed, step, position in the global batch) for a batch.
"""
