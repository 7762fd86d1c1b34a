"""Score head in place of the output layer, for any family: transformers' ...ForSequenceClassification."""

from collections.abc import Callable
from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import OUTPUT, OUTPUT_BIAS, REPLICATED, Family, ParamMapping

SUFFIX = "ForSequenceClassification"
SCORE = ParamMapping("score.weight", OUTPUT.name, REPLICATED)


def count_labels(hf_config: HfConfig) -> int | None:
    """Return the number of labels of the score head in a raw config.json, None for a language model."""
    names = hf_config.get("architectures") or [""]
    if not names[0].endswith(SUFFIX):
        return None
    return len(hf_config.get("id2label") or ()) or hf_config.get("num_labels") or 2


def make_classifier(family: Family, labels: int) -> Family:
    """Return `family` with a score head in place of the output layer."""

    def architecture(config: HfConfig) -> Architecture:
        return replace(family.architecture(config), num_labels=labels, tied=False, logits_bias=False)

    def mappings(config: HfConfig) -> list[ParamMapping]:
        mappings = [mapping for mapping in family.mappings(config) if mapping.mcore != OUTPUT_BIAS.name]
        return [SCORE if mapping.mcore == OUTPUT.name else mapping for mapping in mappings]

    def keep_score(spell: Callable[[str], str]) -> Callable[[str], str]:
        return lambda name: name if name == SCORE.hf else spell(name)

    return replace(
        family,
        architecture=architecture,
        mappings=mappings,
        mtp_mappings=None,
        vlm_names=tuple(map(keep_score, family.vlm_names)),
    )
