"""Videos from files and lists of frames, beside transformers' processors."""

import builtins
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.videos import VideoInfo, read_frames, video_info
from PIL import Image

from tests.templates.media.test_processor import normalised
from tests.tiny_vision import picture

FAMILIES = "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v"
GLMS = FAMILIES[2:]
GRIDS = "mm_token_type_ids", "image_grid_thw", "video_grid_thw"


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """Return a function that writes a video of a number of frames, at a rate, and returns its path."""
    av = pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("films")

    def write(frames: int, rate: int, size: tuple[int, int] = (96, 64), kind: str = "mp4") -> Path:
        path = folder / f"{frames}-{rate}-{size[0]}.{kind}"
        if not path.exists():
            with av.open(str(path), "w") as container:
                stream = container.add_stream("mpeg4", rate=rate)
                stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
                for number in range(frames):
                    image = picture(*size, seed=number // 3)
                    for packet in stream.encode(av.VideoFrame.from_image(image)):
                        container.mux(packet)
                for packet in stream.encode():
                    container.mux(packet)
        return path

    return write


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("frames", "rate"), [(30, 10), (7, 2), (61, 24), (5, 30), (90, 12)])
def test_files_are_what_transformers_makes(checkpoint, film, family: str, frames: int, rate: int) -> None:
    from transformers.video_utils import load_video

    made, path = checkpoint(family), film(frames, rate)
    vision = made.vision()
    message = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what?"}]}
    text = made.processor.apply_chat_template([message], tokenize=False)
    video, metadata = load_video(str(path), backend="pyav")
    options = {"video_metadata": [metadata], "do_sample_frames": True, "fps": 2}
    expected = made.processor(text=[text], videos=[video], **options, return_tensors="pt")
    medium = Medium("video", str(path))
    plan = vision.plan(medium)
    assert list(plan.grid) == expected["video_grid_thw"][0].tolist()
    ids = expected["input_ids"][0]
    if plan.expansion is None:
        assert plan.tokens == int((ids == vision.video_token_id).sum())
        assert plan.time_step == 2 * int(expected["second_per_grid_ts"][0])
    else:
        text_ids = made.tokenizer.encode(text, add_special_tokens=False)
        place = text_ids.index(vision.video_token_id)
        assert ids.tolist() == [*text_ids[:place], *plan.expansion.tolist(), *text_ids[place + 1 :]]
    pixels = torch.from_numpy(vision.patches(medium, plan.grid))
    assert torch.equal(normalised(vision, pixels, "video"), expected["pixel_values_videos"])


