"""Generator of docs/models.md: `python -m megaswift.bridge.families`."""

from pathlib import Path

from ..mapping.param_mapping import Family
from ..model.score_head import classifier_architectures
from . import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models

Generated from the registry by `python -m megaswift.bridge.families`; do not edit.

The `architectures` of a checkpoint's config.json select its family (its `model_type`, if there are none). Weights are
read from safetensors, by the names in the hub's checkpoints, and saved as a Hugging Face folder with the same names.

| `model_type` | `architectures` | Checkpoints | Layers | Split by |
|---|---|---|---|---|
"""

SUPPORT = """
The column of layers describes the family's default config; some checkpoints have more, or fewer.
`tests/bridge/families` compares each family with transformers: log-probabilities and gradients, in one process and in
these layouts.

## Layouts

TP (`--tensor_model_parallel_size`, with sequence parallelism), PP (`--pipeline_model_parallel_size`, virtual stages
too) and CP (`--context_parallel_size`) split every family, EP and ETP those with experts. Some sizes are limited:

- query heads and dense widths divide by TP, experts by EP, an expert's width by ETP; key heads may be fewer than TP;
- the key heads of gated delta nets divide by TP x CP, and so do the heads of Kimi delta attention and of lightning
  attention;
- on GPUs the kernels of gated delta nets, Kimi delta attention, lightning attention, Mamba-2 and short convolutions are
  those of flash-linear-attention (`pip install flash-linear-attention`), and of Mamba-2 that of mamba-ssm where it is
  installed; a run says which, and warns without them. In fp32 and with `--deterministic_mode true` plain PyTorch runs;
- documents with more tokens than a lightning indexer selects (`index_topk`) take attention in plain PyTorch, in chunks:
  right and bounded in memory, and no faster than attention to all keys; the others take the kernels of every model;
- lightning indexers learn with `--dsa_indexer_loss_coeff`, in every layout: the loss of a query is the divergence of
  the softmax of its indexer's scores from the layer's attention, summed over the heads, over all earlier keys or, with
  `--dsa_indexer_use_sparse_loss true`, over the selected ones. Its mean over the tokens and the layers with an indexer
  is logged as `indexer_loss`. Gradients of the other parameters stay the same. To train them alone, as before sparse
  training of DeepSeek-V3.2, add `--freeze_parameters_ratio 1 --trainable_parameters_regex indexer`: attention is dense
  for documents with no more than `index_topk` tokens, which config.json may raise;
- the layers of a GLM-5 that attend to the keys of an earlier layer are in one pipeline stage with it;
- the groups of Mamba-2 layers divide by TP x CP too, and of Granite 4 and Falcon-H1, which have one or two, eighths of
  them;
- the channels of short convolutions divide by TP x CP, in 16 groups;
- layers whose residual is a norm's output (minimax) keep the outputs of their norms under
  `--recompute_modules layernorm`;
