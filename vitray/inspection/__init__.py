"""The inside of a network, as arrays: a network and a batch of normalised images in, values out. Needs torch alone."""

from vitray.inspection.attention_distance import AttentionSpread as AttentionSpread
from vitray.inspection.attention_distance import attention_distances as attention_distances
from vitray.inspection.branches import BranchReport as BranchReport
from vitray.inspection.branches import branch_report as branch_report
from vitray.inspection.branches import branch_sums as branch_sums
from vitray.inspection.branches import compare_branches as compare_branches
from vitray.inspection.changes import FeatureChange as FeatureChange
from vitray.inspection.changes import TensorChange as TensorChange
from vitray.inspection.changes import feature_changes as feature_changes
from vitray.inspection.changes import tensor_changes as tensor_changes
from vitray.inspection.filters import StemFilters as StemFilters
from vitray.inspection.filters import stem_filters as stem_filters
from vitray.inspection.positions import position_similarity as position_similarity
from vitray.inspection.rollout import AttentionMaps as AttentionMaps
from vitray.inspection.rollout import attention_maps as attention_maps
from vitray.inspection.rollout import gradient_rollout as gradient_rollout
from vitray.inspection.similarity import cka as cka
from vitray.inspection.similarity import level_grams as level_grams
from vitray.inspection.tensors import LayerScale as LayerScale
from vitray.inspection.tensors import Spectrum as Spectrum
from vitray.inspection.tensors import layerscales as layerscales
from vitray.inspection.tensors import spectra as spectra
from vitray.inspection.tokens import TokenNorms as TokenNorms
from vitray.inspection.tokens import join_token_norms as join_token_norms
from vitray.inspection.tokens import token_norms as token_norms
