"""Media that no engine answers to."""

from types import SimpleNamespace
from typing import Any

import pytest
from megaswift.tasks.rollout import factory


def test_videos_of_glm_are_not_answered_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaswift.templates.media.families import FAMILIES

    monkeypatch.setattr(factory, "most_media", lambda data, kind: 0)
    options: Any = SimpleNamespace(
        vllm_mode="colocate", vllm_server_host=None, vllm_server_base_url=None, use_vllm=False
    )
    for has_videos in (False, True):
        monkeypatch.setattr(factory, "has_videos", lambda data, has_videos=has_videos: has_videos)
        vision = SimpleNamespace(family=FAMILIES["glm4v_moe"], model_type="glm4v_moe")
        run: Any = SimpleNamespace(data=None, vision=vision)
        if not has_videos:
            factory.check_media(run, options)
            continue
        with pytest.raises(ValueError, match="it has videos, to which glm4v_moe generates no answers"):
            factory.check_media(run, options)
