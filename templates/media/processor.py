"""Images, videos and audios as a model takes them: sizes, tokens, patches and positions.

Sizes, tokens and positions come from headers by arithmetic, and equal those of transformers' processors and models.
Patches are uint8: the device subtracts `mean` and divides by `std`, which gives transformers' values bit by bit.
families.py lists the families, and audio_processor.py has audios.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..formats.medium import SENTINELS, MediaKind, Medium
from ..formats.schemas import UnusableRow
from ..options import MediaOptions
from ..tokenizer import Tokenizer
from .audio_processor import AudioProcessor
from .families import FAMILIES, vision_family
from .feature_cache import FeatureFiles
from .image_rules import Grid, grown, smart_resize
from .images import image_size, open_image
from .limits import MediaLimits, asks_for_sound, requested_values, resolve_limits
from .media_plan import MediaPlan as MediaPlan
from .processor_files import (
    PROCESSOR_FILES,
    chat_template,
    image_rules,
    load_processors,
    read_json,
    read_model,
    token_id,
    video_config,
    video_form,
)
from .timestamps import Timestamps
from .video_sound import VideoSound
from .videos import VideoInfo, read_frames, video_info

if TYPE_CHECKING:
    import torch

CHANNELS = 3
INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # torchvision's names of PIL's numbers


class SampledVideo(NamedTuple):
    """Frames of a video that the model gets."""

    frames: "torch.Tensor"  # uint8 [frames, 3, height, width], resized
    indices: list[int]  # numbers of these frames
    info: VideoInfo  # about the video they come from


class VisionProcessor:
    """Processor of a checkpoint's images, videos and audios.

    Raises ValueError if the checkpoint's processor cannot be read, or if an option or variable does not fit.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: MediaOptions):
        config = read_model(folder)
        self.model_type: str = config["model_type"]
        self.family = vision_family(config)
        self.allow_private = options.allow_private_media_urls
        image, video = load_processors(folder, self.family)
        self._form, self._sample = video_form(video, self.family, requested_values(options))
        self._rules = image_rules(folder, self.family, image, video, tokenizer)
        self.patch_size, self.merge_size = self._rules.patch_size, self._rules.merge_size
        self.temporal_patch_size = self._rules.temporal_patch_size
        self.resample = int(getattr(image, "resample", 0))
        mean, std = self._rules.normalization or (getattr(image, name, ()) for name in ("image_mean", "image_std"))
        self.mean = tuple(float(value) for value in mean)  # mean of values from 0 to 1
        self.std = tuple(float(value) for value in std)
        if self.family.image is None and options.max_pixels is not None:
            raise ValueError(f"--max_pixels {options.max_pixels}: {self.model_type} takes no images. Remove it.")
        self.limits = resolve_limits(
            options,
            (self._rules.least_pixels, self._rules.most_pixels),
            video_config(video, self.family),
            self.factor**2,
            least_limit=self._rules.least_limit,
            video_volume=self.family.has_timestamps,
        )
        self.norm_bbox = options.norm_bbox or self.family.norm_bbox
        self.bbox_format = requested_values(options).get("QWENVL_BBOX_FORMAT", "legacy")
        self.placeholders: dict[MediaKind, int] = {}  # tokens that stand for the kinds of media that the model takes
        for kind in SENTINELS:
            if placeholder := self.family.placeholder(kind):
                token = config.get(f"{kind}_token_id") or config.get(f"{kind}_token_index")
                if kind == "image":
                    token = token or config.get("media_placeholder_token_id")
                self.placeholders[kind] = token or token_id(tokenizer, placeholder.repeated)
        self.audio: AudioProcessor | None = None
        if self.family.audio is not None:
            self.audio = AudioProcessor(
                folder, self.family.audio, config.get("audio_config") or {}, allow_private=self.allow_private
            )
        self._vision: Mapping[str, Any] = config.get("vision_config") or {}
        # Time between patches of time of a video in positions, per second. Qwen2-VL has none.
        self.tokens_per_second: int | None = None
        if self.model_type == "qwen2_5_vl":
            self.tokens_per_second = self._vision.get("tokens_per_second", 4)
        elif self.family.follows_time:
            self.tokens_per_second = config.get("position_id_per_seconds", 25)
        self._tokenizer = tokenizer
        self._timestamps: Timestamps | None = None
        if self._form is not None:
            self._timestamps = Timestamps(tokenizer, self._form, self._visual_id("video"), self.temporal_patch_size)
        self.sound: VideoSound | None = None  # None: the sound of videos is not read
        if asks_for_sound(options, self.model_type, self.family):
            self.sound = VideoSound(
                self.family,
                *(self._visual_id("video"), self.placeholder_id("audio"), self.enclosing(self.placeholder_id("audio"))),
                int(self.tokens_per_second or 0) * config.get("seconds_per_chunk", 2),
            )
        self.chat_template = chat_template(folder, self.family, tokenizer, has_sound=self.sound is not None)
        self.feature_files: FeatureFiles | None = None  # cached features of the run's tower (--precompute_features)

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer, options: MediaOptions) -> "VisionProcessor | None":
        """Return the processor of a checkpoint; None if its model_type has none here, or the folder has none."""
        is_known = read_json(folder / "config.json").get("model_type") in FAMILIES
        has_files = any((folder / name).is_file() for name in PROCESSOR_FILES)
        return cls(folder, tokenizer, options) if is_known and has_files else None

    @property
    def factor(self) -> int:
        """Side of a visual token in pixels."""
        return self._rules.factor

    @property
    def normalization(self) -> tuple[Sequence[float], Sequence[float], bool]:
        """Mean and standard deviation of pixel values in 0..1, and whether pixels are normalized in bfloat16."""
        return self.mean, self.std, self.family.has_bf16_pixels

    @property
    def fingerprint(self) -> list[Any]:
        """All that determines the tokens of images and videos."""
        tokens = *self.reserved_ids, self.tokens_per_second
        sizes = self.patch_size, self.merge_size, self.temporal_patch_size
        boxes = self.norm_bbox, self.bbox_format
        audio = self.audio.fingerprint if self.audio else None
        form = [self._form] if self.family.has_image_tokens else []  # it differs between checkpoints of a model_type
        form += ["sound of videos"] if self.sound else []
        return [self.model_type, *astuple(self.limits), *tokens, *sizes, *boxes, self.allow_private, audio, *form]

    def placeholder_id(self, kind: MediaKind) -> int:
        """Return the token that stands for a medium. Raises UnusableRow if the model takes none of its kind."""
        if kind not in self.placeholders:
            raise UnusableRow(self._refusal(kind))
        return self.placeholders[kind]

    def _visual_id(self, kind: MediaKind) -> int:
        """Return the token that stands for each feature of a medium."""
        return self.placeholder_id("image" if self.family.has_image_tokens else kind)

    def _refusal(self, kind: MediaKind) -> str:
        return f"it has {kind}s, which are not supported with {self.model_type}"

    @property
    def image_token_id(self) -> int:
        return self.placeholders["image"]

    @property
    def video_token_id(self) -> int | None:
        return self.placeholders.get("video")

    @property
    def placeholder_ids(self) -> list[int]:
        """Tokens that stand for media, or that only these have."""
        return [*self.placeholders.values(), *self._rules.feature_ids]

    @property
    def reserved_ids(self) -> list[int]:
        """Tokens that stand for media here, in transformers or in vLLM: texts have none of them."""
        return [*self.placeholder_ids, *self._rules.reserved_ids]

    @cached_property
    def _enclosing_ids(self) -> dict[int, tuple[list[int], list[int]]]:
        """Tokens before and behind the placeholder of each kind of media, which belong to the medium."""
        enclosing: dict[int, tuple[list[int], list[int]]] = {}
        for kind, token in self.placeholders.items():
            placeholder = self.family.placeholder(kind)
            assert placeholder is not None
            start, end = (
                self._tokenizer.encode(text, add_special_tokens=False) if text else []
                for text in (placeholder.start, placeholder.end)
            )
            enclosing[token] = start, end
        return enclosing

    def enclosing(self, token: int) -> tuple[list[int], list[int]]:
        """Return the tokens before and behind a placeholder, which belong to the medium."""
        return self._enclosing_ids[token]

    def placeholder_text(self, kind: MediaKind) -> str:
        """Return the text of a medium where there is no chat template: in pre-training. Raises UnusableRow."""
        placeholder = self.family.placeholder(kind)
        if placeholder is None:
            raise UnusableRow(self._refusal(kind))
        if self.sound and kind == "video":
            placeholder = self.sound.placeholder
        return "".join(placeholder)

    def plan(self, medium: Medium) -> MediaPlan:
        """Return the size of a medium, from its header. Raises UnusableRow with the reason."""
        if medium.kind == "audio" and not medium.is_sound:
            if self.audio is None:
                raise UnusableRow(self._refusal("audio"))
            return self.plan_audio(self.audio.frames(medium))
        limits = self.limits.of_row(medium.limits)
        if medium.kind == "image":
            return self.plan_image(*image_size(medium.source, allow_private=self.allow_private), limits)
        info = video_info(medium.source, limits.fps, allow_private=self.allow_private)
        indices = self._sample(info, limits, self.temporal_patch_size)
        height, width = self._resized_frame(len(indices), info.height, info.width, limits)
        plan = self.plan_frames(height, width, indices, info, limits.fps)
        if self.sound is None:
            return plan
        assert self.audio is not None
        sound = self.plan_audio(self.sound.frames(medium, self.audio))
        video, sound = self.sound.plans(plan, sound, plan.tokens // plan.grid[0])
        return sound if medium.is_sound else video

    def plan_audio(self, frames: int) -> MediaPlan:
        """Return the size of an audio. frames: of its spectrogram"""
        assert self.audio is not None
        return MediaPlan("audio", (frames, 1, 1), self.audio.tokens(frames))

    def plan_frames(
        self, height: int, width: int, indices: Sequence[int], info: VideoInfo, fps: float | None = None
    ) -> MediaPlan:
        """Return the size of a video whose sampled frames have been resized to `height` and `width`.

        indices: numbers of these frames. fps: as they were asked for; by default that of the limits
        Raises UnusableRow with the reason.
        """
        time = -(-len(indices) // self.temporal_patch_size)
        grid = time, height // self.patch_size, width // self.patch_size
        if self._timestamps:
            expansion = self._timestamps.expansion(indices, info.fps, self.tokens((1, *grid[1:])))
            return MediaPlan("video", grid, self.tokens(grid), expansion=expansion)
        step = self._time_step(info, len(indices), fps or self.limits.fps)
        return MediaPlan("video", grid, self._rules.video_tokens(grid), step, layout=self._rules.video_layout(grid))

    def sampled_fps(self, plan: MediaPlan) -> float:
        """Return the frames per second that a video of an Omni model was asked for."""
        assert self.tokens_per_second is not None
        return self.tokens_per_second * self.temporal_patch_size / plan.time_step

    def plan_image(self, height: int, width: int, limits: MediaLimits) -> MediaPlan:
        """Return the size of an image of this height and width. Raises UnusableRow with the reason."""
        rules, size = self._rules, (height, width)
        grid = rules.grid(height, width, limits)
        tokens, expansion = rules.tokens(grid, size, limits), rules.expansion(grid, size, limits)
        return MediaPlan("image", grid, tokens, expansion=expansion, size=size, layout=rules.layout(size, limits))

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        """Return the arguments of transformers' image processor for these limits of an image."""
        return self._rules.processor_arguments(min_pixels, max_pixels)

    def image_inputs(self, images: "Sequence[tuple[MediaPlan, np.ndarray]]") -> "dict[str, torch.Tensor]":
        """Return the inputs of transformers' model for some images. images: plan and decoded patches of each"""
        import torch

        inputs = self._rules.inputs(
            [(plan.grid, self.normalize(torch.from_numpy(patches), plan.kind)) for plan, patches in images]
        )
        return inputs | self._rules.size_inputs([plan.size for plan, _ in images])

    def video_inputs(self, videos: "Sequence[tuple[MediaPlan, np.ndarray]]") -> dict[str, Any]:
        """Return the inputs of transformers' model for some videos. videos: plan and decoded patches of each"""
        import torch

        inputs = self._rules.video_inputs(
            [(plan.grid, self.normalize(torch.from_numpy(patches), "video")) for plan, patches in videos]
        )
        if (rate := self.tokens_per_second) is not None:
            name = "video_second_per_grid" if self.family.follows_time else "second_per_grid_ts"
            inputs[name] = torch.tensor([plan.time_step / rate for plan, _ in videos])
        return inputs

    def tokens(self, grid: Grid) -> int:
        """Return the number of visual tokens of a grid."""
        return math.prod(grid) // self.merge_size**2

    def decode(self, medium: Medium, plan: MediaPlan) -> np.ndarray:
        """Return the values of a planned medium: its patches, or the spectrogram of an audio. Raises UnusableRow."""
        if plan.kind != "audio":
            return self.patches(medium, plan.grid)
        assert self.audio is not None
        return self.audio.spectrogram(medium, plan.grid[0])

    def empty_values(self, plan: MediaPlan) -> np.ndarray:
        """Return values in place of a medium that cannot be decoded: grey patches, or silence."""
        if plan.kind != "audio":
            return self.grey_patches(plan.kind, plan.grid)
        assert self.audio is not None
        return self.audio.silence(plan.grid[0])

    def width(self, kind: MediaKind) -> int:
        """Return the number of values of a patch, or of a frame of a spectrogram."""
        if kind != "audio":
            return self.patch_values(kind)
        return self.audio.mel_bins if self.audio else 0

    def patches(self, medium: Medium, grid: Grid) -> np.ndarray:
        """Return the decoded patches of a planned image or video: uint8 [patches, values]. Raises UnusableRow.

        values: channels x patch x patch of an image, channels x temporal patch x patch x patch of a video
        """
        if medium.kind == "image":
            return self._cut(self.resized_image(medium, grid), 1)
        return self.video_patches(self.sampled_frames(medium, grid))

    def video_patches(self, video: SampledVideo) -> np.ndarray:
        """Return the patches of a video: uint8 [patches, values]."""
        import torch

        frames = video.frames
        if missing := -len(frames) % self.temporal_patch_size:
            frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
        return self._cut(frames, self.temporal_patch_size)

    def resized_image(self, medium: Medium, grid: Grid) -> "torch.Tensor":
        """Return the pixels of a planned image: uint8 [tiles or 1, 3, height, width]. Raises UnusableRow."""
        import torch

        image = open_image(medium.source, allow_private=self.allow_private)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        return self._rules.frames(pixels, grid, self.limits.of_row(medium.limits), self._resize)

    def sampled_frames(self, medium: Medium, grid: Grid) -> SampledVideo:
        """Return a planned video's frames. Raises UnusableRow."""
        limits = self.limits.of_row(medium.limits)
        info = video_info(medium.source, limits.fps, allow_private=self.allow_private)
        indices = self._sample(info, limits, self.temporal_patch_size)
        frames = read_frames(medium.source, indices, allow_private=self.allow_private)
        frames = self._rules.video_frames(frames, grid, self._resize)
        return SampledVideo(frames, indices, info)

    def normalize(self, patches: "torch.Tensor", kind: MediaKind) -> "torch.Tensor":
        """Return decoded patches as transformers' models take them: fp32 [patches, values], images repeated in time."""
        import torch

        depth = self.temporal_patch_size
        values = patches.view(len(patches), CHANNELS, depth if kind == "video" else 1, self.patch_size**2)
        mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in (self.mean, self.std))
        if self.family.has_bf16_pixels:
            pixels = values.bfloat16() * (1 / 255)
            values = ((pixels - mean.bfloat16()) / std.bfloat16()).float()
        else:
            values = (values.float() - mean * 255.0) / (std * 255.0)
        return values.expand(-1, -1, depth, -1).flatten(1)

    def grey_patches(self, kind: MediaKind, grid: Grid) -> np.ndarray:
        """Return patches in place of a medium that cannot be decoded."""
        return np.full((math.prod(grid), self.patch_values(kind)), 128, np.uint8)

    def patch_values(self, kind: MediaKind) -> int:
        """Return the number of values of a patch."""
        return CHANNELS * self.patch_size**2 * (self.temporal_patch_size if kind == "video" else 1)

    def rope_positions(self, length: int, media: Iterable[tuple[int, MediaPlan]]) -> np.ndarray:
        """Return the positions of a document in time, height and width: int64 [3, length].

        media: place of each medium in the document, and its size, in order
        """
        positions = np.empty((3, length), np.int64)
        token = position = 0
        for start, plan in media:
            if self.sound and plan.kind == "video":
                positions[:, token:start] = position + np.arange(start - token)
                position += start - token
                token = start + plan.length
                positions[:, start:token], position = self.sound.positions(plan, self.merge_size, position)
                continue
            for offset, (time, height, width) in self.blocks(plan):
                block = start + offset
                positions[:, token:block] = position + np.arange(block - token)
                position += block - token
                token = block + time * height * width
                axes = np.indices((time, height, width)).reshape(3, -1)
                axes[0] *= plan.time_step
                positions[:, block:token] = position + axes
                position += max(height, width, (time - 1) * plan.time_step + 1 if self.family.follows_time else 0)
        positions[:, token:] = position + np.arange(length - token)
        return positions

    def blocks(self, plan: MediaPlan) -> list[tuple[int, Grid]]:
        """Return the blocks of visual tokens of a medium: first token after its place, and size in tokens.

        Tokens of an audio have positions as text.
        """
        if plan.kind == "audio":
            return []
        time, height, width = plan.grid[0], plan.grid[1] // self.merge_size, plan.grid[2] // self.merge_size
        if plan.expansion is None:
            return [(0, (time, height, width))]
        visual = np.flatnonzero(plan.expansion == self._visual_id(plan.kind))
        return [(int(first), (1, height, width)) for first in visual[:: height * width]]

    def visual_offsets(self, plan: MediaPlan) -> np.ndarray:
        """Return the offsets from its place of a medium's tokens that have features: int64 [tokens]."""
        if plan.expansion is None:
            return np.arange(plan.tokens)
        if plan.is_sound:
            return plan.expansion
        around = self._rules.feature_ids if plan.kind == "image" else ()
        return np.flatnonzero(np.isin(plan.expansion, [self._visual_id(plan.kind), *around]))

    def encoding_cost(self, plan: MediaPlan) -> int:
        """Return the relative time to encode a medium."""
        if plan.kind != "audio":
            return self.cost(plan.grid)
        assert self.audio is not None
        return self.audio.cost(plan.grid[0])

    def cost(self, grid: Grid) -> int:
        """Return the relative time to encode an image or video: products of matrices, and attention within blocks."""
        vision = self._vision
        depth = vision.get("depth") or vision.get("num_hidden_layers", 32)
        hidden = vision.get("embed_dim") or vision.get("hidden_size", 1280)
        inner = vision.get(self.family.tower_mlp) or int(hidden * vision.get("mlp_ratio", 4))
        time, height, width = grid
        frame, patches = height * width, time * height * width
        full_layers, window = depth, 0
        if full := vision.get("fullatt_block_indexes"):
            full_layers = len(full)
            window = min((vision.get("window_size", 112) // self.patch_size) ** 2, frame)
        matrices = depth * (8 * hidden * hidden + 6 * hidden * inner)
        attention = 4 * hidden * (full_layers * frame + (depth - full_layers) * window)
        return patches * (matrices + attention)

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        """Return the size of an image after resizing. Raises UnusableRow with the reason."""
        return self._rules.resized(height, width, limits)

    def _resized_frame(self, frames: int, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        """Return the size of a video's frames after resizing, as `smart_resize` of Qwen2-VL or Qwen3-VL."""
        if size := self._rules.frame_size(limits):
            return size
        least, most, max_ratio = limits.video_min_pixels, limits.video_max_pixels, limits.max_ratio
        if not limits.video_volume:
            if total := limits.video_total_pixels:
                most = max(min(most, total * self.temporal_patch_size // frames), int(least * 1.05))
            return smart_resize(height, width, self.factor, least, most, max_ratio=max_ratio)
        if limits.frame_min_pixels:
            least = limits.frame_min_pixels * frames
        if limits.frame_max_pixels:
            floor = int(limits.video_min_pixels * 1.05)  # pixels of a frame, in Qwen3-VL's processor
            floor *= 1 if self.family.has_image_tokens else frames
            most = max(min(limits.frame_max_pixels, most // frames) * frames, floor)
        if frames < self.temporal_patch_size:
            raise UnusableRow(f"a video has fewer than {self.temporal_patch_size} frames")
        height, width = grown(height, width, self.factor)
        time = round(frames / self.temporal_patch_size) * self.temporal_patch_size
        return smart_resize(
            height, width, self.factor, least, most, max_ratio=max_ratio, frames=frames, rounded_frames=time
        )

    def _time_step(self, info: VideoInfo, frames: int, fps: float) -> int:
        if self.tokens_per_second is None:
            return 1
        if self.family.follows_time:
            # transformers goes by the frames per second that are asked for, also where a video has fewer.
            step = self.tokens_per_second * self.temporal_patch_size / fps
            if step < 1 or not step.is_integer():
                raise UnusableRow(
                    f"a video with FPS {fps:g} has patches of time {step:g} positions apart, which must be a whole "
                    "number: set FPS 1 or 2"
                )
            return int(step)
        sampled_fps = info.fps if info.is_list and frames == info.frames else frames / info.frames * info.fps
        # transformers passes the seconds of a patch of time as fp32, and cuts them to whole ones.
        return int(self.tokens_per_second * int(np.float32(self.temporal_patch_size / sampled_fps)))

    def _resize(self, frames: "torch.Tensor", height: int, width: int) -> "torch.Tensor":
        """Resize frames as transformers' torchvision processors do: uint8 [frames, channels, height, width]."""
        from torchvision.transforms.v2 import functional

        interpolation = INTERPOLATIONS[self.resample]
        return functional.resize(frames, [height, width], interpolation=functional.InterpolationMode(interpolation))

    def _cut(self, frames: "torch.Tensor", depth: int) -> np.ndarray:
        """Return the patches of frames in the order of the tower: those of a visual token follow each other."""
        number, channels, height, width = frames.shape
        merge, patch = self.merge_size, self.patch_size
        shape = number // depth, depth, channels, height // patch // merge, merge, patch
        cut = frames.reshape(*shape, width // patch // merge, merge, patch)
        # [time, height, width, height in token, width in token, channel, depth, height in patch, width in patch]
        return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * depth * patch * patch).numpy()
