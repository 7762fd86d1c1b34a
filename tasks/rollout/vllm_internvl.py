"""config.json of InternVLChatModel for vLLM, which has the model's class and reads its config by code of the folder."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ...bridge.families.internvl import CHAT, CHAT_DEFAULTS


class ServedConfig(PretrainedConfig):
    """The settings of config.json as vLLM's class reads them: `llm_config` is called `text_config`."""

    model_type = CHAT

    def __init__(
        self, llm_config: dict[str, Any] | None = None, vision_config: dict[str, Any] | None = None, **settings: Any
    ):
        text = settings.pop("text_config", None) or llm_config or {}
        if isinstance(text, dict):
            text = AutoConfig.for_model(**text) if text else PretrainedConfig()
        self.text_config = text
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**CHAT_DEFAULTS | settings)


def register_in_vllm() -> None:
    """Have vLLM read these config.json in this process. The Python code of a checkpoint is not run."""
    from vllm.transformers_utils import config  # pyright: ignore[reportMissingImports]

    config._CONFIG_REGISTRY[CHAT] = ServedConfig
