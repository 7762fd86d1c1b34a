"""Write docs/models.md from the registry: `python -m megaswift.bridge.families`."""

from pathlib import Path

from ..mapping.param_mapping import Family
from ..model.score_head import architectures
from . import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models

Made from the registry by `python -m megaswift.bridge.families`; do not edit.

The `architectures` of a checkpoint's config.json decide which family reads it (its `model_type`, where it names none).
Weights are read from safetensors, by the names that the hub's checkpoints have, and written back as a Hugging Face
folder under the names that came in.

| `model_type` | `architectures` | Checkpoints | Layers | Split by |
|---|---|---|---|---|
"""

SUPPORT = """
Layers are those of the family's default config; some of its checkpoints have more, or fewer. `tests/bridge/families`
compares each family with transformers: log-probabilities and gradients, in one process and in these layouts.

## Layouts

TP (`--tensor_model_parallel_size`, with sequence parallelism), PP (`--pipeline_model_parallel_size`, virtual stages
too) and CP (`--context_parallel_size`) split every family, EP and ETP those with experts. Some sizes have a bound:

- query heads and dense widths divide by TP, experts by EP, an expert's width by ETP; key heads may be fewer than TP;
- the key heads of gated delta nets divide by TP x CP;
- experts under TP train with sequence parallelism only (megatron-core's rule).

## Heads that score documents

A model whose `architectures` end in ForSequenceClassification has `score.weight` in the place of an output layer. It is
read, trained, split, saved and adapted as the others are, with the head whole on every rank; a head that begins beside
a language model is random. transformers has such classes, and so have we, for {able}.
Embeddings, and choices between tokens, need no head: every family has them.

## What goes along

Some checkpoints hold parts that no family builds, or that were not asked for: layers of multi-token prediction
(DeepSeek-V3, GLM-4.5, ERNIE 4.5, MiniMax-M2, Qwen3-Next, Qwen3.5), and vision towers beside a text model that is
trained. Their tensors are copied from the source into what is saved. Families with MTP in the table above can train
these layers: `--mtp_num_layers`.

## Weights that come in quantised

| config.json's `quantization_config` | |
|---|---|
| `quant_method: fp8` with `weight_block_size` | FP8 in blocks with scales (DeepSeek-V3, MiniMax-M2): any family |
| `quant_method: mxfp4` | MXFP4 (GPT-OSS): the experts |

They are unquantised slice by slice while they are read, and go out in `--torch_dtype`, without `quantization_config`.

## What is not taken

A setting that cannot be expressed is refused by name, since a model that differs in one is another model.

"""

EVERYWHERE = """
And of every family:

- rope rules other than default, linear, llama3, yarn and longrope: dynamic scaling makes the rotation of a token depend
  on how long the sequence became around it, which has no meaning for packed documents;
- weights quantised in other ways (bitsandbytes, GPTQ, AWQ): they were made for inference, and are not what was trained;
- pickled weights (`pytorch_model.bin`): a pickle runs code when it is read. Save the model again as safetensors;
- architectures with code of their own (`trust_remote_code`): what they compute is not known here;
- vision and audio towers: no checkpoint's is trained, and only those of the architectures above go along.
"""


# What transformers' config classes of some families have no default for.
WITHOUT_DEFAULTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}


def page() -> str:
    """The page's text."""
    able = ", ".join(family.name for family in FAMILIES if family.name in architectures())
    refused = [f"- **{family.name}**: {'; '.join(family.limits)}\n" for family in FAMILIES if family.limits]
    return HEAD + "".join(map(_line, FAMILIES)) + SUPPORT.format(able=able) + "".join(refused) + EVERYWHERE


def _line(family: Family) -> str:
    config = {"architectures": list(family.architectures)} | WITHOUT_DEFAULTS
    about = family.describe(config)
    settings, attention = about.transformer, [layer for layer in about.layers if layer.mixer == "attention"]
    latent, experts = settings.get("multi_latent_attention"), "num_moe_experts" in settings
    facts = {
        "gated delta nets": len(attention) < len(about.layers),
        "latent attention (MLA)": latent,
        "attention": not latent,
        "windows": any(layer.window for layer in attention),
        "chunks": any(layer.chunk for layer in attention),
        "layers without positions": any(layer.rope is None for layer in attention),
        "sinks": about.sinks,
        "norms after each part": about.post_norms,
        "multipliers": {about.embedding_scale, about.residual_scale, about.logits_scale} != {1.0},
        "experts": experts,
        "a shared expert": settings.get("moe_shared_expert_intermediate_size"),
        "MTP": family.predicting_rows,
    }
    columns = (
        family.name,
        ", ".join(family.architectures),
        family.models,
        ", ".join(fact for fact, holds in facts.items() if holds),
        "TP PP CP EP ETP" if experts else "TP PP CP",
    )
    return f"| {' | '.join(columns)} |\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
