"""Adapters of vision-language models beside PEFT's: on the language model, on the tower, and beside whole mergers."""

import json
import math

import pytest
import torch
from megaswift.bridge.layers.vision_tower import VISION_MODULES

from tests.bridge.vision import FAMILIES, LAYOUTS
from tests.torchrun import torchrun

ALL = {"freeze_vit": False, "freeze_aligner": False}
NOT_IN_GLM = "pixel_norm", "class_token", "embedding_norm"
EMBEDDER_MODULES = "pixel_norm", "patch_embed", "patch_norm", "position_embeddings", "embedding_norm", "merger"
CLASS_TOKEN_MODULES = "patch_embed", "class_token", "position_embeddings", "layers", "merger"
CASES = {
    "language model": ("qwen3_vl", {"vision": {}}, "TP2 SP"),
    "all": ("qwen3_vl", {"vision": ALL}, "TP2 SP"),
    "tower alone": ("qwen2_5_vl", {"vision": ALL | {"freeze_llm": True}}, "CP2"),
    "names": ("qwen2_5_vl", {"vision": ALL, "settings": {"target_modules": ["qkv", "q_proj"]}}, "CP2"),
    "whole mergers": ("qwen3_vl", {"vision": {}, "whole": ["vision.merger", "vision.deep_mergers"]}, "TP2 SP"),
    "whole tower": (
        "qwen2_5_vl",
        {"vision": {}, "whole": ["vision.patch_embed", "vision.layers", "vision.merger"]},
        "CP2",
    ),
    "gated merger": ("glm4v", {"vision": ALL}, "CP2"),
    "projector": ("mistral3", {"vision": ALL}, "TP2 SP"),
    "whole projector": ("ministral3", {"vision": {}, "whole": ["vision.merger"]}, "CP2"),
    "tower with class tokens": ("internvl_qwen3", {"vision": ALL}, "TP2 SP"),
    "whole tower with class tokens": (
        "internvl_qwen3",
        {"vision": {}, "whole": [f"vision.{module}" for module in CLASS_TOKEN_MODULES]},
        "CP2",
    ),
    "whole tower behind norms": (
        "glm4v",
        {"vision": {}, "whole": [f"vision.{module}" for module in VISION_MODULES if module not in NOT_IN_GLM]},
        "TP2 SP",
    ),
    "pooled squares": ("gemma3", {"vision": ALL}, "TP2 SP"),
    "beside norms of heads": ("gemma4", {"vision": {}}, "CP2"),
    "norms of heads": ("gemma4", {"vision": ALL}, "TP2 SP"),
    "whole tower with norms of heads": (
        "gemma4",
        {
            "vision": {},
            "whole": [f"vision.{module}" for module in ("patch_embed", "position_embeddings", "layers", "merger")],
        },
        "CP2",
    ),
    "embedded patches": ("gemma4_unified", {"vision": ALL}, "TP2 SP"),
    "all of embedded patches": (
        "gemma4_unified",
        {"vision": {}, "whole": [f"vision.{module}" for module in EMBEDDER_MODULES]},
        "CP2",
    ),
    "whole projection": ("gemma3", {"vision": {}, "whole": ["vision.merger"]}, "CP2"),
    "crops": ("llava", {"vision": ALL}, "CP2"),
    "whole tower with a norm of embeddings": (
        "llava",
        {"vision": {}, "whole": [f"vision.{module}" for module in (*CLASS_TOKEN_MODULES, "embedding_norm")]},
        "TP2 SP",
    ),
    "features put together": ("llava_onevision", {"vision": ALL}, "CP2"),
    "whole tower and visual words": (
        "ovis2",
        {
            "vision": {},
            "whole": [
                f"vision.{module}"
                for module in ("patch_embed", "patch_norm", "position_embeddings", "layers", "final_norm", "merger")
            ],
        },
        "CP2",
    ),
    "whole tower that clips": ("gemma4_elastic", {"vision": {}, "whole": ["vision.layers"]}, "CP2"),
    "merger of a tower that clips": ("gemma4_elastic", {"vision": ALL}, "TP2 SP"),
    "visual words": ("ovis2", {"vision": ALL}, "TP2 SP"),
    "beside MoonViT": ("kimi_k25", {"vision": {}}, "TP2 SP EP2"),
    "MLP of squares": ("llama4", {"vision": ALL}, "TP2 SP"),
    "whole tower with an MLP of squares": (
        "llama4",
        {
            "vision": {},
            "whole": [
                f"vision.{module}"
                for module in (*CLASS_TOKEN_MODULES, "embedding_norm", "final_norm", "downsample")
            ],
        },
        "TP2 SP EP2",
    ),
}  # fmt: skip
pytestmark = pytest.mark.slow


LONG = "projector", "whole projector", "tower with class tokens", "pooled squares", "whole projection", "crops"
LONG += (
    "whole tower that clips",
    "whole tower with a norm of embeddings",
    "beside MoonViT",
    "features put together",
    "visual words",
    "whole tower and visual words",
    "MLP of squares",
    "beside norms of heads",
    "embedded patches",
    "all of embedded patches",
    "whole tower with norms of heads",
    "whole tower with an MLP of squares",
)


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def test_peft_gives_the_same_loss(case, tmp_path_factory):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    from tests.bridge.vision import reference

    torch.set_num_threads(1)
    family, job, layout = CASES[case]
    folder = tmp_path_factory.mktemp("vision-lora")
    reference.make(folder, family)
    job = job | {"layout": LAYOUTS[2][layout]}
    done = torchrun("tests.bridge.vision.lora_worker", folder, json.dumps(job), processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, loaded = json.loads((folder / "loss.json").read_text())
    model = AutoModelForImageTextToText.from_pretrained(folder / "fp32", dtype=torch.float32).eval()
    packs = torch.load(folder / "reference.pt", weights_only=False)["packs"]
    before = reference.mean_loss(model, packs)
    after = reference.mean_loss(PeftModel.from_pretrained(model, folder / "adapter"), packs)
    assert abs(after - before) > 1e-3
    assert math.isclose(trained, after, rel_tol=1e-5)
    assert math.isclose(loaded, after, rel_tol=1e-5)


def test_a_parameter_of_no_module_is_not_trained_whole() -> None:
    """LLaVA-OneVision's `image_newline`."""
    from megaswift.bridge.families import family_of
    from megaswift.bridge.lora.adapter_mapping import plan_adapters
    from megaswift.bridge.lora.settings import LoraSettings
    from megaswift.bridge.mapping.param_mapping import expand_mappings
    from megaswift.bridge.options import LoraOptions

    config = FAMILIES["llava_onevision"]().to_dict()
    config |= {"architectures": ["LlavaOnevisionForConditionalGeneration"]}
    family = family_of(config)
    about = family.describe(config, vision=True)
    settings = LoraSettings.from_options(LoraOptions(modules_to_save=("vision.merger",)))
    with pytest.raises(ValueError, match="image_newline is a parameter of no module"):
        plan_adapters(expand_mappings(family, config, about), settings, about)
