"""Encoded bytes to a training batch: decoding, augmentation of images, mixing of batches, contact sheets.

Knows torch, torchvision, numpy and Pillow, but neither Ray nor shards. Every draw is a function of its key:
(seed, epoch, image, copy) for an image, (seed, step, position in the global batch) for a batch.
"""
