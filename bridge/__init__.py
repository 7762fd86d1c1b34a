"""The model: from a Hugging Face checkpoint to megatron-core's modules, and back."""

import logging
import warnings

from . import cudnn_library, lazy_compile, light_transformers

# megatron-core and its imports warn about their own launchers' flags; megaswift reports problems by its own flags.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*megatron")
warnings.filterwarnings("ignore", "Detected a Jax installation", module="transformer_engine")  # not used
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
lazy_compile.enable()
cudnn_library.enable()
light_transformers.enable()
