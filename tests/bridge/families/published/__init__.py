"""config.json and sizes of models as they lie on the hub.

Sizes are what the hub counts in the files' headers, where that could be seen, else what the table had when this was
written, and then the publisher's figure agrees with it as far as it goes.
"""

from tests.bridge.families.published import deepseek, dense, experts, gemma, hybrids, llama, others, qwen
from tests.bridge.families.published.model import Published

FILES = (qwen, llama, deepseek, experts, dense, gemma, hybrids, others)
MODELS: dict[str, Published] = {name: model for file in FILES for name, model in file.MODELS.items()}
