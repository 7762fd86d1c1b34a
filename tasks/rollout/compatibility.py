"""Checks that a run and a rollout server are compatible."""

from collections.abc import Sequence

from ...bridge.option_groups import flag_value

TURN_FLAGS = ("multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env")


def turn_flags(options: object) -> list[str]:
    """Return the flags of multi-turn episodes that are set, as text."""
    values = {name: flag_value(options, name, None) for name in TURN_FLAGS}
    return [f"--{name} {str(value).lower() if value is True else value}" for name, value in values.items() if value]


def turn_mismatch(run_flags: Sequence[str], server_flags: Sequence[str]) -> str | None:
    """Return which flags of multi-turn episodes a server has and a run has not, or None."""
    missing = [flag for flag in server_flags if flag not in run_flags]
    if not missing:
        return None
    return (
        f"it was started with {' '.join(missing)}, and the run was not. The run plays the turns. Set the flags, and "
        "--external_plugins, for the run, too, or start the server without them"
    )


def adapter_mismatch(rank: int, max_rank: int) -> str | None:
    """Return why a server with adapters up to `max_rank` cannot load those of `rank`, or None. 0: full weights."""
    if rank and not max_rank:
        return (
            "it takes full weights, not adapters. Start it with vLLM and --vllm_enable_lora true --vllm_max_lora_rank "
            f"{rank}, or remove --vllm_enable_lora from the training"
        )
    if max_rank and not rank:
        return (
            "it was started with --vllm_enable_lora true and takes only adapters. Set it for the training too (with "
            "--tuner_type lora), or start the server without it"
        )
    if rank > max_rank:
        return f"its adapters have at most rank {max_rank}, not {rank}. Start it with --vllm_max_lora_rank {rank}"
    return None


def vocab_mismatch(size: int | None, server_size: int | None) -> str | None:
    """Return how the vocabulary sizes of both models differ; None if they are equal or unknown."""
    if size is None or server_size is None or size == server_size:
        return None
    return (
        f"its model has a vocabulary of {server_size} tokens, and the trained one has {size}. Set the same --model for "
        "`swift rollout` and the run"
    )


def images_mismatch(images: int, most_images: int | None) -> str | None:
    """Return why a server cannot take prompts of `images` images, or None. most_images: of the server; None: any"""
    if most_images is None or images <= most_images:
        return None
    if not most_images:
        return "its model takes no images, and the run's data has some. Start it with a model that does"
    return (
        f"it takes {most_images} images in a prompt, and the run's data has {images}. Start it with another "
        "--vllm_limit_mm_per_prompt"
    )


def audios_mismatch(audios: int, most_audios: int | None) -> str | None:
    """Return why a server cannot take prompts of `audios` audios, or None. most_audios: of the server; None: any"""
    if most_audios is None or audios <= most_audios:
        return None
    if not most_audios:
        return "its model takes no audios, and the run's data has some. Start it with a model that does"
    return (
        f"it takes {most_audios} audios in a prompt, and the run's data has {audios}. Start it with another "
        "--vllm_limit_mm_per_prompt"
    )


def videos_mismatch(videos: int, most_videos: int | None) -> str | None:
    """Return why a server cannot take prompts of `videos` videos, or None. most_videos: of the server; None: any"""
    if most_videos is None or videos <= most_videos:
        return None
    return (
        f"it takes {most_videos or 'no'} videos in a prompt, and the run's data has {videos}. Start it with "
        f"""--vllm_limit_mm_per_prompt '{{"video": {videos}}}' (vLLM takes those of Qwen3-VL and Qwen3.5 alone), """
        "or with --infer_backend transformers"
    )
