"""The inside of a network, as arrays: a network and a batch of normalised images in, values out. Needs torch alone."""

from vitray.inspection.attention_distance import AttentionSpread as AttentionSpread
from vitray.inspection.attention_distance import attention_distances as attention_distances
from vitray.inspection.rollout import AttentionMaps as AttentionMaps
from vitray.inspection.rollout import attention_maps as attention_maps
from vitray.inspection.rollout import gradient_rollout as gradient_rollout
