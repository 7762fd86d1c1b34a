"""Kimi-VL in plain torch, which transformers has no class for, and its processor: what the published code computes.

Names of tensors and settings are those of the checkpoints. Attention, ropes and position embeddings are computed image
by image, with other functions than those of megaswift. The language model is transformers' DeepSeek-V3.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

PREFIX = "language_model."  # prefix of the language model's tensors


class MoonViTConfig(PreTrainedConfig):
    model_type = "moonvit"
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    merge_kernel_size: tuple[int, int] = (2, 2)


class KimiVLConfig(PreTrainedConfig):
    model_type = "kimi_vl"
    sub_configs = {"text_config": DeepseekV3Config, "vision_config": MoonViTConfig}  # noqa: RUF012

    def __init__(self, text_config: dict, vision_config: dict, media_placeholder_token_id: int, **settings: Any):
        self.text_config = DeepseekV3Config(**text_config)
        self.vision_config = MoonViTConfig(**vision_config)
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**settings)


class MoonViTLayer(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm0, self.norm1 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.wqkv, self.wo = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.ModuleDict(
            {"fc0": nn.Linear(size, config.intermediate_size), "fc1": nn.Linear(config.intermediate_size, size)}
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """x [patches of one image, hidden_size], turns [patches, head_dim / 2] complex."""
        query, key, value = self.wqkv(self.norm0(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for part in (query, key)
        )
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        x = x + self.wo((scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
        return x + self.mlp["fc1"](F.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh"))


class MoonViT(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        size, patch = config.hidden_size, config.patch_size
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, size, patch, patch), "pos_emb": nn.Module()})
        table = torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, size)
        self.patch_embed["pos_emb"].weight = nn.Parameter(table)
        self.encoder = nn.ModuleDict(
            {
                "blocks": nn.ModuleList(MoonViTLayer(config) for _ in range(config.num_hidden_layers)),
                "final_layernorm": nn.LayerNorm(size),
            }
        )

    def forward(self, image: Tensor) -> Tensor:
        """image [3, height, width] -> [squares, patches of a square, hidden_size]."""
        x = self.patch_embed["proj"](image[None])[0]  # [hidden_size, rows, columns]
        _, rows, columns = x.shape
        table: Any = self.patch_embed["pos_emb"].weight
        x = x + F.interpolate(table.permute(2, 0, 1)[None], size=(rows, columns), mode="bicubic")[0]
        x = x.flatten(1).t()
        for layer in self.encoder["blocks"]:  # type: ignore[attr-defined]
            x = layer(x, self._turns(rows, columns))
        x = self.encoder["final_layernorm"](x)
        high, wide = self.config.merge_kernel_size
        squares = x.view(rows // high, high, columns // wide, wide, -1).transpose(1, 2)
        return squares.reshape(-1, high * wide, x.shape[-1])

    def _turns(self, rows: int, columns: int) -> Tensor:
        """Return the rotations of pairs of neighbours: by the column, by the row, by the column, ..."""
        dim = self.config.hidden_size // self.config.num_attention_heads
        frequencies = 10000.0 ** (-torch.arange(0, dim, 4) / dim)
        row, column = (axis.flatten()[:, None] * frequencies for axis in torch.meshgrid(
            torch.arange(rows), torch.arange(columns), indexing="ij"
        ))  # fmt: skip
        angles = torch.stack((column, row), dim=-1).flatten(1)
        return torch.polar(torch.ones_like(angles), angles)


class KimiVLForConditionalGeneration(nn.Module):
    def __init__(self, config: KimiVLConfig):
        super().__init__()
        self.config = config
        vision, size = config.vision_config, config.text_config.hidden_size
        self.vision_tower = MoonViT(vision)
        square = vision.hidden_size * math.prod(vision.merge_kernel_size)
        self.multi_modal_projector = nn.ModuleDict(
            {
                "pre_norm": nn.LayerNorm(vision.hidden_size),
                "linear_1": nn.Linear(square, square),
                "linear_2": nn.Linear(square, size),
            }
        )
        self.language_model = DeepseekV3ForCausalLM._from_config(
            config.text_config, dtype=torch.float32, attn_implementation="eager"
        )

    def image_features(self, pixel_values: Tensor, image_grid_hws: Tensor) -> Tensor:
        """pixel_values [patches, 3, patch_size, patch_size], row by row -> [features, the text model's hidden size]."""
        projector, features = self.multi_modal_projector, []
        sizes = image_grid_hws.tolist()
        for (rows, columns), patches in zip(sizes, pixel_values.split([r * c for r, c in sizes]), strict=True):
            image = patches.view(rows, columns, *patches.shape[1:]).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
            squares = projector["pre_norm"](self.vision_tower(image)).flatten(1)
            features.append(projector["linear_2"](F.gelu(projector["linear_1"](squares))))
        return torch.cat(features)

    def forward(self, input_ids: Tensor, pixel_values: Any = None, image_grid_hws: Any = None, **settings: Any) -> Any:
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            is_visual = (input_ids == self.config.media_placeholder_token_id).unsqueeze(-1)
            embeddings = embeddings.masked_scatter(is_visual, self.image_features(pixel_values, image_grid_hws))
        return self.language_model(inputs_embeds=embeddings, **settings)

    def by_names_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as checkpoints have them: transformers holds the experts of a layer together."""
        text = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        text = revert_weight_conversion(self.language_model, text)
        others = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        return others | {PREFIX + name: tensor.contiguous() for name, tensor in text.items()}

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.by_names_in_files(self.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
        config = self.config.to_dict() | {"architectures": [type(self).__name__], "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    @classmethod
    def from_pretrained(cls, folder: Path) -> "KimiVLForConditionalGeneration":
        names = "text_config", "vision_config", "media_placeholder_token_id"
        config = json.loads((folder / "config.json").read_text())
        model = cls(KimiVLConfig(*(config[name] for name in names)))
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        text = {name.removeprefix(PREFIX): tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
        model.language_model = DeepseekV3ForCausalLM.from_pretrained(
            None, config=model.config.text_config, state_dict=text, dtype=torch.float32, attn_implementation="eager"
        )
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert all(name.startswith(PREFIX) for name in missing)
        return model


class KimiVLProcessor:
    """Processor of text and images: a placeholder is repeated for each visual token."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]):
        self.tokenizer, self.settings = tokenizer, settings

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(self.settings, indent=2))

    @classmethod
    def from_pretrained(cls, folder: Path) -> "KimiVLProcessor":
        from transformers import AutoTokenizer

        settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
        return cls(AutoTokenizer.from_pretrained(folder), settings)

    def apply_chat_template(self, messages: list[dict], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(self, text: list[str], images: Any = None, **_: Any) -> dict[str, Tensor]:
        patches, sizes = zip(*map(self._patches, images or []), strict=True) if images else ((), ())
        parts = text[0].split("<|media_pad|>")
        counts = [rows * columns // math.prod(self.settings["merge_kernel_size"]) for rows, columns in sizes]
        expanded = parts[0] + "".join("<|media_pad|>" * n + p for n, p in zip(counts, parts[1:], strict=True))
        inputs = {"input_ids": torch.tensor([self.tokenizer.encode(expanded, add_special_tokens=False)])}
        if images:
            inputs |= {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(sizes)}
        return inputs

    def _patches(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        from PIL import Image, ImageOps

        patch = self.settings["patch_size"]
        whole = (image.width // patch) * (image.height // patch)
        if whole > self.settings["in_token_limit"]:
            scale = math.sqrt(self.settings["in_token_limit"] / whole)
            image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
        high, wide = (patch * n for n in self.settings["merge_kernel_size"])
        image = ImageOps.expand(image, (0, 0, -image.width % wide, -image.height % high), fill=0)
        mean, std = (torch.tensor(self.settings[f"image_{name}"]).view(3, 1, 1) for name in ("mean", "std"))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        pixels = (pixels.float() - mean * 255) / (std * 255)
        patches = pixels.unfold(1, patch, patch).unfold(2, patch, patch)  # [3, rows, columns, patch, patch]
        return patches.permute(1, 2, 0, 3, 4).flatten(0, 1), (patches.shape[1], patches.shape[2])
