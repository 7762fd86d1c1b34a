"""LoRA (https://arxiv.org/abs/2106.09685): adapters beside a model's matrices, as rows of the bridge's table."""
