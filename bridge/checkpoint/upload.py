"""Upload of a checkpoint's folder to Hugging Face or ModelScope."""

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..options import HubOptions

TRIES, PAUSE = 4, 5.0  # of an upload; seconds before the second one, twice as many before each later one
# A run's state is for resuming only. Hidden folders are unfinished ones.
NOT_UPLOADED = ["training_state/*", "*.tmp", ".*"]


def upload_folder(folder: Path, options: HubOptions, *, use_hf: bool, token: str | None) -> str:
    """Upload the files of `folder` to `--hub_model_id`, made if it does not exist. Return its address.

    Raises OSError, which says how to upload by hand, when no try succeeds. The folder never changes.
    """
    upload = _to_hugging_face if use_hf else _to_modelscope
    hub = "Hugging Face" if use_hf else "ModelScope"
    pause = PAUSE
    for number in range(1, TRIES + 1):
        try:
            return upload(folder, options, token)
        except Exception as error:  # hub clients raise many types: the user needs the reason and what to do
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason.replace(token, "***") if token else reason
            if number == TRIES or _is_final(error):
                break
            print(f"Upload to {hub} failed ({reason}); once more in {pause:g} s.", flush=True)
            time.sleep(pause)
            pause *= 2
    command = f"hf upload {options.hub_model_id} {folder} . --exclude 'training_state/*'"
    if not use_hf:
        command = f"modelscope upload {options.hub_model_id} {folder}"
    raise OSError(
        f"--push_to_hub true: {folder} is whole, but was not uploaded to {hub} ({reason}). Check the name, the "
        f"network and --hub_token, and upload it by hand: {command}"
    ) from None


def missing_client(*, use_hf: bool) -> str | None:
    """Return the package that uploads need and that is not installed."""
    name = "huggingface_hub" if use_hf else "modelscope"
    return None if importlib.util.find_spec(name) else name


def has_token(token: str | None, *, use_hf: bool) -> bool:
    """Return whether there is a token: an option, an environment variable, or that of a login."""
    if token:
        return True
    if not use_hf:
        return bool(os.environ.get("MODELSCOPE_API_TOKEN")) or (Path.home() / ".modelscope" / "credentials").is_dir()
    from huggingface_hub import get_token

    return get_token() is not None


def _is_final(error: Exception) -> bool:
    """Return whether another try would fail too: wrong names and tokens."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in (400, 401, 403, 404) or isinstance(error, ValueError)


def _to_hugging_face(folder: Path, options: HubOptions, token: str | None) -> str:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    repository = api.create_repo(str(options.hub_model_id), private=options.hub_private_repo, exist_ok=True)
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=folder,
        commit_message=options.commit_message or f"Upload {folder.name}",
        ignore_patterns=NOT_UPLOADED,
    )
    return str(repository)


def _to_modelscope(folder: Path, options: HubOptions, token: str | None) -> str:
    from modelscope.hub.api import HubApi  # pyright: ignore[reportMissingImports]

    api, name = HubApi(), str(options.hub_model_id)
    visibility = "private" if options.hub_private_repo else "public"
    create: Callable[..., object] = api.create_repo
    create(name, token=token, visibility=visibility, repo_type="model", exist_ok=True)
    api.upload_folder(
        repo_id=name,
        folder_path=str(folder),
        commit_message=options.commit_message or f"Upload {folder.name}",
        token=token,
        ignore_patterns=NOT_UPLOADED,
    )
    return f"https://modelscope.cn/models/{name}"
