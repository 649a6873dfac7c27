"""From encoded bytes to a training batch: decoding, augmentation of one image, mixing of a batch, and a look at them.

Knows torch, torchvision, numpy and Pillow, and neither Ray nor shards. Whatever is random is a function of its key:
(seed, epoch, image, copy) for an image, (seed, step, position in the global batch) for a batch.
"""

from vitray.augment.batch import Rows as Rows
from vitray.augment.batch import normalised as normalised
from vitray.augment.batch import prepare_batch as prepare_batch
from vitray.augment.decode import UndecodableImage as UndecodableImage
from vitray.augment.decode import decode_image as decode_image
from vitray.augment.draws import generator as generator
from vitray.augment.look import Sample as Sample
from vitray.augment.look import contact_sheet as contact_sheet
from vitray.augment.sample import augment_image as augment_image
from vitray.augment.sample import crop_centre as crop_centre
