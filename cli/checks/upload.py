"""Checks of `--push_to_hub`."""

import re

from ...bridge.checkpoint.upload import has_token, missing_client
from ...bridge.option_groups import flag_value
from ...bridge.options import HubOptions, ModelOptions
from ..flags import UsageError
from .generation import as_flag

# OWNER/NAME; Hugging Face takes the token's owner for a name alone.
REPOSITORY = re.compile(r"(?P<owner>\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def check_upload(options: ModelOptions) -> list[str]:
    """Raise UsageError if an upload would fail for want of a name, a token or the hub's client. Return notes."""
    if not flag_value(options, "push_to_hub"):
        names = ("hub_model_id", "hub_private_repo", "commit_message")
        unused = [name for name in names if flag_value(options, name) != getattr(HubOptions, name)]
        return [f"{as_flag(name, options)} has no effect: there is no --push_to_hub true." for name in unused]
    name = flag_value(options, "hub_model_id")
    if not name:
        raise UsageError("--push_to_hub true needs the repository to upload to. Set --hub_model_id OWNER/NAME.")
    match = REPOSITORY.fullmatch(name)
    if match is None or ".." in name or not (match["owner"] or options.use_hf):
        raise UsageError(f"--hub_model_id {name}: not the name of a repository. Set OWNER/NAME.")
    if package := missing_client(use_hf=options.use_hf):
        hint = "" if options.use_hf else "Set --use_hf true to upload to Hugging Face, or "
        raise UsageError(f"--push_to_hub true needs the package {package}. {hint}`pip install {package}`.")
    if not has_token(options.hub_token, use_hf=options.use_hf):
        login = "HF_TOKEN, or `hf auth login`" if options.use_hf else "MODELSCOPE_API_TOKEN, or `modelscope login`"
        raise UsageError(f"--push_to_hub true needs a token that may write. Set --hub_token, {login}.")
    return []
