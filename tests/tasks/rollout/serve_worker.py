"""`swift rollout` by the Python that runs this: -m tests.tasks.rollout.serve_worker '{"model": ..., "port": ...}'"""

import json
import sys

from megaswift.tasks.options.rollout import RolloutOptions
from megaswift.tasks.rollout.serve import run

if __name__ == "__main__":
    run(RolloutOptions(**json.loads(sys.argv[1])))
