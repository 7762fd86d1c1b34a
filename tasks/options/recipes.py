"""Options of `swift prepare`. No torch: the command line imports this."""

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass
class RecipeOptions:
    """swift prepare"""

    recipe: Annotated[
        Literal["gsm8k", "math", "deepscaler"] | None,
        "Dataset to prepare, also without the flag: `swift prepare gsm8k`.",
    ] = None
    local_dir: Annotated[str | None, "Folder for train.parquet and test.parquet."] = None
    local_dataset_path: Annotated[
        str | None, "A local copy of the dataset: a folder, or (deepscaler) a file. Default: the hub's."
    ] = None
    use_hf: Annotated[bool, "Take the dataset from Hugging Face; false: from ModelScope."] = True
    hub_token: Annotated[str | None, "Token for gated datasets."] = None
