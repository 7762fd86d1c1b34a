"""coin_reward.py for ms-swift."""

# pyright: reportMissingImports=false

import zlib

from swift.rewards import ORM, orms


class Coin(ORM):
    def __call__(self, completions, **columns):
        return [float(zlib.crc32(text.encode()) % 2) for text in completions]


orms["coin"] = Coin