@pytest.mark.parametrize("family", GLMS)
def test_frames_that_glm_samples(checkpoint, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Of lengths up to and beyond those where the rate changes, or the most frames."""
    from transformers.video_utils import VideoMetadata

    made = checkpoint(family)
    processor, random = made.processor.video_processor, np.random.default_rng(0)
    numbers = set()
    for fps in (2.0, 1.0, 3.5):
        monkeypatch.setenv("FPS", str(fps))
        vision = made.vision()
        for longest in (2, 29, 31, 290, 310, 3000):
            lengths, rates = random.uniform(longest / 2, longest, 10), random.uniform(1, 30, 10)
            for rate, frames in zip(rates.tolist(), (lengths * rates).astype(int).tolist(), strict=True):
                frames = max(frames, 1)
                metadata = VideoMetadata(frames, rate, duration=frames / rate, frames_indices=None)
                # transformers ignores GLM-4.6V's rate, as its method has no such argument.
                expected = processor.sample_frames(metadata, **({} if family == "glm46v" else {"fps": fps}))
                info = VideoInfo(frames, rate, 64, 96, is_list=False)
                assert vision._sample(info, vision.limits, 2) == expected.tolist()
                numbers.add(len(expected))
    assert len(numbers) > 30


@pytest.mark.parametrize("family", GLMS)
def test_tokens_of_videos_among_those_of_images(checkpoint, family: str) -> None:
    """Of a GLM, whose model gets patches of time as images: it takes no image beside a video."""
    from megaswift.templates.dataset.transformers_inputs import transformers_inputs
    from transformers import AutoModelForImageTextToText

    made = checkpoint(family)
    vision, image = made.vision(), picture(70, 90)
    frames = [picture(64, 96, seed=number) for number in range(4)]
    text = "a<|begin_of_video|><|video|><|end_of_video|>b<|begin_of_image|><|image|><|end_of_image|>"
    metadata = {"fps": 2.0, "total_num_frames": 4, "frames_indices": [*range(4)]}
    expected = made.processor(
        text=[text], images=[image], videos=[np.stack([np.array(frame) for frame in frames])],
        video_metadata=[metadata], do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip
    media = [Medium("video", frames), Medium("image", image)]
    plans = [(plan := vision.plan(medium), vision.decode(medium, plan)) for medium in media]
    inputs = transformers_inputs(plans, expected["input_ids"], vision)
    assert inputs.keys() == {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
    pixels = torch.cat([expected["pixel_values_videos"], expected["pixel_values"]])
    assert torch.equal(inputs["pixel_values"], pixels)
    (time, *sides), image_grid = expected["video_grid_thw"][0].tolist(), expected["image_grid_thw"][0].tolist()
    assert inputs["image_grid_thw"].tolist() == [*([[1, *sides]] * time), image_grid]
    assert torch.equal(inputs["mm_token_type_ids"], expected["mm_token_type_ids"].clamp(max=1).int())
    # Both have the same positions.
    model = AutoModelForImageTextToText.from_pretrained(made.folder).model
    found, wanted = (
        model.get_rope_index(expected["input_ids"], **{name: of.get(name) for name in GRIDS})
        for of in (inputs, expected)
    )
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(("frames", "rate"), [(30, 10), (61, 24), (90, 12)])
def test_files_of_frames_of_one_size(checkpoint, film, frames: int, rate: int) -> None:
    """Those of LLaVA-OneVision, whose tower does not see the last pixels of a frame."""
    from transformers.video_utils import load_video

    made, path = checkpoint("llava_onevision"), film(frames, rate)
    vision, medium = made.vision(), Medium("video", str(path))
    video, metadata = load_video(str(path), backend="pyav")
    options = {"video_metadata": [metadata], "do_sample_frames": True, "fps": 2}
    expected = made.processor(text=["<video>"], videos=[video], **options, return_tensors="pt")
    plan = vision.plan(medium)
    pixels = expected["pixel_values_videos"][0, :, :, :28, :28]
    assert (plan.grid, plan.tokens) == ((len(pixels), 2, 2), expected["input_ids"].numel())
    patches = pixels.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1)
    assert torch.equal(normalised(vision, torch.from_numpy(vision.patches(medium, plan.grid)), "video"), patches)


def test_frames_of_one_size_have_no_limits(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [picture(64, 64, seed=number) for number in range(40)]
    vision = checkpoint("llava_onevision").vision()
    assert vision.plan(Medium("video", frames)).grid[0] == 32  # the most
    with pytest.raises(UnusableRow, match="it limits pixels, and the frames of the model's videos have one size"):
        vision.plan(Medium("video", frames, {"max_pixels": 1000}))
    monkeypatch.setenv("VIDEO_MAX_PIXELS", "2000")
    with pytest.raises(ValueError, match="VIDEO_MAX_PIXELS 2000: the frames of this model's videos have one size"):
        checkpoint("llava_onevision").vision()


def test_glm_has_no_limits_of_frames(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FPS_MAX_FRAMES", "20")
    with pytest.raises(ValueError, match="FPS_MAX_FRAMES 20: the number of frames of a GLM's video has no such limit"):
        checkpoint("glm4v").vision()


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_frames_that_are_sampled(checkpoint, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The numbers of frames of many lengths and rates, with the limits of the environment."""
    from transformers.video_utils import VideoMetadata

    made = checkpoint(family)
    processor = made.processor.video_processor
    random = np.random.default_rng(0)
    for fps, least, most in ((2.0, 4, 768), (1.0, 6, 20), (3.5, 4, 12)):
        monkeypatch.setenv("FPS", str(fps))
        monkeypatch.setenv("FPS_MIN_FRAMES", str(least))
        monkeypatch.setenv("FPS_MAX_FRAMES", str(most))
        vision = made.vision()
        with monkeypatch.context() as patch:
            patch.setattr(processor, "min_frames", least)
            patch.setattr(processor, "max_frames", most)
            for frames, rate in zip(
                random.integers(8, 2000, 60).tolist(), random.uniform(5, 60, 60).tolist(), strict=True
            ):
                metadata = VideoMetadata(frames, rate, frames_indices=None)
                expected = processor.sample_frames(metadata, fps=fps)
                info = VideoInfo(frames, rate, 64, 96, is_list=False)
                assert vision._sample(info, vision.limits, 2) == expected.tolist()


def test_a_list_of_frames_is_taken_whole(checkpoint) -> None:
    """It was sampled before, at FPS: so say the times."""
    made = checkpoint("qwen3_vl")
    frames = [picture(64, 64, seed=number) for number in range(5)]
    plan = made.vision().plan(Medium("video", frames))
    assert plan.grid[0] == 3
    times = made.tokenizer.decode(plan.expansion).replace("<|video_pad|>", "")
    assert times == "".join(f"<{time} seconds><|vision_start|><|vision_end|>" for time in (0.2, 1.2, 2.0))
    plan = made.vision().plan(Medium("video", frames, {"fps": 4}))
    assert made.tokenizer.decode(plan.expansion).startswith("<0.1 seconds>")
    longer = made.vision(model_kwargs={"fps_max_frames": 4}).plan(Medium("video", frames))
    assert longer.grid[0] == 2


def test_sources_of_files(film, tmp_path: Path) -> None:
    path = film(30, 10)
    for source in (
        str(path),
        path.as_uri(),
        {"bytes": path.read_bytes(), "path": None},
        {"bytes": None, "path": str(path)},
    ):
        assert video_info(source, 2.0) == VideoInfo(30, 10.0, 64, 96, is_list=False)
        assert read_frames(source, [0, 29]).shape == (2, 3, 64, 96)
    assert video_info(str(film(12, 6, kind="mkv")), 2.0).frames == 12  # whose header does not say


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ([], "a video has no frame"),
        ([picture(20, 20), picture(30, 20)], "frames of a video differ in size"),
        ([picture(20, 20), "/no/such.png"], "image cannot be read"),
        ("/no/such.mp4", "a video cannot be read .no such file"),
        ({"bytes": b"no video"}, "a video cannot be read .invalid data"),
        (5, "a video is a number"),
    ],
)
def test_what_cannot_be_used(source, reason: str) -> None:
    pytest.importorskip("av")
    with pytest.raises(UnusableRow, match=reason):
        video_info(source, 2.0)


