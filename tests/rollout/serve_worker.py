"""`swift rollout` with a Python of one's choice: python -m tests.rollout.serve_worker '{"model": ..., "port": ...}'"""

import json
import sys

from megaswift.tasks.rollout.options import RolloutOptions
from megaswift.tasks.rollout.serve import run

if __name__ == "__main__":
    run(RolloutOptions(**json.loads(sys.argv[1])))
