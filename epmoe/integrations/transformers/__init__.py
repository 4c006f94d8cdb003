"""Models of `transformers` with their experts spread over ranks: `parallelize(model, ep)`, `from_pretrained(path, ep)`.

Needs the extra: `pip install "epmoe[transformers]"`. Everything but the MoE experts stays the model's own. Decoding in
CUDA graphs is `decode.Decoder`, whose module imports `transformers`; what is here does so when it is called.
"""

from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.load import from_pretrained
from epmoe.integrations.transformers.parallelize import parallelize, routed_experts, unparallelize
from epmoe.integrations.transformers.presets import PRESETS, DiskNames, ExpertTensors, Preset
from epmoe.integrations.transformers.registry import register
from epmoe.integrations.transformers.save import save_pretrained

__all__ = [
    "PRESETS",
    "DiskNames",
    "ExpertTensors",
    "Preset",
    "RoutedExperts",
    "from_pretrained",
    "parallelize",
    "register",
    "routed_experts",
    "save_pretrained",
    "unparallelize",
]