def test_one_frame_is_too_short_for_qwen3_vl(checkpoint) -> None:
    with pytest.raises(UnusableRow, match="a video has fewer than 2 frames"):
        checkpoint("qwen3_vl").vision().plan(Medium("video", [picture(64, 64)]))
    assert checkpoint("qwen2_5_vl").vision().plan(Medium("video", [picture(64, 64)])).grid[0] == 1


def test_a_cut_file_breaks_while_training(film, tmp_path: Path) -> None:
    path = tmp_path / "cut.mkv"
    data = film(60, 10, kind="mkv").read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UnusableRow, match=r"a video (is damaged or truncated|cannot be read)"):
        read_frames(str(path), [0, 59])


def test_without_pyav_the_run_stops_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "av", raising=False)

    def no_av(name, *arguments, **options):
        if name.partition(".")[0] == "av":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_av)
    with pytest.raises(ValueError, match=r"needs PyAV. Run pip install 'megaswift\[video\]'") as caught:
        video_info("a.mp4", 2.0)
    assert not isinstance(caught.value, UnusableRow)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(96, 64), (640, 480), (100, 300)])
def test_sizes_within_the_limits_of_variables(checkpoint, monkeypatch: pytest.MonkeyPatch, family: str, size) -> None:
    """VIDEO_MAX_TOKEN_NUM is of a frame, VIDEO_TOTAL_PIXELS of all."""
    made, frames = checkpoint(family), [Image.new("RGB", size)] * 8
    factor = made.vision().factor
    usual = made.vision().plan(Medium("video", frames))
    monkeypatch.setenv("VIDEO_MAX_TOKEN_NUM", "6")
    monkeypatch.setenv("VIDEO_MIN_TOKEN_NUM", "2")
    small = made.vision().plan(Medium("video", frames))
    assert small.grid[0] == usual.grid[0] == 4
    assert small.tokens <= usual.tokens
    assert small.tokens <= 4 * 7
    monkeypatch.setenv("VIDEO_TOTAL_PIXELS", str(8 * 3 * factor**2))
    # Two frames share a visual token. Qwen2.5-VL's limit is of the tokens, Qwen3-VL's of the frames.
    assert made.vision().plan(Medium("video", frames)).tokens <= 4 * (6 if family == "qwen2_5_vl" else 3)


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_a_model_without_videos_refuses_them(checkpoint, tmp_path: Path, stage: str) -> None:
    picture(60, 60).save(tmp_path / "0.png")
    answer = [] if stage == "pt" else [{"role": "assistant", "content": "red"}]
    tags = {"videos": ("<video>", [[str(tmp_path / "0.png")] * 2]), "images": ("<image>", [str(tmp_path / "0.png")])}
    for kind, (tag, media) in tags.items():
        row = {"messages": [{"role": "assistant" if stage == "pt" else "user", "content": f"{tag}what"}, *answer]}
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps(row | {kind: media}) + "\n")
    files = [str(tmp_path / f"{kind}.jsonl") for kind in tags]
    prepared = checkpoint("internvl").prepare(stage, dataset=files, dataset_shuffle=False)
    assert len(prepared.train) == 1
    assert "it has videos, which are not supported with internvl" in str(prepared.report)
