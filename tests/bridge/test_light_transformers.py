"""A tokenizer is loaded without transformers' models, which work when they are imported later."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

TOKENIZER = """
import sys
from collections import Counter
from pathlib import Path

opened = Counter()
sys.addaudithook(lambda event, arguments: opened.update([str(arguments[0])]) if event == "open" else None)
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
heavy = {"sklearn", "scipy", "pandas", "torch._dynamo", "torchvision", "transformers.generation.utils",
         "transformers.modeling_utils", "transformers.models.auto.modeling_auto"} & set(sys.modules)
assert not heavy, heavy
source = str(Path(sys.modules["transformers"].__file__).parent / "models" / "bert" / "modeling_bert.py")
assert opened[source] == 1, opened[source]
"""
MODELS = """
import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.models.auto import auto_factory
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert isinstance(model, GenerationMixin)
words = tokenizer("user assistant", return_tensors="pt")
assert model.generate(**words, max_new_tokens=2, min_new_tokens=2).shape[1] == words["input_ids"].shape[1] + 2
assert "configuration of a Qwen3Model" in Qwen3Config.__doc__


class Hub(torch.nn.Module):
    def prepare_inputs_for_generation(self):
        pass


# As for a class from a Python file of a hub.
mixed = auto_factory.add_generation_mixin_to_remote_model(Hub)
assert issubclass(mixed, GenerationMixin) and mixed.__name__ == "Hub"
"""
# transformers alone, for the same.
WITHOUT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("model"), "qwen3")
    tiny.save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("program", [TOKENIZER, TOKENIZER + MODELS, WITHOUT + MODELS], ids=["alone", "then", "without"])
def test_a_tokenizer_needs_no_models(program: str, model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_models_that_are_there_stay_as_they_are(model: Path) -> None:
    program = "import sys, transformers.models.auto.modeling_auto as auto\n"
    program += "from megaswift.bridge.checkpoint.pretrained import load_tokenizer\nfrom pathlib import Path\n"
    program += "tokenizer = load_tokenizer(Path(sys.argv[1]))\n" + MODELS
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


DRAFTS = """
from transformers import GenerationMixin
from transformers.generation import candidate_generator

assert candidate_generator.is_sklearn_available()
assert "sklearn" not in sys.modules
assert candidate_generator.roc_curve([1], [0.5]) == ([1], [0.5])
assert "sklearn.metrics" in sys.modules
"""


def test_models_need_no_scikit_learn(model: Path, tmp_path: Path) -> None:
    """With a package of its name, since it is not among what is installed for tests."""
    for file, text in {
        "sklearn/__init__.py": "",
        "sklearn/metrics.py": "def roc_curve(matches, probabilities):\n    return matches, probabilities\n",
        "scikit_learn-1.7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.7.0\n",
        "scikit_learn-1.7.0.dist-info/RECORD": "sklearn/__init__.py,,\nsklearn/metrics.py,,\n",
        "scikit_learn-1.7.0.dist-info/top_level.txt": "sklearn\n",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + TOKENIZER + DRAFTS
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
