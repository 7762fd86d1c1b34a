"""The model: from a Hugging Face checkpoint to megatron-core's modules, and back."""

import logging
import warnings

# megatron-core and its imports advise the users of their own launchers; ours are told what concerns them by name.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*megatron")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
