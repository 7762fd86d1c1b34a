"""Rewards of ROLL's domains, and the data of these."""

import re
from pathlib import PurePath

from ..flags import OptionValue
from .keys import Keys
from .translation import Translation

RULES = {  # class of a worker -> rule of --reward_funcs by_source
    "MathRuleRewardWorker": "math",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "GeneralRuleRewardWorker": "ifeval",
    "CodeSandboxRewardWorker": "code",
    "LLMJudgeRewardWorker": "judge",
}
DEFAULT_DOMAIN = "math_rule"  # a row's domain where none includes its tag
JUDGE_PROMPTS = ("Qwen2.5-7B-Instruct-RLVR-prompt",)  # ask for YES or NO, as --judge_prompt does by default
SHORTEST = 4  # letters of a tag's first word that may be anywhere in the name of a file
RULE_KEYS = {  # keys of one rule -> (the rule, the only value, why)
    "reward_type": ("crossthinkqa", "soft", "Set soft"),
    "response_length_penalty_coef": ("crossthinkqa", 0, "Add --reward_funcs soft_overlong, and set 0"),
    "use_local": ("code", True, "Programs run in a sandbox here. Set true"),
}


def set_rewards(keys: Keys, translation: Translation) -> list[str]:
    """Set the rule of each source. Return the domains."""
    domains = keys.names("rewards")
    rules: dict[str, str] = {}
    for domain in domains:
        rule = _rule(keys, translation, domain)
        _set_details(keys.view(f"rewards.{domain}"), translation, rule)
        for tag in keys.items(f"rewards.{domain}.tag_included"):
            if rule:
                rules[str(tag)] = rule
        if rule and domain == DEFAULT_DOMAIN:
            rules["*"] = rule
    if not domains:
        text = "rewards: missing. Add the tables of one or more domains, such as math_rule, or set --reward_funcs"
        translation.needed_flags["reward_funcs"] = text
        return domains
    default = rules.pop("*", None)
    if default:
        rules["*"] = default  # patterns go in order: the last of all
    source = ", ".join(keys.source(f"rewards.{domain}.tag_included") for domain in domains)
    translation.set("reward_funcs", ["by_source"], keys.source("rewards"))
    translation.set("source_rules", dict[str, OptionValue](rules), source)
    if len(domains) > 1 and translation.flags.get("whiten_advantages"):
        text = "the advantages of all domains together are whitened; ROLL whitens those of each"
        translation.note(keys, "whiten_advantages", text)
    return domains


def _rule(keys: Keys, translation: Translation, domain: str) -> str | None:
    key = f"rewards.{domain}.worker_cls"
    if key not in keys:
        translation.refused.append(f"{key}: missing. Set the class of a reward worker")
        return None
    name = keys.text(key, "").rpartition(".")[2]
    if name not in RULES:
        rules = ", ".join(RULES)
        translation.refuse(keys, key, f"its rule is not known. Set one of {rules}, or write a reward (docs/grpo.md)")
        return None
    if RULES[name] == "ifeval":
        translation.note(keys, key, "the rule is IFEval's alone; ROLL's also takes up to 0.5 off for repetitions")
    return RULES[name]


def _set_details(view: Keys, translation: Translation, rule: str | None) -> None:
    """Take the settings of a domain's rule."""
    for name, (owner, value, fix) in RULE_KEYS.items():
        if name not in view:
            continue
        value_of_domain = view.take(name)
        if rule != owner or value_of_domain == value:
            translation.ignore(view, name, "as the rule does" if rule == owner else f"read by the rule {owner} alone")
        else:
            translation.refuse(view, name, f"not supported. {fix}")
    _set_judge(view, translation, is_judge=rule == "judge")
    kind = view.text("query_filter_config.type", "no_filter")
    arguments = view.under("query_filter_config.filter_args")
    threshold = "query_filter_config.filter_args.std_threshold"
    if kind == "std_filter" and view.number(threshold, -1.0) == 0:
        translation.set("dynamic_sample", True, view.source("query_filter_config.type"))
    elif kind != "no_filter":
        text = "only std_filter with std_threshold 0 is supported. Set it, or difficulty_mask=true with its thresholds"
        translation.refuse(view, "query_filter_config.type", text)
    elif "query_filter_config.type" in view:
        translation.ignore(view, "query_filter_config.type", "no prompt is replaced")
    for key in arguments:
        if kind != "std_filter" or key != threshold:
            translation.ignore(view, key, f"of {kind}")


