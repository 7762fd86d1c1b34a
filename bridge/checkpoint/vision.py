"""Vision and audio towers in checkpoints of either format."""

from pathlib import Path

from ..families import family_of
from ..families.vlm_text import is_of_tower
from ..mapping.architecture import HfConfig
from .distributed import has_mcore_tower, read_distributed_settings
from .hub import ADAPTER_WEIGHTS, has_weights, is_mcore_checkpoint
from .passthrough import FOLDER
from .safetensors_io import SafetensorsFolder, tensor_names

# A tower has one of these.
FIRST_TENSORS = (
    "audio_tower.conv1.weight",
    "audio_tower.conv2d1.weight",
    "visual.patch_embed.proj.weight",
    "vision_tower.patch_conv.weight",
    "vision_tower.patch_embed.proj.weight",
    "vision_tower.embeddings.patch_embedding.weight",
    "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "vision_tower.embeddings.patch_embeddings.projection.weight",
    "vision_tower.transformer.embeddings.patch_embedding.weight",
    "vision_model.patch_embedding.linear.weight",
    "vision_model.embeddings.patch_embedding.weight",
    "vision_tower.patch_embedder.input_proj.weight",
    "vision_embedder.patch_dense.weight",
)


def has_tower(folder: Path, hf_config: HfConfig) -> bool:
    """Return whether the model in `folder` has a vision tower that can be built, and its weights."""
    if not family_of(hf_config).has_tower(hf_config):
        return False
    if not has_weights(folder) and is_mcore_checkpoint(folder):
        if has_mcore_tower(folder):
            return True
        folder = folder / FOLDER
    return has_weights(folder) and any(name.endswith(FIRST_TENSORS) for name in tensor_names(folder))


def needs_tower(folder: Path) -> bool:
    """Return whether the model in `folder` cannot be read without its vision tower: in megatron-core's format."""
    return not has_weights(folder) and is_mcore_checkpoint(folder) and has_mcore_tower(folder)


def adapts_tower(adapter: Path) -> bool:
    """Return whether an adapter of either format changes a vision tower."""
    if (adapter / ADAPTER_WEIGHTS).is_file():
        modules = list(SafetensorsFolder(adapter).tensors)
    else:
        modules = list(read_distributed_settings(adapter).targets)
    return any(map(is_of_tower, modules))