- experts under TP train with sequence parallelism only (megatron-core's rule);
- layers with attention and MLP in parallel keep the output of their norm under `--recompute_modules layernorm`.

## Sequence classification

A model whose `architectures` end in ForSequenceClassification has `score.weight` in place of an output layer. All
features work as for language models, with the head replicated on every rank; a new head on a language model is random.
It is supported where transformers has such a class: {classifiers}.
Embeddings, and choices between tokens, need no head: every family has them.

## In vLLM

`tests/bridge/checkpoint/test_vllm_families.py` loads saved folders in vLLM's builds for CPUs, 0.26 and 0.32, whose
greedy tokens equal transformers' for qwen3, qwen3_moe and llama (`test_vllm.py`), seed_oss, olmo2, olmo3, smollm3,
apertus, arcee, cohere, cohere2, gemma, exaone4, exaone_moe, glm, glm4, glm4_moe, granite, granitemoe, granitemoeshared,
mixtral, nemotron, starcoder2, olmoe, qwen2_moe, dots1, phi3, lfm2, lfm2_moe, ernie4_5 without biases, granitemoehybrid
without Mamba-2, and qwen3_asr with audios (`tests/tasks/rollout`). Answers to images equal transformers' for
Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE, GLM-4.1V, InternVL with Qwen3 and Llama 4 (`test_vllm_vision.py`: exported folders
of equal tensors), and to images and audios for Qwen2.5-Omni and Qwen3-Omni (`tests/tasks/rollout/test_vllm_omni.py`).
With 0.32 so do deepseek_v2, deepseek_v3, glm4_moe_lite, granitemoehybrid and falcon_h1, and answers to images for
Mistral 3 and LLaVA 1.5. Others are untested; known are:

- the build of 0.26 has no latent attention (MLA) and no Mamba-2 (Granite 4, Falcon-H1, Nemotron-H): models with them
  are refused on CPUs. 0.32 has both, latent attention with `kv_lora_rank` 512 and `qk_rope_head_dim` 64 alone;
- neither has sparse attention (DeepSeek-V3.2, GLM-5), Kimi delta attention and Nemotron-H's experts without a gate,
  which are refused on CPUs. 0.26 has no experts with MiniMax-M2's scores, and gpt_oss not in float32;
- LFM2, LFM2-MoE and latent attention: the rotary kernel for CPUs (`rotary_embedding` in vLLM's
  csrc/cpu/pos_encoding.cpp, in both) leaves most heads unrotated, since they come in a dimension of their own; GPUs
  have another. `megatron` and `swift` switch it off there; for vLLM by itself set
  `--compilation-config '{{"custom_ops": ["-rotary_embedding"]}}'`;
- cohere2: vLLM 0.32 gives windows a token more than `sliding_window`, as its source says that Cohere does, and
  transformers and training do not. `megatron` and `swift` have it read one less, so that their engines have the windows
  of training; for vLLM by itself set `--hf-overrides '{{"sliding_window": 4095}}'` for 4096;
- MiniMax-Text-01 is refused on CPUs and GPUs: vLLM has no class for it after 0.23, and has transformers' layers run
  instead, where lightning attention keeps no states between steps and mixes the documents of a batch. 0.32 itself
  refuses these layers;
- ministral3: vLLM does not read `llama_4_scaling_beta`: numbers differ behind `original_max_position_embeddings`;
- gemma2: numbers of the build of 0.26 differ where scores are capped, and equal without caps;
- seed_oss with biases on outputs or in the MLP (no published model has them): vLLM leaves these out;
- cohere with an output layer of its own (likewise): vLLM takes tied ones alone;
- Mistral 3, LLaVA 1.5 and LLaVA-OneVision: vLLM 0.26 cannot import their classes beside transformers 5.17, which has no
  PixtralRotaryEmbedding. 0.32 makes other tokens of an image for LLaVA-OneVision than training, which ends a run, and
  wants the published names of the towers of both LLaVAs, not those that transformers saves;
- Ovis2 in transformers' naming: vLLM's class asks its processor for a method that it lacks;
- images of Gemma 3 are refused: the build of 0.26 lets their tokens attend from left to right alone, which gives the
  numbers of transformers without the images' token types; those of Gemma 4 too, which were not tried;
- thinkers of Omni models saved by themselves (`*_thinker`) are refused: vLLM has no class for them;
- GLM-4.1V: vLLM leaves out the biases of queries, keys and values unless config.json has `attention_bias`;
- Qwen3.5: neither build has gated delta nets in float32;
- qwen3_5_text and qwen3_5_moe_text without a tower (Qwen3_5ForCausalLM), and gemma4_text beside transformers 5.17: vLLM
  cannot read their config.json.

## Passthrough tensors

Some checkpoints hold parts that the model is built without: layers of multi-token prediction (DeepSeek-V3, GLM-4.5 to
4.7, ERNIE 4.5, MiniMax-M2, Qwen3-Next, Qwen3.5), the models that speak of Omni checkpoints (`talker`, `code2wav`,
`token2wav`), and vision and audio towers beside a model that is trained on text. Their tensors are copied from the
source into the saved checkpoint. Families with MTP in the table above can train these layers: `--mtp_num_layers`, with
pipeline parallelism and a vision tower beside `--language_model_only true`.
Families with a vision tower train on images: [multimodal.md](multimodal.md).

## Quantized weights

| config.json's `quantization_config` | |
|---|---|
| `quant_method: fp8` with `weight_block_size` | FP8 in blocks with scales (DeepSeek-V3, MiniMax-M2): any family |
| `quant_method: mxfp4` | MXFP4 (GPT-OSS): the experts |
| `quant_method: compressed-tensors` with `format: pack-quantized` | symmetric INT4 in groups (Kimi-K2-Thinking, K2.5) |

They are dequantized slice by slice while they are read, and saved in `--torch_dtype`, without `quantization_config`.

## Unsupported settings

A setting that cannot be expressed is an error that names it, since ignoring it would build another model.

"""

GENERAL = """
For every family:

- rope rules other than default, linear, llama3, yarn, longrope and proportional: dynamic scaling makes the rotation of
  a token depend on how long the sequence became around it, which has no meaning for packed documents;
- other quantizations (bitsandbytes, GPTQ, AWQ, other forms of compressed-tensors): they were made for inference, and
  differ from the trained weights;
- pickled weights (`pytorch_model.bin`): a pickle runs code when it is read. Save the model again as safetensors;
- architectures with code of their own (`trust_remote_code`);
- vision and audio towers of other architectures than those above.
"""


# Keys without a default in some of transformers' config classes, or with one that is not supported.
DEFAULTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 0,
}


# What all published models of a family set, where transformers' default is another kind of model.
SHOWN = {
    "lfm2": {"full_attn_idxs": [2]},
    "lfm2_moe": {"full_attn_idxs": [2]},
    "granitemoehybrid": {"layer_types": ["mamba"] * 31 + ["attention"]},
}


def page() -> str:
    """Return the text of docs/models.md."""
    classifiers = ", ".join(family.name for family in FAMILIES if family.name in classifier_architectures())
    limits = [f"- **{family.name}**: {'; '.join(family.limits)}\n" for family in FAMILIES if family.limits]
    return HEAD + "".join(map(_line, FAMILIES)) + SUPPORT.format(classifiers=classifiers) + "".join(limits) + GENERAL


def _line(family: Family) -> str:
    architecture = family.describe(
        {"architectures": list(family.architectures)} | DEFAULTS | SHOWN.get(family.name, {})
    )
    arguments, layers = architecture.transformer, architecture.layers
    attention = [layer for layer in layers if layer.has_attention]
    is_latent, has_experts = arguments.get("multi_latent_attention"), "num_moe_experts" in arguments
    scales = {architecture.embedding_scale, architecture.residual_scale, architecture.logits_scale}
    features = {
        "gated delta nets": any(layer.mixer == "gated_delta_net" for layer in layers),
        "Kimi delta attention": architecture.kimi_delta,
        "lightning attention": any(layer.mixer == "lightning_attention" for layer in layers),
        "Mamba-2": architecture.mamba,
        "short convolutions": architecture.short_conv,
        "latent attention (MLA)": is_latent,
        "a lightning indexer": architecture.sparse,
        "attention": not is_latent,
        "windows": any(layer.window for layer in attention),
        "chunks": any(layer.chunk for layer in attention),
        "layers without positions": any(layer.rope is None for layer in attention),
        "sinks": architecture.sinks,
        "capped scores": architecture.score_cap,
        "capped logits": architecture.logits_cap,
        "norms after each part": architecture.post_norms and architecture.pre_norms,
        "norms only after each part": architecture.post_norms and not architecture.pre_norms,
        "attention and MLP in parallel": architecture.parallel_block,
        "attention and Mamba-2 in parallel": any(layer.mixer == "attention_and_mamba" for layer in layers),
        "multipliers": scales != {1.0},
        "experts": has_experts,
        "a shared expert": arguments.get("moe_shared_expert_intermediate_size"),
        "MTP": family.mtp_mappings,
        "a vision tower": family.vision,
        "an audio tower": family.audio,
    }
    columns = (
        family.name,
        ", ".join(family.architectures),
        family.models,
        ", ".join(feature for feature, is_present in features.items() if is_present),
        "TP PP CP EP ETP" if has_experts else "TP PP CP",
    )
    return f"| {' | '.join(columns)} |\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