def _set_judge(view: Keys, translation: Translation, *, is_judge: bool) -> None:
    names = ("judge_prompt", "judge_model_type", "judge_api_url", "judge_model_name")
    if not is_judge:
        for name in names:
            if name in view:
                translation.ignore(view, name, "read by the judge alone")
        return
    prompt = view.text("judge_prompt")
    if prompt in JUDGE_PROMPTS:
        translation.ignore(view, "judge_prompt", "asks for YES or NO, as --judge_prompt does by default")
    elif prompt:
        translation.refuse(view, "judge_prompt", "not a prompt of ROLL's. Remove it, and set --judge_prompt")
    kind = view.text("judge_model_type")
    if kind == "api":
        for name, flag in (("judge_api_url", "judge_server"), ("judge_model_name", "judge_model")):
            if name in view:
                translation.set(flag, view.take(name), view.source(name))
    elif kind not in (None, "inference"):
        translation.refuse(view, "judge_model_type", "choose one of api, inference")
    for name in ("judge_model_type", "judge_api_url", "judge_model_name"):
        if name in view and name not in ("judge_api_url", "judge_model_name"):
            translation.ignore(view, name, "the judge is behind a server")
        elif name in view and kind != "api":
            translation.ignore(view, name, "read with judge_model_type api alone")
    if "judge_server" not in translation.flags:
        model = view.peek("model_args.model_name_or_path") or "the judge's model"
        translation.needed_flags["judge_server"] = (
            f"{view.full('')[:-1]}: a judge is behind a server here. Serve {model}, and set --judge_server URL"
        )


def set_domains(keys: Keys, translation: Translation, role: str, domains: list[str]) -> None:
    """Set the share of each domain in a generation: the probability of the file that is named as the domain.

    domains: those with rewards; []: any
    """
    key = f"{role}.data_args.domain_interleave_probs"
    shares = {name: keys.number(f"{key}.{name}", 0.0) for name in keys.names(key)}
    unknown = [name for name in shares if domains and name not in domains]
    for name in unknown:
        translation.refuse(keys, f"{key}.{name}", f"there is no rewards.{name}. Add it, or remove this")
    if unknown:
        return
    files = translation.flags.get("dataset")
    paths = [str(path) for path in files] if isinstance(files, list) else []
    if len(shares) <= 1:
        for name in shares:
            translation.ignore(keys, f"{key}.{name}", "all rows are of one domain")
        return
    tags = {name: [str(tag) for tag in keys.items(f"rewards.{name}.tag_included")] for name in shares}
    matches = [[name for name in shares if _is_of(path, name, tags[name])] for path in paths]
    if any(len(names) != 1 for names in matches) or {name for names in matches for name in names} != set(shares):
        text = (
            f"no share can be given to files that are not named after one domain each ({', '.join(shares)}). Name "
            "them so, or set --interleave_prob, and remove it"
        )
        for name in shares:
            translation.refuse(keys, f"{key}.{name}", text)
        return
    counts = {name: sum(names == [name] for names in matches) for name in shares}
    shares_of_files = [shares[names[0]] / counts[names[0]] for names in matches]
    total = sum(shares_of_files)
    source = (
        f"{keys.source(key)} of {', '.join(f'{PurePath(p).name}: {n[0]}' for p, n in zip(paths, matches, strict=True))}"
    )
    translation.set("interleave_prob", [round(share / total, 12) for share in shares_of_files], source)
    translation.set("stopping_strategy", "all_exhausted", f"{keys.source(key)}: each domain begins anew at its end")


def ignore_domains(keys: Keys, translation: Translation, role: str) -> None:
    """Take the shares of domains in a pipeline that does not read them."""
    for key in keys.under(f"{role}.data_args.domain_interleave_probs"):
        translation.ignore(keys, key, "read with rewards alone")


def _is_of(path: str, domain: str, tags: list[str]) -> bool:
    """Return whether a file is named after a domain: its name or its first word, or one of its tags or their words."""
    stem = PurePath(path).stem.lower()
    name, words = _letters(stem), re.split(r"[^a-z0-9]+", stem)
    texts = [domain, *tags, *(_first_word(tag) for tag in tags if len(_first_word(tag)) >= SHORTEST)]
    return _first_word(domain) in words or any(_letters(text) in name for text in texts if _letters(text))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _first_word(text: str) -> str:
    return re.split(r"[^a-z]", text.lower())[0]
